"""Devices of a rank on every platform, faults that wait their turn, log probabilities, prompts of a budget, probes."""

import os
import re

import msgspec
import pytest

from dp_engine import devices, logprobs, wire
from dp_engine.devices import DeviceError
from dp_engine.engine import config_hash
from dp_engine.faults import Armed, parse_fault
from dp_engine.modes import resolve
from dp_engine.offline import share
from dp_engine.openai_schema import chat_logprobs, completion_logprobs
from dp_engine.options import parse_options
from dp_engine.scheduler import Scheduler
from dp_engine.supervisor import Health, Probe, child_options
from dp_engine.versions import wire_of
from dp_engine.wire import FINISH_NAMES, FinishReason, Request

VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "tpu": "TPU_VISIBLE_CHIPS",
    "ascend": "ASCEND_RT_VISIBLE_DEVICES",
    "cpu": "CPU_VISIBLE_MEMORY_NODES",
}


def of(local_rank, env=None, *, world=2, platform="cuda", version="0.33", ids=None):
    return devices.of_rank(
        local_rank=local_rank, world_size=world, platform=platform, env=env or {}, ids=ids, wire=wire_of(version)
    )


@pytest.mark.parametrize(("platform", "variable"), VARIABLES.items())
def test_every_platform_slices_its_own_variable(platform, variable):
    assert devices.PLATFORMS[platform] == variable
    assert of(1, {variable: "8, 9,10,11"}, platform=platform) == ("10", "11")


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_unset_and_empty_mean_all_devices(env):
    assert of(3, env) == ("6", "7")


def test_ids_that_are_no_numbers_pass_from_0_24_on():
    env = {"ASCEND_RT_VISIBLE_DEVICES": "NPU-a,NPU-b"}
    assert of(1, env, world=1, platform="ascend") == ("NPU-b",)
    with pytest.raises(DeviceError, match="not device numbers"):
        of(1, env, world=1, platform="ascend", version="0.23")
    # On CUDA the variable was left alone since 0.11.2, so nothing had to read it.
    assert of(0, {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, world=1, version="0.17") == ("GPU-1",)


@pytest.mark.parametrize(
    ("version", "platform", "message"),
    [
        ("0.11", "cuda", 'Error setting CUDA_VISIBLE_DEVICES: local range [2, 4) base value: "0,1,2"'),
        ("0.17", "cuda", "DP adjusted local rank 3 is out of bounds"),
        ("0.17", "ascend", 'Error setting ASCEND_RT_VISIBLE_DEVICES: local range [2, 4) base value: "0,1,2"'),
        ("0.33", "tpu", 'Error computing device indices for TPU_VISIBLE_CHIPS: local range [2, 4) base value: "0,1,2"'),
        ("0.33", "xpu", "DP adjusted local rank 3 is out of bounds"),
    ],
)
def test_too_few_devices_are_refused_in_each_releases_words(version, platform, message):
    with pytest.raises(DeviceError, match=re.escape(message)):
        of(1, {devices.PLATFORMS[platform]: "0,1,2"}, version=version, platform=platform)


def test_device_ids_go_before_the_variable():
    assert of(1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ids=("5", "6", "7", "4")) == ("7", "4")
    with pytest.raises(DeviceError, match=re.escape("--device-ids provides 3 devices, but DP rank 1 needs [2, 4)")):
        of(1, ids=("5", "6", "7"))


def test_rocm_reads_both_names_and_refuses_a_contradiction():
    assert devices.detect_platform({"HIP_VISIBLE_DEVICES": "1"}) == "rocm"
    assert of(0, {"HIP_VISIBLE_DEVICES": "3"}, world=1, platform="rocm") == ("3",)
    assert of(0, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}, world=1, platform="rocm") == ("3",)
    with pytest.raises(DeviceError, match="Inconsistent GPU visibility"):
        of(0, {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "4"}, world=1, platform="rocm")


