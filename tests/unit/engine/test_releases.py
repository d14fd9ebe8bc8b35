"""What differs between releases: wires, requests, arguments, waves and balancing of each family."""

import itertools
import json
import re
from pathlib import Path

import msgspec
import pytest
import zmq

from dp_engine import handshake, wire
from dp_engine.balance import Balancer
from dp_engine.coordinator import Coordinator
from dp_engine.data_sockets import bind_data_sockets
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, HandshakeError, Init
from dp_engine.modes import resolve
from dp_engine.options import parse_options
from dp_engine.versions import CHANGES, NEWEST, VERSION_ENV, Wire, release_of, table, unknown_flags, wire_of
from dp_engine.waves import Waves

DATA = Path(__file__).parent / "data"


def test_changes_are_in_order_and_turn_knobs_that_exist():
    releases = [change.since for change in CHANGES]
    assert releases == sorted(set(releases))
    for change in CHANGES:
        assert set(change.knobs) <= set(Wire.__struct_fields__)


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.11", (0, 11, 0)), ("0.11.0.post2", (0, 11, 0)), ("v0.32.1+cpu", (0, 32, 1)), ("1.2.3rc1", (1, 2, 3))],
)
def test_versions_are_read_as_people_and_wheels_write_them(version, release):
    assert release_of(version) == release


def test_the_image_says_which_release_it_plays():
    """Else the operator could only assume one, and would say so of its own examples."""
    dockerfile = (Path(__file__).parents[3] / "engine_image" / "Dockerfile").read_text()
    assert re.findall(rf"{VERSION_ENV}=(\S+)", dockerfile) == [NEWEST]


def test_a_release_between_two_changes_speaks_like_the_one_before():
    assert wire_of("0.19.1") == wire_of("0.18.0") != wire_of("0.17.9")
    assert wire_of("0.12.0") == wire_of("0.11.2")
    assert wire_of("9.0") == wire_of(NEWEST)


# What the notes' table says of each family: the knobs that users and peers notice.
NOTED = {
    "0.10.2": {"add_layout": "0.10.2", "ready_has_hash": False, "dense_lock_step": True, "sync_interval_steps": 32},
    "0.11": {"add_layout": "0.11", "ready_has_hash": False, "dense_lock_step": True, "rank_header": False},
    "0.11.2": {"ready_has_hash": True, "dense_lock_step": True, "rank_header": True, "devices": "worker"},
    "0.14": {"add_layout": "0.14", "dense_lock_step": False, "dense_counts": False, "api_servers_derived": False},
    "0.17": {"add_layout": "0.17", "first_frame_keys": 0, "ready_has_blocks": True, "late_subscribers": True},
    "0.20": {"add_layout": "0.20", "first_frame_keys": 3, "ready_has_blocks": False, "dense_external": "starts"},
    "0.22": {"add_layout": "0.21", "first_frame_keys": 4, "dense_external": "refused", "rotating_start": False},
    "0.27": {"counts_width": 3, "balance_by_in_flight": True, "dense_counts": True, "start_rank_0_is_hybrid": False},
    "0.29": {"front_end_marks_running": False, "rank0_reports_edge": True, "front_end_starts_waves": True},
    "0.32": {"coord_store": True, "add_layout": "0.31", "sync_interval_steps": 16, "own_init_has_group": True},
    "0.33": {"front_end_starts_waves": False, "idle_engine_starts_waves": True, "own_init_has_group": False},
}


@pytest.mark.parametrize("version", NOTED)
def test_the_families_differ_as_noted(version):
    found = msgspec.structs.asdict(wire_of(version))
    assert {knob: found[knob] for knob in NOTED[version]} == NOTED[version]


def test_the_printed_table_names_every_release_and_knob():
    text = table()
    for change in CHANGES:
        assert ".".join(map(str, change.since)) in text
        for knob in change.knobs:
            assert knob in text


SLOTS = {"0.10.2": 14, "0.11": 15, "0.14": 16, "0.15": 17, "0.16": 18, "0.17": 17, "0.20": 18, "0.21": 20, "0.28": 21}
SLOTS["0.31"] = 22


