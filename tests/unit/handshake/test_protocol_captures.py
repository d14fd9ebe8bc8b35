"""Real bytes through the state machine: what vLLM 0.11 and 0.32 sent each other, tapped between head and rank 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dp_handshake import proctcp, protocol
from dp_handshake.protocol import Answer, Forward, Handshake, Stage

DATA = Path(__file__).parent / "data"
EXTERNAL = {"ext_moe.tap.jsonl"}


def messages(name: str) -> list[tuple[float, str, bytes]]:
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return [(line["t"], line["dir"], bytes.fromhex(line["hex"][0])) for line in lines if line["kind"] == "message"]


@pytest.mark.parametrize(
    "name", ["pair_dense.tap.jsonl", "pair_moe.tap.jsonl", "ext_moe.tap.jsonl", "p011_dense.tap.jsonl"]
)
def test_a_real_handshake_goes_through_unchanged(name: str) -> None:
    state = Handshake(size=2, head_ranks=1, headless=name not in EXTERNAL, stages=bytearray(2))
    peers = [
        protocol.Peer(pod="g-head", address="127.0.0.1", first_rank=0, ranks=1),
        protocol.Peer(pod="g-w-0", address="127.0.0.1", first_rank=1, ranks=1),
    ]
    protocol.step(state, protocol.Released(peers), now=0)
    passed: list[tuple[str, bytes]] = []
    for time, direction, frame in messages(name):
        event: protocol.Event
        if direction == "engine->head":
            event = protocol.PeerFrames(identity=b"\x01\x00", frames=[frame], address="127.0.0.1", connection=9)
        else:
            event = protocol.HeadFrames(1, [frame])
        for effect in protocol.step(state, event, now=time):
            assert isinstance(effect, Forward | Answer), effect
            body = effect.frame if isinstance(effect, Forward) else effect.frames[0]
            passed.append(("engine->head" if isinstance(effect, Forward) else "head->engine", body))
            if isinstance(effect, Forward) and effect.status == "READY":
                protocol.step(state, protocol.Delivered(1), now=time)
    assert passed == [(direction, frame) for _, direction, frame in messages(name)]
    assert len(passed) == 3
    assert state.stages[1] == Stage.READY
    assert state.violations == []


@pytest.mark.parametrize(
    ("name", "port"),
    [
        ("pair_dense.tap.jsonl", 39367),
        ("pair_moe.tap.jsonl", 36365),
        ("p011_dense.tap.jsonl", 38895),
        ("ext_moe.tap.jsonl", 41703),  # inputs are ipc there: the coordinator's input tells instead
    ],
)
def test_the_port_that_loaded_ranks_connect_to_is_found_in_a_real_init(name: str, port: int) -> None:
    assert proctcp.data_port(messages(name)[1][2]) == port


def test_an_unreadable_init_gives_no_port() -> None:
    for init in (b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03", b"\x81\xa9addresses\x81\xa6inputs\x91\xa5tcp:/"):
        assert proctcp.data_port(init) is None