@pytest.mark.parametrize(
    ("env", "platform"),
    [({}, "cuda"), ({"ZE_AFFINITY_MASK": "0"}, "xpu"), ({"CPU_VISIBLE_MEMORY_NODES": "0"}, "cpu")],
)
def test_the_platform_is_what_the_environment_speaks_of(env, platform):
    assert devices.detect_platform(env) == platform


SETS = [
    ("0.11", {"cuda", "rocm", "xpu", "tpu", "ascend", "cpu"}),
    ("0.17", {"xpu", "tpu", "ascend", "cpu"}),
    ("0.33", set()),
]


@pytest.mark.parametrize(("version", "platforms"), SETS)
def test_who_sets_the_variable_depends_on_the_release(version, platforms):
    assert {name for name in devices.PLATFORMS if devices.sets_variable(name, wire_of(version))} == platforms


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_variable_is_restored_after_each_start_even_a_failed_one(monkeypatch, before):
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with pytest.raises(RuntimeError, match="start failed"), devices.applied(name, ("7",)):  # noqa: PT012
        assert os.environ[name] == "7"
        raise RuntimeError("start failed")
    assert os.environ.get(name) == before
    with devices.applied(name, None):
        assert os.environ.get(name) == before


def armed(*texts, rank=0, now=10.0):
    return Armed([parse_fault(text) for text in texts], rank=rank, now=now)


def kinds(faults):
    return [fault.kind for fault in faults]


def test_a_fault_strikes_once_after_its_seconds():
    waiting = armed("hang:seconds=5", "slow-load:seconds=1", "crash:ranks=3")
    assert waiting.next_s == 15.0
    assert waiting.due(14.9) == []
    assert kinds(waiting.due(15.0)) == ["hang"]
    assert waiting.due(99.0) == []
    assert waiting.next_s is None


def test_a_fault_that_waits_for_a_signal_does_nothing_before_it():
    waiting = armed("fatal:on=signal,seconds=2")
    assert waiting.waits_for_signal
    assert waiting.due(1e9) == []
    waiting.signalled(20.0)
    assert waiting.due(21.9) == []
    assert kinds(waiting.due(22.0)) == ["fatal"]
    waiting.signalled(30.0)
    assert waiting.next_s is None
    assert not armed("fatal").waits_for_signal


def test_memory_grows_every_second_until_the_end():
    waiting = armed("grow-memory:mib=3")
    assert [len(waiting.due(second)) for second in (10.0, 10.5, 11.0, 12.0)] == [1, 0, 1, 1]


def test_an_injected_fault_is_only_for_its_ranks():
    waiting = armed(rank=2)
    waiting.add(parse_fault("crash:ranks=1"), now=5.0)
    waiting.add(parse_fault("hang:ranks=2,seconds=1"), now=5.0)
    assert waiting.next_s == 6.0


@pytest.mark.parametrize("text", ["slow-load:on=signal", "crash:on=monday", "grow-memory:mib=much"])
def test_a_fault_that_cannot_come_so_is_refused(text):
    with pytest.raises(ValueError, match="cannot use"):
        parse_fault(text)


def request(name, prompt, **sampling):
    return Request(
        request_id=name,
        prompt_token_ids=[1] * prompt,
        sampling={"max_tokens": 2, **sampling},
        client_index=0,
        wave=0,
    )


def served(scheduler):
    return [item[0] for item in scheduler.step().get(0, wire.Outputs(engine=0)).outputs]


def test_a_long_prompt_takes_as_many_steps_as_its_budget_says():
    scheduler = Scheduler(rank=0, max_num_seqs=4, max_num_batched_tokens=10)
    scheduler.add(request("long", 25))
    assert [served(scheduler) for _ in range(5)] == [[], [], ["long"], ["long"], []]


def test_running_requests_go_on_while_a_prompt_is_read_and_it_gets_what_they_leave():
    scheduler = Scheduler(rank=0, max_num_seqs=4, max_num_batched_tokens=10)
    scheduler.add(request("short", 1, max_tokens=4))
    assert served(scheduler) == ["short"]
    scheduler.add(request("long", 18))
    assert served(scheduler) == ["short"]
    assert served(scheduler) == ["short", "long"]


