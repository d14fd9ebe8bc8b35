"""Requests and outputs on the wire, the scheduler, the pretended model and the balancer."""

import pytest

from dp_engine import wire
from dp_engine.balance import Balancer
from dp_engine.scheduler import Scheduler
from dp_engine.tokens import END_OF_TEXT, Detokenizer, encode_text, natural_length, write
from dp_engine.versions import wire_of
from dp_engine.waves import Waves
from dp_engine.wire import FinishReason, Outputs, Request

SAMPLING = {"max_tokens": 3}
OLD = ["r", [1, 2], None, SAMPLING, None, 257, 12.5, None, None, None]  # up to 0.16: eos id in slot 5
NEW = ["r", [1, 2], None, SAMPLING, None, 12.5, None, None, None]  # from 0.17: arrival time in slot 5
LAYOUTS = {
    "0.11": [*OLD, None, 1, 4, 0, None],
    "0.14": [*OLD, None, 1, 4, 0, None, "ext"],
    "0.15": [*OLD, None, 1, 4, 0, None, False, "ext"],
    "0.16": [*OLD, None, 1, 4, 0, None, False, "ext", None],
    "0.17": [*NEW, None, 1, 4, 0, None, False, "ext", None],
    "0.20": [*NEW, None, 1, 4, 0, None, False, "ext", None, None],
    "0.21": [*NEW, None, None, 1, 4, 0, None, False, "ext", None, None, False],
    "0.28": [*NEW, None, None, 1, 4, 0, None, False, "ext", None, None, False, None],
    "0.31": [*NEW, None, True, 1, 4, 0, None, False, "ext", None, None, False, None, None],
}


@pytest.mark.parametrize("version", LAYOUTS)
def test_a_request_is_understood_in_every_versions_layout(version):
    request = wire.decode_add(wire.encode(LAYOUTS[version]))
    assert request == Request(request_id="r", prompt_token_ids=[1, 2], sampling=SAMPLING, client_index=1, wave=4)


def test_a_request_cut_after_its_required_slots_belongs_to_the_first_front_end():
    request = wire.decode_add(wire.encode(NEW))
    assert (request.client_index, request.wave) == (0, 0)


def test_our_own_requests_have_all_22_slots_of_the_newest_layout():
    payload = wire.encode_add(
        request_id="r", external_id="e", prompt_token_ids=[7], sampling=SAMPLING, rank=2, client_index=3, wave=5
    )
    slots = wire.decode(payload)
    assert len(slots) == 22
    assert isinstance(slots[5], float)
    assert (slots[0], slots[8], slots[11], slots[12], slots[16]) == ("r", 2, 3, 5, "e")
    assert wire.decode_add(payload).client_index == 3


@pytest.mark.parametrize("payload", [["bad"], {"a": 1}, 5, [*NEW[:3], 5, *NEW[4:]], [7, *NEW[1:]]])
def test_what_is_no_request_is_refused(payload):
    with pytest.raises(ValueError, match="not a request array"):
        wire.decode_add(wire.encode(payload))


def test_outputs_survive_the_wire_and_extra_slots_of_newer_versions_are_ignored():
    message = Outputs(engine=1, outputs=[["r", [5], None, None, None, 1, None]], stats={"a": 1}, finished=["r"])
    assert wire.decode_outputs(wire.encode_outputs(message, now=1.0)) == message
    # A real 0.32 engine's answer to a utility call: nine slots.
    real = wire.encode([1, [], None, 1656.25, [101, None, [None, ["generate"]]], None, None, None, None])
    assert wire.decode_outputs(real) == Outputs(engine=1, utility=[101, None, [None, ["generate"]]])


def request(name="r", *, client=0, prompt=(1, 2), **sampling):
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling={"max_tokens": 3, **sampling},
        client_index=client,
        wave=0,
    )


