"""What four releases of vLLM were seen to do with a handshake, and what our state machines do with the same frames.

Needs no vLLM: `data/handshake_head.json` holds the frames that came to vLLM's own loop (two ranks, rank 0 local) and
how it ended, `data/handshake_engine.json` INITs and what `startup_handshake` of each release's engine did with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init
from dp_engine.versions import wire_of
from tests.conformance.conftest import RELEASES, Bed, until
from tests.conformance.front_ends import FrontEnds
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
def test_our_engine_takes_and_refuses_the_same_init_messages(bed: Bed, release: str, compatibility: Table) -> None:
    """A rank that takes its INIT goes on to its group or its model, one that refuses it ends."""
    with compatibility.cell(f"{len(ENGINE_CASES)} recorded INITs at our engine", release, moe=None):
        ours = {case["name"]: engine_verdict(bed, case["init"], RELEASES[release]) for case in ENGINE_CASES}
        assert ours == {case["name"]: case["verdict"][release] for case in ENGINE_CASES}


def engine_verdict(bed: Bed, init: Any, version: str) -> str:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken = "INIT received"
    try:
        front_ends = FrontEnds(context)
        if isinstance(init, dict):
            inputs, outputs = front_ends.addresses.inputs, front_ends.addresses.outputs
            init = {**init, "addresses": {**init["addresses"], "inputs": inputs, "outputs": outputs}}
        group = ("-dp", "2", "-dpl", "1", "-dpr", "1", "-dpa", "127.0.0.1", "-dpp", str(front_ends.rpc_port))
        rank = bed.engine("--headless", "--no-moe", *group, version=version)
        front_ends.shake(rank, init=init)
        until(lambda: taken in rank.text() or not rank.running(), within_s=30, last=rank.log)
        return "accepted" if taken in rank.text() else "refused"
    finally:
        context.destroy(linger=0)