def test_requests_that_find_no_budget_count_as_running_and_come_later():
    scheduler = Scheduler(rank=0, max_num_seqs=4, max_num_batched_tokens=10)
    scheduler.add(request("first", 10))
    scheduler.add(request("second", 5))
    assert served(scheduler) == ["first"]
    assert scheduler.counts == (0, 2)
    assert served(scheduler) == ["first", "second"]


def through_the_wire(token, count):
    item = wire.decode(wire.encode(logprobs.pack(logprobs.of_token(token, count))))
    return logprobs.unpack(item)[0]


def test_log_probabilities_survive_the_wire():
    found = through_the_wire(65, 2)
    assert (found.token, found.logprob) == (65, -0.125)
    assert found.top == ((65, -0.125), (66, -1.125))
    assert through_the_wire(65, 0).top == ()


def test_plain_lists_of_older_releases_are_read_too():
    found = logprobs.unpack([[[65, 65, 70]], [[-0.5, -0.5, -2.0]], [1]])
    assert found == [logprobs.TokenLogprob(token=65, logprob=-0.5, top=((65, -0.5), (70, -2.0)))]


def test_what_is_no_array_of_log_probabilities_is_refused():
    with pytest.raises(ValueError, match="cannot read log probabilities"):
        logprobs.unpack([["|O", [1, 1], b"x"], ["<f4", [1, 1], b"\0\0\0\0"]])


def test_openais_two_shapes_of_log_probabilities():
    found = [through_the_wire(ord(letter), 1) for letter in "hi"]
    assert completion_logprobs(found, offset=10) == {
        "text_offset": [10, 11],
        "token_logprobs": [-0.125, -0.125],
        "tokens": ["h", "i"],
        "top_logprobs": [{"h": -0.125}, {"i": -0.125}],
    }
    entry = {"token": "h", "logprob": -0.125, "bytes": [104]}
    assert chat_logprobs(found)["content"][0] == {**entry, "top_logprobs": [entry]}


def test_a_request_with_log_probabilities_gets_them_with_each_token():
    scheduler = Scheduler(rank=0, max_num_seqs=1)
    scheduler.add(request("r", 1, logprobs=3))
    item = scheduler.step()[0].outputs[0]
    found = logprobs.unpack(wire.decode(wire.encode(item[2])))
    assert (found[0].token, len(found[0].top)) == (item[1][0], 3)


def test_every_finish_reason_has_vllms_name():
    assert [FINISH_NAMES[reason] for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]


def probed(*rounds, threshold=2):
    """Health after rounds of probes such as "ws": the first server well, the second silent (u: unwell)."""
    health = Health(children=2, threshold=threshold)
    kinds_of = {"w": Probe.WELL, "u": Probe.UNWELL, "s": Probe.SILENT}
    for letters in rounds:
        health.probed([kinds_of[letter] for letter in letters])
    return health


def test_a_supervisor_waits_as_long_as_it_takes_until_all_are_well():
    waiting = probed("ws", "ws", "uw", "ws", "ss")
    assert (waiting.ready, waiting.failed) == (False, None)
    assert probed("ws", "ww").ready


def test_then_a_silent_server_has_failed_after_the_threshold_and_an_unwell_one_at_once():
    assert probed("ww", "ws", "ww", "ws").failed is None, "only silences in a row count"
    assert probed("ww", "ws", "ws").failed == 1
    assert probed("ww", "uw").failed == 0


