"""The head's and the engine's side of the handshake, frame by frame, held to bytes of real vLLM 0.32."""

import json
from pathlib import Path

import msgspec
import pytest

from dp_engine import handshake
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init

DATA = Path(__file__).parent / "data"
ADDRESSES = Addresses(inputs=["tcp://h:1"], outputs=["tcp://h:2"], coordinator_input="ci", coordinator_output="co")
GROUP = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": 29501, "data_parallel_size": 2}


def captured(name):
    """Frames of a real head and headless rank 1: [(direction, bytes)]."""
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return [(line["dir"], bytes.fromhex(line["hex"][0])) for line in lines if line["kind"] == "message"]


def head(*, size=2, local=1, config_hash=None, headless=True):
    return FrontEndHandshake(
        expected=[Expected(rank=rank, local=rank < local) for rank in range(size)],
        init=Init(addresses=ADDRESSES, parallel_config={} if config_hash is None else GROUP),
        remote_headless=headless,
        config_hash=config_hash,
    )


def hello(rank, *, local=False, headless=True):
    return [rank.to_bytes(2, "little"), handshake.hello(local=local, headless=headless)]


def ready(rank, *, local=False, headless=True, config_hash=None):
    return [rank.to_bytes(2, "little"), handshake.ready(local=local, headless=headless, config_hash=config_hash)]


@pytest.mark.parametrize(("name", "moe"), [("pair_dense.tap.jsonl", False), ("pair_moe.tap.jsonl", True)])
def test_a_real_rank_is_taken_through_and_gets_what_a_real_head_sent(name, moe):
    (_, real_hello), (_, real_init), (_, real_ready) = captured(name)
    init = handshake.decode_init(real_init)
    digest = msgspec.msgpack.decode(real_ready).get("parallel_config_hash")
    assert (digest is not None) is moe
    machine = FrontEndHandshake(
        expected=[Expected(rank=1, local=False)], init=init, remote_headless=True, config_hash=digest
    )
    identity, answer = machine.receive([b"\1\0", real_hello])
    assert identity == b"\1\0"
    assert msgspec.msgpack.decode(answer) == msgspec.msgpack.decode(real_init)
    assert machine.receive([b"\1\0", real_ready]) == []
    assert machine.done


@pytest.mark.parametrize("name", ["pair_dense.tap.jsonl", "pair_moe.tap.jsonl"])
def test_our_rank_speaks_the_bytes_of_a_real_one(name):
    (_, real_hello), _, (_, real_ready) = captured(name)
    digest = msgspec.msgpack.decode(real_ready).get("parallel_config_hash")
    assert handshake.hello(local=False, headless=True) == real_hello
    assert handshake.ready(local=False, headless=True, config_hash=digest) == real_ready


def test_the_group_is_complete_only_when_every_rank_is_ready():
    machine = head()
    assert machine.waiting_for() == "1 local, 1 remote core engine proc(s) to connect (ranks 0, 1)"
    machine.receive(hello(0, local=True, headless=False))
    machine.receive(hello(1))
    machine.receive(ready(1))
    assert not machine.done
    assert machine.waiting_for() == "1 local, 0 remote core engine proc(s) to start (ranks 0)"
    machine.receive(ready(0, local=True, headless=False))
    assert machine.done


def test_a_negative_number_of_local_ranks_is_waited_for_and_cannot_come():
    """Until 0.31 `-dp 2 -dpl -1` starts a head that counts three remote ranks, of which two exist."""
    machine = FrontEndHandshake(
        expected=[Expected(rank=rank, local=False) for rank in range(2)],
        init=Init(addresses=ADDRESSES, parallel_config={}),
        remote_headless=True,
        config_hash=None,
        never=1,
    )
    for rank in range(2):
        machine.receive(hello(rank))
        machine.receive(ready(rank))
    assert not machine.done


def test_a_rank_256_has_a_two_byte_identity():
    machine = head(size=300, local=0)
    assert machine.receive(hello(256))[0] == b"\0\1"