@pytest.mark.parametrize("layout", SLOTS)
def test_requests_have_the_slots_of_their_release_and_are_read_back(layout):
    payload = wire.encode_add(
        request_id="r",
        external_id="e",
        prompt_token_ids=[7, 8],
        sampling={"max_tokens": 3},
        rank=2,
        client_index=3,
        wave=5,
        layout=layout,
    )
    slots = wire.decode(payload)
    assert len(slots) == SLOTS[layout]
    old = layout in {"0.10.2", "0.11", "0.14", "0.15", "0.16"}
    assert isinstance(slots[5], int if old else float), "the end-of-text id, later the time of arrival"
    assert slots[9 if old else 8] == 2
    found = wire.decode_add(payload)
    assert (found.request_id, found.prompt_token_ids, found.client_index, found.wave) == ("r", [7, 8], 3, 5)
    if layout not in {"0.10.2", "0.11"}:
        at = {"0.14": 15, "0.15": 16, "0.16": 16, "0.17": 15, "0.20": 15}.get(layout, 16)
        assert slots[at] == "e"


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="unknown request layout"):
        wire.encode_add(
            request_id="r",
            external_id="e",
            prompt_token_ids=[],
            sampling={},
            rank=None,
            client_index=0,
            wave=0,
            layout="0.1",
        )


def response(version):
    keys = wire_of(version).first_frame_keys
    return wire.ready_response(
        keys=keys,
        rank=1,
        version=version,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=2,
        stats_address="tcp://h:1",
        instance_id="i",
    )


def test_the_first_input_frame_is_empty_up_to_0_19_and_grows_from_0_20():
    assert response("0.19.1") == b""
    grown = [set(wire.decode(response(version))) for version in ("0.20", "0.22", "0.23", "0.24", "0.27", "0.29")]
    assert grown[0] == {"max_model_len", "num_gpu_blocks", "dp_stats_address"}
    assert [sorted(later - earlier) for earlier, later in itertools.pairwise(grown)] == [
        ["dtype"],
        ["block_size", "vllm_version"],
        ["data_parallel_size", "kv_cache_max_concurrency", "kv_cache_size_tokens", "world_size"],
        [
            *("data_parallel_rank", "decode_context_parallel_size", "instance_id", "max_num_batched_tokens"),
            *("max_num_seqs", "pipeline_parallel_size", "tensor_parallel_size"),
        ],
        ["max_loras", "supports_lora"],
    ]


def captured(name):
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return [bytes.fromhex(line["hex"][0]) for line in lines if line["kind"] == "message"]


def test_ready_of_0_11_is_byte_for_byte_a_real_engines():
    hello, init, ready = captured("p011_dense.tap.jsonl")
    address = handshake.decode_init(init).addresses.frontend_stats_publish_address
    assert handshake.hello(local=False, headless=True) == hello
    assert handshake.ready(local=False, headless=True, blocks=8192, stats_address=address) == ready


def test_a_real_external_rank_of_0_32_is_taken_through():
    hello, init, ready = captured("ext_moe.tap.jsonl")
    digest = wire.decode(ready)["parallel_config_hash"]
    machine = FrontEndHandshake(
        expected=[Expected(rank=1, local=False)],
        init=handshake.decode_init(init),
        remote_headless=False,
        config_hash=digest,
    )
    assert wire.decode(machine.receive([b"\1\0", hello])[1]) == wire.decode(init)
    assert machine.receive([b"\1\0", ready]) == []
    assert machine.done
    assert handshake.hello(local=False, headless=False) == hello
    assert handshake.ready(local=False, headless=False, config_hash=digest) == ready


def old_head(*, stats=None):
    addresses = Addresses(inputs=["a"], outputs=["b"], frontend_stats_publish_address=stats)
    return FrontEndHandshake(
        expected=[Expected(rank=rank, local=True) for rank in (0, 1)],
        init=Init(addresses=addresses, parallel_config={}),
        remote_headless=False,
        config_hash=None,
        ready_has_blocks=True,
    )


def test_up_to_0_19_ready_brings_cache_sizes_and_the_coordinators_address():
    machine = old_head()
    for rank, blocks in ((0, 100), (1, 50)):
        identity = wire.identity(rank)
        machine.receive([identity, handshake.hello(local=True, headless=False)])
        machine.receive(
            [identity, handshake.ready(local=True, headless=False, blocks=blocks, stats_address="tcp://head:9")]
        )
    assert (machine.done, machine.blocks, machine.stats_address) == (True, 150, "tcp://head:9")