def test_a_supervisors_servers_are_external_ranks_on_neighbouring_ports():
    line = "m --moe -dp 4 -dpl 2 -dpr 2 -dpm --port 9000"
    options = parse_options(line.split())
    launch = resolve(options, moe=True)
    assert launch.children == 2
    children = [child_options(options, launch, index) for index in range(2)]
    assert [child.port for child in children] == [9000, 9001]
    shapes = [resolve(child, moe=True) for child in children]
    assert [(shape.load_balancing, shape.start_rank, shape.size_local) for shape in shapes] == [
        ("external", 2, 1),
        ("external", 3, 1),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-dp 4 -dpl 2 --port 9255", "is one of the servers' ports 9255-9256"),
        ("-dp 4 -dpl 2 -dpr 3", "leaves no room"),
        ("-dp 4 -dpl 2 --headless", "no --headless"),
        ("-dp 4 -dpl 2 --ssl-keyfile k", "must be provided together"),
        ("-dp 4 -dpl 2 --no-moe", "Non-MoE models"),
    ],
)
def test_a_supervisor_that_cannot_work_is_refused(line, message):
    options = parse_options(["m", "--moe", "-dpm", *line.split()])
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(options, moe=options.moe is True)


@pytest.mark.parametrize(("prompts", "size", "expected"), [(5, 2, [3, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])])
def test_prompts_are_shared_evenly_and_none_is_lost(prompts, size, expected):
    shares = [share(prompts, rank=rank, size=size) for rank in range(size)]
    assert [len(part) for part in shares] == expected
    assert [index for part in shares for index in part] == list(range(prompts))


def digest(line):
    options = parse_options(["m", "--moe", *line.split()])
    return config_hash(options, resolve(options, moe=True))


def test_the_hash_is_the_same_on_every_rank_and_changes_with_what_must_match():
    head = digest("-dp 4 -dpl 1 --port 80 -dpa 10.0.0.1 -asc 2")
    assert head == digest("-dp 4 -dpl 3 -dpr 1 --headless -dpa 10.0.0.1 -dpp 99")
    for change in (
        *("-tp 2", "-pp 2", "-ep", "-ep --enable-eplb", "--all2all-backend naive", "--dp-sync-interval 8"),
        *("--emulate-version 0.33.1", "--eplb-config.window_size 5", "-dp 5", "--dbo-decode-token-threshold 7"),
        *("--distributed-timeout-seconds 60", "--dcp-comm-backend a2a", "--disable-nccl-for-dp-synchronization"),
        *("--cpu-distributed-timeout-seconds 60", "--elastic-ep-max-dp-size 8", "--enable-ep-weight-filter"),
        *("--enable-dbo", "--eplb-config.use_async false"),
    ):
        assert digest(f"-dp 4 -dpl 1 {change}") != head, change
    assert digest("-dp 4 --eplb-config.window_size 5") != digest("-dp 4 --eplb-config.step_interval 5")
    assert digest("-dp 4 --parallel-config-hash X") == "X"


@pytest.mark.parametrize(
    "said",
    [
        *("--no-enable-dbo", "--dp-sync-interval 16", "--emulate-version 0.33", "--eplb-config.window_size 1000"),
        *("--ubatch-size 0", '--eplb-config {"policy":"default"}', "--all2all-backend allgather_reducescatter"),
        # vLLM leaves these two out of its hash.
        *("--disable-custom-all-reduce", "--max-parallel-loading-workers 2"),
    ],
)
def test_ranks_that_agree_have_one_hash_however_they_say_so(said):
    assert digest(f"-dp 4 {said}") == digest("-dp 4")


def test_a_rank_alone_may_see_devices_by_any_name_in_every_release():
    ids = {"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}
    assert devices.of_rank(
        local_rank=0, world_size=2, platform="cuda", env=ids, ids=None, wire=wire_of("0.11"), alone=True
    ) == ("GPU-1a", "GPU-2b")


def test_options_travel_to_children_unchanged():
    options = parse_options(
        ["m", "-dp", "2", "--device-ids", "3,1", "--max-num-batched-tokens", "1k", "--fault", "crash:on=signal"]
    )
    assert (options.device_ids, options.max_num_batched_tokens) == (("3", "1"), 1000)
    assert msgspec.structs.replace(options).faults[0].on_signal