# The cases recorded with vLLM's own loop: how each one ends there.
FATAL = {
    "unknown rank": ([hello(7)], HandshakeError, "unexpected data parallel rank: 7"),
    "three-byte identity": ([[b"\1\0\0", hello(1)[1]]], HandshakeError, "unexpected data parallel rank: 1"),
    "rank 0 says remote": ([hello(0)], HandshakeError, "HELLO message from remote engine 0, expected it to be local"),
    "rank 1 says local": (
        [hello(1, local=True, headless=False)],
        HandshakeError,
        "HELLO message from local engine 1, expected it to be remote",
    ),
    "remote without --headless": (
        [hello(1, headless=False)],
        HandshakeError,
        "Remote engine 1 must use --headless unless in external or hybrid dp lb mode",
    ),
    "second HELLO": (
        [hello(1), hello(1)],
        HandshakeError,
        "Unexpected HELLO message for remote engine 1 in CONNECTED state",
    ),
    "READY first": ([ready(1)], HandshakeError, "Unexpected READY message for remote engine 1 in NEW state"),
    "READY twice": ([hello(1), ready(1), ready(1)], HandshakeError, "engine 1 in READY state"),
    "junk": ([[b"\1\0", b"\xc1"]], msgspec.DecodeError, "malformed"),
    "missing key": ([[b"\1\0", msgspec.msgpack.encode({"status": "HELLO"})]], KeyError, "local"),
    "empty delimiter": ([[b"\1\0", b"", hello(1)[1]]], ValueError, "too many values to unpack"),
}


@pytest.mark.parametrize("case", FATAL)
def test_a_frame_that_ends_vllms_start_ends_ours(case):
    *before, last = FATAL[case][0]
    machine = head()
    for frames in before:
        machine.receive(frames)
    with pytest.raises(FATAL[case][1], match=FATAL[case][2].replace("(", r"\(")):
        machine.receive(last)


def test_a_headless_rank_is_refused_where_every_node_has_a_front_end():
    machine = head(headless=False)
    assert machine.receive(hello(1, headless=False))
    with pytest.raises(HandshakeError, match="must not use --headless in external or hybrid"):
        head(headless=False).receive(hello(1))


@pytest.mark.parametrize("theirs", ["OTHER", None])
def test_a_rank_with_another_configuration_is_refused(theirs):
    machine = head(config_hash="HASH")
    machine.receive(hello(1))
    with pytest.raises(HandshakeError, match=f"mismatch detected for engine 1. Worker hash: {theirs}"):
        machine.receive(ready(1, config_hash=theirs))


def test_a_dense_head_does_not_compare_hashes():
    machine = head(local=0, size=1)
    machine.receive(hello(0))
    machine.receive(ready(0, config_hash="ANY"))
    assert machine.done


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"addresses": {"inputs": ["a"], "outputs": ["b"]}}, "missing required field `parallel_config`"),
        ([{"inputs": ["a"], "outputs": ["b"]}, {}], "Expected `object`, got `array`"),
    ],
)
def test_an_init_without_both_keys_is_refused_by_the_engine(message, error):
    with pytest.raises(msgspec.ValidationError, match=error):
        handshake.decode_init(msgspec.msgpack.encode(message))


def test_an_init_may_lack_optional_addresses_and_carry_unknown_keys():
    message = {"addresses": {"inputs": ["a"], "outputs": ["b"], "new": 1}, "parallel_config": {"x": 5}, "more": 2}
    init = handshake.decode_init(msgspec.msgpack.encode(message))
    assert init.addresses.coordinator_input is None
    assert init.parallel_config == {"x": 5}


def test_the_log_names_the_ranks_that_are_missing():
    machine = FrontEndHandshake(
        expected=[Expected(rank=rank, local=rank < 2) for rank in range(12)],
        init=Init(addresses=Addresses(inputs=[], outputs=[]), parallel_config={}),
        remote_headless=True,
        config_hash=None,
    )
    machine.receive([b"\0\0", handshake.hello(local=True, headless=False)])
    assert machine.waiting_for() == (
        "1 local, 10 remote core engine proc(s) to connect (ranks 1, 2, 3, 4, 5, 6, 7, 8, …); "
        "1 local, 0 remote core engine proc(s) to start (ranks 0)"
    )