def test_the_heads_own_address_of_the_coordinator_stays():
    machine = old_head(stats="ipc://mine")
    machine.receive([b"\0\0", handshake.hello(local=True, headless=False)])
    machine.receive([b"\0\0", handshake.ready(local=True, headless=False, blocks=1, stats_address="tcp://other")])
    assert machine.stats_address == "ipc://mine"


def test_ready_without_blocks_ends_the_start_up_to_0_19():
    machine = old_head()
    machine.receive([b"\0\0", handshake.hello(local=True, headless=False)])
    with pytest.raises(KeyError, match="num_gpu_blocks"):
        machine.receive([b"\0\0", handshake.ready(local=True, headless=False)])


def test_ready_of_an_elastic_group_has_three_more_keys():
    elastic = {"coord_store_port": 1, "elastic_ep_max_dp_size": 8, "num_redundant_experts": 0}
    message = wire.decode(handshake.ready(local=True, headless=False, elastic=elastic))
    assert {key: message[key] for key in elastic} == elastic


ELASTIC = "-ep --enable-eplb --enable-elastic-ep --platform cuda"

# (version, line, MoE): what it starts as (mode, local size, first rank, API servers, headless), or why it is refused.
ARGUMENTS = [
    ("0.11", "-dp 4", False, ("internal", 4, 0, 1, False)),
    ("0.14", "-dp 4", False, ("internal", 4, 0, 1, False)),
    ("0.15", "-dp 4", False, ("internal", 4, 0, 4, False)),
    ("0.11", "-dp 4 -asc 0 -dpl 2", False, ("internal", 2, 0, 0, True)),
    ("0.14", "-dp 4 -asc 0 -dpl 2", False, ("internal", 2, 0, 0, True)),
    ("0.15", "-dp 4 -asc 0 -dpl 2", False, ("internal", 2, 0, 0, True)),
    ("0.11", "-dp 4 --headless -asc 1 -dpl 2", False, ("internal", 2, 0, 0, True)),
    ("0.11", "-dp 4 --headless -asc 2 -dpl 2", False, "cannot be used with --headless"),
    ("0.17", "-dp 4 --headless -asc 1 -dpl 2", False, "cannot be used with --headless"),
    ("0.11", "-dp 4 -dpl 2 -dpr 0", False, ("internal", 2, 0, 1, False)),
    ("0.27", "-dp 4 -dpl 2 -dpr 0", False, ("internal", 2, 0, 2, False)),
    ("0.28", "-dp 4 -dpl 2 -dpr 0", False, ("hybrid", 2, 0, 2, False)),
    ("0.11", "-dp 4 -dpl 2 -dpr 2", False, ("hybrid", 2, 2, 1, False)),
    ("0.17", "-dp 4 -dpl 2 -dpr 2", False, ("hybrid", 2, 2, 2, False)),
    ("0.11", "-dp 4 -dpl 2 --data-parallel-hybrid-lb", False, ("hybrid", 2, 0, 1, False)),
    ("0.11", "-dp 4 -dpl 2 -dph", False, SystemExit),
    ("0.11.2", "-dp 4 -dpl 2 -dph", False, ("hybrid", 2, 0, 1, False)),
    ("0.11", "-dp 4 -dpl 1 --data-parallel-hybrid-lb", False, ("external", 1, 0, 1, False)),
    ("0.11", "-dp 4 -dpn 1", False, ("external", 1, 1, 1, False)),
    ("0.17", "-dp 4 -dpn 1", False, ("external", 1, 1, 1, False)),
    ("0.20", "-dp 4 -dpn 1", False, ("external", 1, 1, 1, False)),
    ("0.21", "-dp 4 -dpn 1", False, "Non-MoE models do not support external"),
    ("0.21", "-dp 4 -dpn 1", True, ("external", 1, 1, 1, False)),
    ("0.11", "-dp 4 -dpn 1 -dpr 3", True, ("external", 1, 1, 1, False)),
    ("0.14", "-dp 4 -dpn 1 -dpr 3", True, ("external", 1, 1, 1, False)),
    ("0.15", "-dp 4 -dpn 1 -dpr 3", True, "more than one data parallel load balancing mode"),
    ("0.11", "-dp 4 --data-parallel-external-lb", True, SystemExit),
    ("0.17", "-dp 4 -dpn 1 --data-parallel-external-lb", True, ("external", 1, 1, 1, False)),
    ("0.11", "-dpn 0", True, "can only be set when data_parallel_size > 1"),
    # Ranges are checked since 0.32; before, a negative number of local ranks starts a head that waits for ever.
    ("0.31", "-dp 4 -dpl -1 -asc 1", False, ("internal", -1, 0, 1, False)),
    ("0.31", "-dp 1 -dpl -1", False, "--data-parallel-size-local must be >= 0"),
    ("0.31", "-dp 4 -dpl -1 --headless", False, "must be > 0 in headless mode"),
    ("0.32", "-dp 4 -dpl -1 -asc 1", False, "--data-parallel-size-local must be >= 0"),
    ("0.31", "-dp 2 -dpp 70000 -asc 1", False, ("internal", 2, 0, 1, False)),
    ("0.32", "-dp 2 -dpp 70000 -asc 1", False, "--data-parallel-rpc-port must be in 1..65535"),
    ("0.32", "-dp 2 -dpp 0", False, "--data-parallel-rpc-port must be in 1..65535"),
    ("0.32", "-dp 2 --shutdown-timeout -1", False, "--shutdown-timeout must be >= 0"),
    ("0.33", "-dp 2 -ep --no-moe", False, "the number of experts in the model must be greater than 0"),
    ("0.17", "-dpn 0", True, "can only be set when data_parallel_size > 1"),
    ("0.17", "-dpe -dp 2", True, "requires --data-parallel-rank"),
    ("0.17", "-dp 4 --nnodes 2 --node-rank 1 -dpe", True, ("external", 1, 2, 1, False)),
    ("0.32", "-dp 4 --nnodes 2 --node-rank 1 -dpe", True, "cannot unambiguously identify"),
    ("0.11", "-dp 4 --nnodes 2", True, SystemExit),
    ("0.17", "-dp 4 --nnodes 2 --node-rank 1 --headless", True, ("internal", 2, 2, 0, True)),
    ("0.16", "-dp 2 --enable-elastic-ep", True, SystemExit),
    ("0.17", "-dp 2 --enable-elastic-ep", True, "requires --enable-eplb"),
    ("0.17", f"-dp 4 -dpn 1 {ELASTIC}", True, "cannot be used with --data-parallel-rank"),
    ("0.32", f"-dp 4 -dpn 1 {ELASTIC}", True, "cannot be used with --data-parallel-rank"),
    ("0.33", f"-dp 4 -dpn 1 {ELASTIC}", True, ("external", 1, 1, 1, False)),
    ("0.33", f"-dp 4 -dpl 2 -dph {ELASTIC}", True, "cannot be used with --data-parallel-hybrid-lb"),
    ("0.11", "-dp 2 --num-redundant-experts 2", True, "num_redundant_experts requires --enable-eplb"),
    ("0.32", "-dp 2 --eplb-config.num_redundant_experts 2", True, "num_redundant_experts requires --enable-eplb"),
    ("0.32", '-dp 2 --eplb-config {"num_redundant_experts":2}', True, "num_redundant_experts requires --enable-eplb"),
    ("0.32", "-dp 2 --eplb-config.num_redundant_experts=0", True, ("internal", 2, 0, 2, False)),
    ("0.32", f"-dp 2 {ELASTIC} --eplb-config.num_redundant_experts 2", True, ("internal", 2, 0, 1, False)),
    ("0.17", "-dp 2 --grpc", True, SystemExit),
    ("0.33", "-dp 2 --grpc", True, "the stand-in engine has none"),
    ("0.33", "-dp 2 -dpl 2 -dpm --grpc", True, "does not support --grpc"),
    ("0.33", "-dp 2 -dpl 2 -dpm --uds /s", True, "does not support --uds"),
    ("0.11", "-dp 2 --uds /s", True, ("internal", 2, 0, 1, False)),
    ("0.17", "-dp 2 --shutdown-timeout 5", True, SystemExit),
    ("0.18", "-dp 2 --shutdown-timeout 5", True, ("internal", 2, 0, 2, False)),
    ("0.21", "-dp 2 --cpu-distributed-timeout-seconds 9", True, SystemExit),
    ("0.22", "-dp 2 --cpu-distributed-timeout-seconds 9", True, ("internal", 2, 0, 2, False)),
    ("0.21", "-dp 2 -dpm", True, SystemExit),
    ("0.22", "-dp 2 -dpm", True, "a --data-parallel-size-local >= 2 that divides it"),
    ("0.22", "-dp 4 -dpm -dpl 2 --node-rank 1", True, ("external", 2, 2, 1, False)),
    ("0.23", "-dp 2 --device-ids 0,1", True, SystemExit),
    ("0.24", "-dp 2 --device-ids 0,1", True, ("internal", 2, 0, 2, False)),
    ("0.26", "-dp 2 -dpn 0 --enable-fault-tolerance", True, SystemExit),
    ("0.27", "-dp 2 -dpn 0 --enable-fault-tolerance", True, ("external", 1, 0, 1, False)),
    ("0.29", "-dp 2 --dp-sync-interval 4", True, SystemExit),
    ("0.30", "-dp 2 --dp-sync-interval 4", True, ("internal", 2, 0, 2, False)),
    ("0.30", "-dp 2 --dp-sync-interval 0", True, "--dp-sync-interval must be at least 1"),
]


