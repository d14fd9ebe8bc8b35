"""The coordinator frame by frame."""

import pytest

from dp_engine import wire
from dp_engine.coordinator import BarrierBrokenError, Coordinator
from dp_engine.versions import wire_of
from dp_engine.wire import Outputs


def coordinator(*, size=2, waves=True, version="0.33"):
    return Coordinator(size=size, waves=waves, wire_family=wire_of(version))


def started(**kwargs):
    core = coordinator(**kwargs)
    for _ in range(kwargs.get("size", 2)):
        core.from_back(b"\1", 0.0)
    return core


def shown(sends):
    """Sends as readable tuples."""
    rows = []
    for send in sends:
        if send.to == "front":
            rows.append(("front", wire.decode(send.frames[0])))
        elif send.frames == [b"READY"]:
            rows.append(("back", "READY"))
        else:
            rows.append(("back", send.frames[0][0], wire.decode(send.frames[1])))
    return rows


def says(engine, **fields):
    return wire.encode_outputs(Outputs(engine=engine, **fields), now=0.0)


def counts(waiting, running, *, wave=0, step=0, kv=0.0):
    return {
        "num_waiting_reqs": waiting,
        "num_running_reqs": running,
        "current_wave": wave,
        "step_counter": step,
        "kv_cache_usage": kv,
    }


def test_ready_goes_out_when_the_last_engine_has_subscribed():
    core = coordinator(size=3)
    assert core.timeout_s(0.0) is None
    assert core.from_back(b"\1", 0.0) == []
    assert core.from_back(b"\1", 0.0) == []
    assert shown(core.from_back(b"\1", 0.0)) == [("back", "READY")]


@pytest.mark.parametrize("frame", [b"\0", b"hello"])
def test_anything_but_a_subscription_breaks_the_barrier(frame):
    core = coordinator(size=3)
    core.from_back(b"\1", 0.0)
    with pytest.raises(BarrierBrokenError):
        core.from_back(frame, 0.0)


def test_a_late_subscriber_makes_ready_go_out_again_and_a_leaver_does_not():
    core = started()
    assert shown(core.from_back(b"\1", 1.0)) == [("back", "READY")]
    assert core.from_back(b"\0", 1.0) == []


def test_counts_are_published_at_once_then_after_100_ms_and_every_5_s_when_nothing_changes():
    core = started(waves=False)
    assert core.timeout_s(0.0) == 0
    assert shown(core.tick(0.0)) == [("front", [[[0, 0, 0.0], [0, 0, 0.0]], 0, False])]
    assert core.timeout_s(0.0) == pytest.approx(5.0)
    core.from_engine(says(1, stats=counts(3, 2, kv=0.25)))
    assert core.timeout_s(0.04) == pytest.approx(0.06)
    assert shown(core.tick(0.1)) == [("front", [[[0, 0, 0.0], [3, 2, 0.25]], 0, False])]
    assert core.timeout_s(0.1) == pytest.approx(5.0)


def test_a_lock_stepped_group_gets_50_ms_for_the_counts_of_a_step():
    core = started(waves=True)
    core.from_engine(says(0, stats=counts(0, 1, step=1)))
    assert core.timeout_s(10.0) == pytest.approx(0.05)
    assert started(waves=False).timeout_s(10.0) == 0


def test_the_counts_of_the_finished_step_are_published_when_a_newer_one_has_begun():
    core = started()
    core.from_engine(says(0, stats=counts(0, 4, step=1)))
    core.from_engine(says(1, stats=counts(0, 5, step=1)))
    core.from_engine(says(0, stats=counts(0, 9, step=2)))
    assert shown(core.tick(1.0)) == [("front", [[[0, 4, 0.0], [0, 5, 0.0]], 0, False])]
    assert shown(core.tick(2.0)) == [("front", [[[0, 9, 0.0], [0, 5, 0.0]], 0, False])]


def test_counts_of_an_older_step_are_told_of_and_taken(capfd):
    core = started()
    core.from_engine(says(0, stats=counts(0, 4, step=5)))
    core.from_engine(says(1, stats=counts(0, 7, step=5)))
    assert capfd.readouterr().err == ""
    core.from_engine(says(1, stats=counts(0, 6, step=4)))
    assert "out-of-order step (0, 4)" in capfd.readouterr().err
    assert shown(core.tick(1.0)) == [("front", [[[0, 4, 0.0], [0, 6, 0.0]], 0, False])]


def test_counts_of_an_unknown_engine_are_dropped():
    core = started(waves=False)
    core.from_engine(says(9, stats=counts(1, 1)))
    assert shown(core.tick(1.0)) == [("front", [[[0, 0, 0.0], [0, 0, 0.0]], 0, False])]


def test_a_wave_starts_on_an_engines_word_and_everyone_else_is_told():
    core = started()
    assert shown(core.from_engine(says(1, start_wave=0))) == [("front", [None, 0, True]), ("back", 2, [0, 1])]
    assert core.from_engine(says(0, start_wave=0)) == [], "already running"
    assert shown(core.from_engine(says(0, wave_complete=0))) == [("front", [None, 1, False])]
    assert core.from_engine(says(1, start_wave=0)) == [], "an old wave"
    assert shown(core.from_engine(says(1, start_wave=1))) == [("front", [None, 1, True]), ("back", 2, [1, 1])]


def test_completing_an_old_wave_does_not_stop_a_newer_one():
    core = started()
    core.from_engine(says(1, start_wave=3))
    assert core.from_engine(says(0, wave_complete=2)) == []
    assert core.running


def test_dense_groups_have_no_waves():
    core = started(waves=False)
    assert core.from_engine(says(1, start_wave=0)) == []
    assert core.from_front(wire.encode([b"\0\0", 0])) == []


def test_front_ends_start_waves_up_to_0_32_and_not_later():
    first_request = wire.encode([b"\1\0", 0])
    # The identity's bytes are passed on as they came: they never match a rank, so nobody is left out.
    assert shown(started(version="0.32").from_front(first_request)) == [("back", 2, [0, b"\1\0"])]
    assert started(version="0.33").from_front(first_request) == []
    assert started(version="0.32").from_front(b"\1") == []
