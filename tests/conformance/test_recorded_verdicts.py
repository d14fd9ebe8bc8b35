"""What four releases of vLLM were seen to do with a handshake, and what our state machines do with the same frames.

Needs no vLLM: `data/handshake_head.json` holds the frames that came to vLLM's own loop (two ranks, rank 0 local) and
how it ended, `data/handshake_engine.json` the INITs that came to vLLM's engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init, decode_init
from dp_engine.versions import wire_of
from tests.conformance.conftest import RELEASES
from tests.conformance.report import Table

DATA = Path(__file__).parent / "data"
HEAD_CASES = json.loads((DATA / "handshake_head.json").read_text())
ENGINE_CASES = json.loads((DATA / "handshake_engine.json").read_text())
# Words in our messages that carry each verdict.
WORDS = {
    "unexpected data parallel rank": "unknown rank",
    "expected it to be": "wrong place",
    "must use --headless": "must be headless",
    "must not use --headless": "must not be headless",
    " message for ": "wrong order",
    "Configuration mismatch": "other hash",
}


def frame(part: Any) -> bytes:
    if isinstance(part, str):
        return bytes.fromhex(part.removeprefix("hex:"))
    return msgspec.msgpack.encode(part)


def verdict(case: dict[str, Any], version: str) -> str:
    wire = wire_of(version)
    addresses = Addresses(inputs=["tcp://h:1"], outputs=["tcp://h:2"])
    lockstep = case["moe"] or wire.dense_lock_step
    machine = FrontEndHandshake(
        expected=[Expected(rank=0, local=True), Expected(rank=1, local=False)],
        init=Init(addresses=addresses, parallel_config={}),
        remote_headless=not case["external"],
        config_hash="HASH" if lockstep and wire.ready_has_hash else None,
        ready_has_blocks=wire.ready_has_blocks,
    )
    try:
        for identity, *parts in case["messages"]:
            machine.receive([bytes.fromhex(identity), *map(frame, parts)])
    except HandshakeError as error:
        return next(word for text, word in WORDS.items() if text in str(error))
    except msgspec.DecodeError:
        return "undecodable"
    except KeyError:
        return "missing key"
    except ValueError:
        return "extra frame"
    return "ready" if machine.done else "waits"


@pytest.mark.parametrize("release", RELEASES)
def test_our_head_judges_every_recorded_handshake_as_the_release_did(release: str, compatibility: Table) -> None:
    with compatibility.cell(f"{len(HEAD_CASES)} recorded handshakes at our head", release, moe=None):
        ours = {case["name"]: verdict(case, RELEASES[release]) for case in HEAD_CASES}
        assert ours == {case["name"]: case["verdict"][release] for case in HEAD_CASES}


@pytest.mark.parametrize("release", RELEASES)
def test_our_engine_takes_and_refuses_the_same_init_messages(release: str, compatibility: Table) -> None:
    with compatibility.cell(f"{len(ENGINE_CASES)} recorded INITs at our engine", release, moe=None):
        for case in ENGINE_CASES:
            try:
                decode_init(msgspec.msgpack.encode(case["init"]))
            except msgspec.ValidationError:
                ours = "refused"
            else:
                ours = "accepted"
            assert ours == case["verdict"], case["name"]