@pytest.mark.parametrize(("version", "line", "moe", "expected"), ARGUMENTS)
def test_a_line_is_taken_or_refused_as_its_release_does(version, line, moe, expected, capsys):
    def started():
        options = parse_options(["m", "--emulate-version", version, *line.split()])
        return resolve(options, moe=moe)

    if expected is SystemExit:
        with pytest.raises(SystemExit) as leaving:
            started()
        assert leaving.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err
    elif isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            started()
    else:
        found = started()
        shape = (found.load_balancing, found.size_local, found.start_rank, found.api_servers, found.headless)
        assert shape == expected


@pytest.mark.parametrize(("version", "handed_over"), [("0.17", 0), ("0.18", 1)])
def test_elastic_groups_use_tcp_even_on_one_node_and_hand_identities_over(version, handed_over):
    def node(line):
        return resolve(parse_options(["m", "--emulate-version", version, *line.split()]), moe=True)

    assert node("-dp 2 -ep --enable-eplb --platform cuda").all_local
    launch = node(f"-dp 2 {ELASTIC} -dpa 127.0.0.1")
    assert not launch.all_local
    with zmq.Context() as context:
        sockets = bind_data_sockets(context, launch, wire_of(version))
        assert sockets.endpoints.inputs.startswith("tcp://127.0.0.1:")
        assert takes_over(context, sockets) == handed_over
        sockets.inputs.close()
        sockets.outputs.close()


