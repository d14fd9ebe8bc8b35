"""Any bytes in any order: the relay neither breaks nor lets anything through that would end vLLM's head."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dp_handshake import protocol
from dp_handshake.protocol import Handshake

SIZE, HEAD_RANKS = 6, 2
PEERS = [
    protocol.Peer(pod="g-head", address="10.0.0.1", first_rank=0, ranks=2),
    protocol.Peer(pod="g-w-0", address="10.0.0.2", first_rank=2, ranks=2),
    protocol.Peer(pod="g-w-1", address="10.0.0.3", first_rank=4, ranks=2),
]

identities = st.one_of(
    st.integers(0, 9).map(lambda rank: rank.to_bytes(2, "little")), st.binary(max_size=4), st.binary(max_size=255)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
handshake_messages = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["HELLO", "READY", "BYE", 1]),
        "local": st.sampled_from([False, False, False, True, 0]),
        "headless": st.sampled_from([True, True, True, False, None]),
        "extra": values,
    },
)
good = st.sampled_from(["HELLO", "READY"]).map(lambda status: {"status": status, "local": False, "headless": True})
payloads = st.one_of(
    good.map(msgspec.msgpack.encode),
    handshake_messages.map(msgspec.msgpack.encode),
    values.map(msgspec.msgpack.encode),
    st.binary(max_size=40),
    st.just(b"\x91" * 5000),  # nested deeper than any decoder goes
)
addresses = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "::ffff:10.0.0.2", "192.0.2.9", "", "nonsense"])
descriptors = st.one_of(st.none(), st.integers(1, 6))
events = st.one_of(
    st.builds(
        protocol.PeerFrames,
        identity=identities,
        frames=st.lists(payloads, min_size=1, max_size=1) | st.lists(payloads, max_size=3),
        address=addresses,
        connection=descriptors,
    ),
    st.builds(protocol.PeerGone, st.integers(1, 6)),
    st.builds(protocol.Tick, st.dictionaries(addresses, st.integers(1, 3), max_size=3)),
)
steps = st.lists(st.tuples(events, st.booleans()), max_size=60)


def head_accepts(states: dict[int, str], effect: protocol.Forward) -> None:
    """What vLLM's head checks (protocol notes §2.5)."""
    assert effect.rank in states
    message = msgspec.msgpack.decode(effect.frame)
    assert isinstance(message, dict)
    assert message["local"] is False
    assert message["headless"] is True
    assert message["status"] == effect.status
    before, after = ("NEW", "CONNECTED") if effect.status == "HELLO" else ("CONNECTED", "READY")
    assert states[effect.rank] == before
    states[effect.rank] = after


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    [
        (protocol.PeerFrames(identity=b"\x02\x00", frames=[], address="10.0.0.2", connection=1), True),
        (protocol.PeerFrames(identity=b"\x02\x00", frames=[], address="10.0.0.2", connection=None), False),
    ]
)
@given(steps)
def test_whatever_comes_the_head_gets_only_what_it_expects(script: list[tuple[protocol.Event, bool]]) -> None:
    state = Handshake(size=SIZE, head_ranks=HEAD_RANKS, headless=True, stages=bytearray(SIZE))
    protocol.step(state, protocol.Released(PEERS), now=0)
    head = dict.fromkeys(range(HEAD_RANKS, SIZE), "NEW")
    owner = {rank: peer.address for peer in PEERS for rank in range(peer.first_rank, peer.first_rank + peer.ranks)}
    for time, (event, head_answers) in enumerate(script):
        for effect in protocol.step(state, event, now=float(time)):
            if not isinstance(effect, protocol.Forward):
                continue
            head_accepts(head, effect)
            assert isinstance(event, protocol.PeerFrames)
            assert event.address.removeprefix("::ffff:") == owner[effect.rank]
            if effect.status == "READY":
                protocol.step(state, protocol.Delivered(effect.rank), now=float(time))
            elif head_answers:
                protocol.step(state, protocol.HeadFrames(effect.rank, [b"\x80"]), now=float(time))
        assert len(state.violations) <= protocol.MAX_VIOLATIONS
        assert len(state.lost) <= protocol.MAX_LOST
        assert state.violation_count >= sum(entry.count for entry in state.violations)
        assert all(len(entry.message) < 1000 for entry in state.violations)
        assert len(state.connections) == len(state.connection_of)


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(0, 59))
def test_a_restart_at_any_moment_forwards_no_second_hello(
    script: list[tuple[protocol.Event, bool]], restart_at: int
) -> None:
    state = Handshake(size=SIZE, head_ranks=HEAD_RANKS, headless=True, stages=bytearray(SIZE))
    protocol.step(state, protocol.Released(PEERS), now=0)
    hellos: list[int] = []
    for time, (event, head_answers) in enumerate(script):
        if time == restart_at:
            old, state = state, Handshake(size=SIZE, head_ranks=HEAD_RANKS, headless=True, stages=bytearray(SIZE))
            protocol.step(state, protocol.Released(PEERS), now=time)
            protocol.resume(state, bytes(old.stages), old.init, now=time)
        for effect in protocol.step(state, event, now=float(time)):
            if isinstance(effect, protocol.Forward) and effect.status == "HELLO":
                hellos.append(effect.rank)
                if head_answers:
                    protocol.step(state, protocol.HeadFrames(effect.rank, [b"\x80"]), now=float(time))
    assert len(hellos) == len(set(hellos))