def test_a_request_gets_one_token_a_step_and_ends_at_its_limit():
    scheduler = Scheduler(rank=4, max_num_seqs=8)
    scheduler.add(request(client=2))
    steps = [scheduler.step()[2] for _ in range(3)]
    assert [len(step.outputs[0][1]) for step in steps] == [1, 1, 1]
    assert [step.outputs[0][5] for step in steps] == [None, None, FinishReason.LENGTH]
    assert [step.finished for step in steps] == [None, None, ["r"]]
    assert steps[0].engine == 4
    assert not scheduler.unfinished
    assert scheduler.step() == {}


def test_requests_beyond_the_limit_wait_their_turn():
    scheduler = Scheduler(rank=0, max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name))
    assert scheduler.counts == (3, 0)
    scheduler.step()
    assert scheduler.counts == (1, 2)
    scheduler.step()
    scheduler.step()
    assert scheduler.counts == (1, 0)
    assert [item[0] for item in scheduler.step()[0].outputs] == ["c"]


def test_an_aborted_request_leaves_whether_it_waits_or_runs():
    scheduler = Scheduler(rank=0, max_num_seqs=1)
    scheduler.add(request("a", client=0))
    scheduler.add(request("b", client=1))
    scheduler.step()
    assert scheduler.abort(["b", "unknown"]) == {1: ["b"]}
    assert scheduler.abort(["a"]) == {0: ["a"]}
    assert not scheduler.unfinished


def test_a_stop_token_ends_a_request_but_not_before_min_tokens():
    third = [next_token for next_token, _ in zip(write([1, 2], None), range(3), strict=False)][2]
    scheduler = Scheduler(rank=0, max_num_seqs=1)
    scheduler.add(request(max_tokens=50, stop_token_ids=[third]))
    ends = [step[0].outputs[0] for step in (scheduler.step() for _ in range(3))]
    assert ends[-1][5:] == [FinishReason.STOP, third]
    scheduler.add(request(max_tokens=10, stop_token_ids=list(range(256)), min_tokens=5))
    for _ in range(4):
        assert scheduler.step()[0].outputs[0][5] is None
    assert scheduler.step()[0].outputs[0][5] == FinishReason.STOP


def test_a_text_ends_by_itself_unless_told_to_go_on():
    length = natural_length([1, 2], None)
    scheduler = Scheduler(rank=0, max_num_seqs=2)
    scheduler.add(request("ends", max_tokens=1000))
    scheduler.add(request("goes on", max_tokens=1000, ignore_eos=True))
    for _ in range(length):
        scheduler.step()
    last = {item[0]: item for item in scheduler.step()[0].outputs}
    assert last["ends"][1] == [END_OF_TEXT]
    assert last["ends"][5] == FinishReason.STOP
    assert last["goes on"][5] is None


def test_kv_usage_grows_with_prompts_and_is_zero_when_idle():
    scheduler = Scheduler(rank=0, max_num_seqs=2)
    assert scheduler.kv_usage == 0
    scheduler.add(request(prompt=range(100), max_tokens=1))
    scheduler.add(request("s", prompt=range(100), max_tokens=9))
    scheduler.step()
    assert 0 < scheduler.kv_usage < 0.01


def text(prompt, seed=None, tokens=80):
    return Detokenizer().feed(token for token, _ in zip(write(encode_text(prompt), seed), range(tokens), strict=False))


def test_the_same_prompt_and_seed_always_give_the_same_words():
    assert text("hello") == text("hello")
    assert text("hello").startswith(" last every no it th"), "part of what docs and dashboards show"
    assert len({text("hello"), text("hello", 1), text("hellp")}) == 3


def test_characters_of_several_bytes_come_whole_and_foreign_tokens_are_shown():
    detokenizer = Detokenizer()
    assert [detokenizer.feed([byte]) for byte in "é".encode()] == ["", "é"]
    assert detokenizer.feed([70000, END_OF_TEXT, 65]) == "<70000>A"
    assert detokenizer.feed([0xC3], final=True) == "\ufffd"


def picks(balancer, count):
    return [balancer.pick() for _ in range(count)]