def takes_over(context, sockets):
    """Whether a second rank of the same number is heard (1) or not (0)."""
    ranks = []
    for number in range(2):
        rank = context.socket(zmq.DEALER)
        rank.setsockopt(zmq.LINGER, 0)
        rank.identity = b"\x01\x00"
        rank.connect(sockets.endpoints.inputs)
        rank.send(b"%d" % number)
        if number == 0:
            assert sockets.inputs.poll(5000)
            sockets.inputs.recv_multipart()
        ranks.append(rank)
    heard = bool(sockets.inputs.poll(1000))
    for rank in ranks:
        rank.close()
    return heard


def test_a_newer_flag_is_unknown_until_its_release():
    assert "shutdown-timeout" in unknown_flags("0.17.1")
    assert unknown_flags(NEWEST) == frozenset()


def offline(line, *, moe, **variables):
    env = {f"VLLM_DP_{name}": value for name, value in variables.items()}
    return resolve(parse_options(["m", *line.split()]), moe=moe, env=env)


def test_the_offline_variables_describe_one_rank_of_a_group():
    found = offline("", moe=True, SIZE="4", RANK="3", MASTER_IP="10.0.0.1", MASTER_PORT="29500")
    assert (found.load_balancing, found.size, list(found.local_ranks)) == ("offline", 4, [3])
    assert (found.address, found.store_port, found.coordinated) == ("10.0.0.1", 29500, True)
    assert not found.runs_coordinator
    # They count only where the command line says nothing of a group.
    assert offline("-dp 2", moe=True, SIZE="4", RANK="3").load_balancing == "internal"
    assert offline("", moe=True, SIZE="1").size == 1
    with pytest.raises(ValueError, match=re.escape("must be in the range [0, 4)")):
        offline("", moe=True, SIZE="4", RANK="4")


