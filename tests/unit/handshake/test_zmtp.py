from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_handshake import zmtp

DATA = Path(__file__).parent / "data"


def captured(direction: str) -> list[bytes]:
    """Greeting and READY command of real libzmq sockets, then their messages as bytes on the wire."""
    output = []
    for line in (DATA / "pair_dense.tap.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry.get("dir") != direction:
            continue
        if entry["kind"] == "message":
            output.append(zmtp.message(bytes.fromhex(entry["hex"][0])))
        elif entry["kind"] == "command":
            body = bytes.fromhex(entry["hex"])
            output.append(bytes((4, len(body))) + body)
        elif entry["kind"] == "greeting":
            output.append(bytes.fromhex(entry["hex"]))
    return output


def test_a_connection_opens_with_the_same_bytes_as_a_libzmq_dealer() -> None:
    # libzmq leaves the filler of the signature's length field at 3 for a DEALER of identity length 2; it is not read.
    greeting, command = captured("engine->head")[:2]
    ours = zmtp.opening(b"\x01\x00")
    assert ours[10:64] == greeting[10:64]
    assert ours[64:] == command


def test_messages_of_a_real_head_are_read_however_they_are_cut() -> None:
    stream = b"".join(captured("head->engine"))
    for size in (1, 7, 64, len(stream)):
        state, messages = zmtp.Incoming(), []
        for start in range(0, len(stream), size):
            messages += zmtp.receive(state, stream[start : start + size])[0]
        assert state.ready
        assert [len(frames) for frames in messages] == [1]
        assert messages[0][0].startswith(b"\x82\xa9addresses")


def test_a_ping_is_answered_with_its_context() -> None:
    state = zmtp.Incoming(greeted=True)
    _, reply = zmtp.receive(state, b"\x04\x0b\x04PING\x00\x0aabcd")
    assert reply == b"\x04\x09\x04PONGabcd"


def test_long_and_several_frames_make_one_message() -> None:
    state = zmtp.Incoming(greeted=True)
    long = b"x" * 300
    messages, _ = zmtp.receive(state, b"\x01\x01a" + zmtp.message(long))
    assert messages == [[b"a", long]]


def test_another_protocol_is_noticed() -> None:
    with pytest.raises(zmtp.ProtocolError):
        zmtp.receive(zmtp.Incoming(), b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
    with pytest.raises(zmtp.ProtocolError):
        zmtp.receive(zmtp.Incoming(greeted=True), b"\x02" + b"\xff" * 8)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, greeted: bool) -> None:
    state = zmtp.Incoming(greeted=greeted)
    try:
        zmtp.receive(state, data)
    except zmtp.ProtocolError:
        return
    assert len(state.buffer) <= len(data)