def test_an_idle_group_is_used_in_turns():
    assert picks(Balancer(engines=3, client=0, clients=1), 6) == [0, 1, 2, 0, 1, 2]


def test_requests_one_after_the_other_go_to_different_engines_too():
    balancer = Balancer(engines=3, client=0, clients=1)
    chosen = []
    for _ in range(4):
        chosen.append(balancer.pick())
        balancer.finished(chosen[-1])
        balancer.counts_received([[0, 0, 0.0]] * 3)
    assert chosen == [0, 1, 2, 0]


def test_front_ends_begin_at_different_engines():
    assert [Balancer(engines=4, client=client, clients=2).pick() for client in (0, 1)] == [0, 2]


def test_a_busy_engine_is_left_alone_until_the_others_are_as_busy():
    balancer = Balancer(engines=2, client=0, clients=1)
    balancer.counts_received([[0, 3, 0.0], [0, 0, 0.0]])
    assert picks(balancer, 3) == [1, 1, 1]
    assert sorted(picks(balancer, 2)) == [0, 1]


def test_own_requests_count_even_when_the_coordinators_counts_are_old():
    balancer = Balancer(engines=2, client=0, clients=1)
    picks(balancer, 3)
    balancer.counts_received([[0, 0, 0.0], [0, 0, 0.0]])
    assert balancer.in_flight == (2, 1)
    assert balancer.pick() == 1
    for engine in (0, 0, 1, 1, 1):
        balancer.finished(engine)
    assert balancer.in_flight == (0, 0)


def test_with_two_front_ends_own_requests_stand_for_the_others_as_well():
    balancer = Balancer(engines=2, client=0, clients=2)
    balancer.sent(0)
    balancer.counts_received([[0, 1, 0.0], [0, 2, 0.0]])
    assert (balancer.score(0), balancer.score(1)) == (2, 2)


def test_waiting_requests_weigh_more_where_the_cache_is_full():
    balancer = Balancer(engines=2, client=0, clients=1)
    balancer.counts_received([[2, 0, 0.9], [2, 2, 0.5]])
    assert balancer.score(0) == pytest.approx(2 + 6 * 2 * 0.4)
    assert balancer.score(1) == 4
    assert balancer.pick() == 1


def test_counts_of_versions_before_0_27_have_no_cache_usage():
    balancer = Balancer(engines=1, client=0, clients=1)
    balancer.counts_received([[2, 3]])
    assert balancer.score(0) == 5


def waves(rank=1, version="0.33"):
    return Waves(rank=rank, wire=wire_of(version))


def test_a_request_starts_the_wave_once():
    group = waves()
    assert group.request_arrived(0) == 0
    assert group.request_arrived(0) is None
    assert group.running


def test_a_rank_adopts_a_newer_wave_and_ignores_an_older_start():
    group = waves()
    assert group.request_arrived(4) == 4
    assert group.wave == 4
    other = waves()
    assert other.start_received(2, 0) is None
    assert (other.running, other.wave) == (True, 2)
    late = waves(rank=2)
    late.wave = 3
    assert late.start_received(2, 0) is None
    assert not late.running


def test_the_rank_that_started_a_wave_is_not_started_again():
    group = waves()
    group.start_received(0, 1)
    assert not group.running
    group.start_received(0, b"\1\0")
    assert group.running, "bytes name nobody"


def test_rank_0_reports_its_own_start():
    assert waves(rank=0).start_received(0, 1) == 0
    assert waves(rank=1, version="0.32").request_arrived(0) is None
    assert waves(rank=0, version="0.32").request_arrived(0) == 0


def test_a_group_stops_only_on_the_steps_that_ask_and_rank_0_reports_it():
    for rank, report in ((0, 0), (1, None)):
        group = waves(rank=rank)
        group.request_arrived(0)
        assert group.stepped(any_unfinished=True) is None
        finished = [group.stepped(any_unfinished=False) for _ in range(2, 17)]
        assert finished[:-1] == [None] * 14
        assert finished[-1].report == report
        assert (group.running, group.wave, group.step_counter) == (False, 1, 0)