def test_offline_dense_groups_ended_with_0_14():
    assert offline("--emulate-version 0.13", moe=False, SIZE="2").coordinated
    with pytest.raises(ValueError, match="Offline data parallel mode"):
        offline("--emulate-version 0.14", moe=False, SIZE="2")


def test_only_the_node_of_rank_0_runs_the_coordinator():
    def node(line):
        return resolve(parse_options(["m", *line.split()]), moe=True)

    assert node("-dp 2 -dpn 0").runs_coordinator
    assert not node("-dp 2 -dpn 1").runs_coordinator
    assert not node("-dp 2 -dpl 1 --headless").runs_coordinator
    assert not node("-dp 1").runs_coordinator
    assert list(node("-dp 4 -dpl 2 -dpr 2").managed_ranks) == [2, 3]
    assert list(node("-dp 4 -dpl 2").managed_ranks) == [0, 1, 2, 3]


def picks(version, count, *, table=None, clients=1):
    balancer = Balancer(engines=3, client=0, clients=clients, wire=wire_of(version))
    chosen = []
    for _ in range(count):
        if table is not None:
            balancer.counts_received(table)
        chosen.append(balancer.pick())
    return chosen


def test_three_generations_of_balancing():
    idle = [[0, 0]] * 3
    assert picks("0.24", 4, table=idle) == [0, 0, 0, 0], "an idle group always uses the same rank"
    assert picks("0.25", 4, table=idle) == [0, 1, 2, 0]
    assert picks("0.27", 4, table=idle) == [0, 1, 2, 0]
    # A waiting request weighs four up to 0.26, and as one from 0.27.
    busy = [[1, 0, 0.0], [0, 3, 0.0], [0, 4, 0.0]]
    assert picks("0.26", 1, table=busy) == [1]
    assert picks("0.27", 1, table=busy) == [0]


def test_up_to_0_26_own_requests_are_forgotten_with_the_next_counts():
    assert picks("0.26", 3, table=[[0, 0], [0, 1], [0, 1]]) == [0, 0, 0]
    assert picks("0.27", 3, table=[[0, 0], [0, 1], [0, 1]]) == [0, 1, 2]


def test_every_pick_adds_as_many_waiting_requests_as_there_are_front_ends():
    assert picks("0.24", 3, clients=2) == [0, 1, 2]


def started(version, *, size=2, waves=True):
    core = Coordinator(size=size, waves=waves, wire_family=wire_of(version))
    for _ in range(size):
        core.from_back(b"\1", 0.0)
    return core


def stats(waiting, running):
    return wire.encode_outputs(
        wire.Outputs(engine=0, stats={"num_waiting_reqs": waiting, "num_running_reqs": running, "kv_cache_usage": 0.5}),
        now=0.0,
    )


@pytest.mark.parametrize(("version", "row"), [("0.26.0", [1, 2]), ("0.27.0", [1, 2, 0.5])])
def test_counts_have_two_numbers_a_rank_and_three_since_0_27(version, row):
    core = started(version, waves=False)
    core.from_engine(stats(1, 2))
    assert wire.decode(core.tick(1.0)[0].frames[0])[0] == [row, [0, 0, 0.0][: len(row)]]


def test_counts_of_0_11_are_byte_for_byte_a_real_coordinators():
    core = started("0.11")
    core.from_front(wire.encode([b"\0\0", 0]))
    core.from_engine(stats(0, 1))
    assert core.tick(1.0)[0].frames[0].hex() == "939292000192000000c3"


def test_up_to_0_28_the_coordinator_takes_the_front_ends_word_that_a_wave_runs():
    first_request = wire.encode([b"\1\0", 0])
    sends = started("0.28").from_front(first_request)
    assert wire.decode(sends[0].frames[0]) == [None, 0, True]
    assert sends[1].to == "back"
    core = started("0.29")
    assert [send.to for send in core.from_front(first_request)] == ["back"]
    assert not core.running


def test_a_stale_front_end_leaves_nobody_out():
    core = started("0.28")
    core.from_engine(wire.encode_outputs(wire.Outputs(engine=0, start_wave=3), now=0.0))
    core.from_engine(wire.encode_outputs(wire.Outputs(engine=0, wave_complete=3), now=0.0))
    assert wire.decode(core.from_front(wire.encode([1, 0]))[1].frames[1]) == [4, None]


def test_late_subscribers_are_greeted_since_0_17():
    assert started("0.16").from_back(b"\1", 1.0) == []
    assert started("0.17").from_back(b"\1", 1.0)[0].frames == [b"READY"]


@pytest.mark.parametrize(("version", "still_running"), [("0.11", False), ("0.33", True)])
def test_a_scale_notice_grows_or_shrinks_the_table(version, still_running):
    core = started(version)
    core.from_engine(wire.encode_outputs(wire.Outputs(engine=1, start_wave=0), now=0.0))
    core.from_engine(stats(1, 2))
    assert core.from_front(wire.encode(["SCALE_ELASTIC_EP", 4])) == []
    assert core.running is still_running
    assert [row[:2] for row in wire.decode(core.tick(1.0)[0].frames[0])[0]] == [[1, 2], [0, 0], [0, 0], [0, 0]]
    core.from_front(wire.encode(["SCALE_ELASTIC_EP", 1]))
    assert len(wire.decode(core.tick(2.0)[0].frames[0])[0]) == 1
    assert core.from_front(wire.encode(["SCALE_ELASTIC_EP", 0])) == []


def steps_until_pause(version, **kwargs):
    group = Waves(rank=0, wire=wire_of(version), **kwargs)
    group.request_arrived(0)
    group.stepped(any_unfinished=True)
    return next(step for step in range(2, 100) if group.stepped(any_unfinished=False))


def test_the_group_asks_every_32_steps_up_to_0_29_then_every_16_or_as_told():
    assert steps_until_pause("0.29") == 32
    assert steps_until_pause("0.30") == 16
    assert steps_until_pause("0.33", sync_interval_steps=4) == 4
    first = {version: Waves(rank=0, wire=wire_of(version)) for version in ("0.29", "0.30")}
    for group in first.values():
        group.request_arrived(0)
    assert first["0.29"].stepped(any_unfinished=False) is None
    assert first["0.30"].stepped(any_unfinished=False) is not None


def test_rank_0_reports_its_start_only_since_0_29():
    for version, report in (("0.28", None), ("0.29", 0)):
        assert Waves(rank=0, wire=wire_of(version)).start_received(0, None) == report


def test_a_rank_with_a_stale_request_announces_its_own_wave():
    group = Waves(rank=1, wire=wire_of("0.11"))
    group.wave = 5
    assert group.request_arrived(3) == 5
    assert Waves(rank=1, wire=wire_of("0.11")).request_arrived(0) is None


@pytest.mark.parametrize(("version", "slots"), [("0.31", 8), ("0.32", 9)])
def test_outputs_have_a_ninth_slot_since_0_32(version, slots):
    payload = wire.encode_outputs(
        wire.Outputs(engine=0), now=0.0, weight_version_slot=wire_of(version).weight_version_slot
    )
    assert len(wire.decode(payload)) == slots


@pytest.mark.parametrize("theirs", ["x", None])
def test_dense_ranks_of_0_11_2_compare_hashes_like_moe_ranks(theirs):
    family = wire_of("0.11.2")
    launch = resolve(parse_options(["m", "-dp", "2", "-dpl", "1", "--emulate-version", "0.11.2"]), moe=False)
    assert launch.coordinated
    assert family.ready_has_hash
    machine = FrontEndHandshake(
        expected=[Expected(rank=1, local=False)],
        init=Init(addresses=Addresses(inputs=[], outputs=[]), parallel_config={}),
        remote_headless=True,
        config_hash="y",
        ready_has_blocks=True,
    )
    machine.receive([b"\1\0", handshake.hello(local=False, headless=True)])
    with pytest.raises(HandshakeError, match="Configuration mismatch"):
        machine.receive([b"\1\0", handshake.ready(local=False, headless=True, config_hash=theirs, blocks=1)])
