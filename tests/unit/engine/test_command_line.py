"""What the command line asks for, and which combinations are refused: the table of vLLM 0.32/0.33."""

import re

import pytest

from dp_engine.modes import is_moe, resolve
from dp_engine.options import parse_options

HEAD8 = "m --data-parallel-size 8 --data-parallel-size-local 1 --data-parallel-address 10.0.0.1"


def launch(line, *, moe=False):
    options = parse_options(line.split())
    return resolve(options, moe=moe or is_moe(options))


ACCEPTED = {
    # line: (mode, size, local, first rank, API servers, headless)
    "m": ("internal", 1, 1, 0, 1, False),
    "m -dp 4": ("internal", 4, 4, 0, 4, False),
    "m -dp=4": ("internal", 4, 4, 0, 4, False),
    "m --data_parallel_size 4 --api_server_count 2": ("internal", 4, 4, 0, 2, False),
    "m --data-parallel-size=4 -asc 1": ("internal", 4, 4, 0, 1, False),
    f"{HEAD8} --data-parallel-rpc-port 13346 --api-server-count 2": ("internal", 8, 1, 0, 2, False),
    f"{HEAD8} --headless --data-parallel-start-rank 3": ("internal", 8, 1, 3, 0, True),
    "m --headless -dp 8 -dpl 2 -dpr 6 -dpa 10.0.0.1 -dpp 13345": ("internal", 8, 2, 6, 0, True),
    "m --headless -dp 8 -dpl 1 -dpr 0": ("internal", 8, 1, 0, 0, True),
    "m --headless --no-headless -dp 2": ("internal", 2, 2, 0, 2, False),
    "m --headless -asc 0 -dp 2 -dpl 1": ("internal", 2, 1, 0, 0, True),
    "m -dp 8 -dpl 0 -asc 4": ("internal", 8, 0, 0, 4, False),
    "m -dp 4 -dpl 2 --data-parallel-hybrid-lb": ("hybrid", 4, 2, 0, 2, False),
    "m -dp 4 -dpl 2 -dpr 2": ("hybrid", 4, 2, 2, 2, False),
    "m -dp 4 -dpl 2 -dpr 0": ("hybrid", 4, 2, 0, 2, False),
    # Start ranks count only beside a local size.
    "m -dp 4 -dpr 2": ("internal", 4, 4, 0, 1, False),
    # No API server is headless by another name.
    "m -dp 4 -asc 0": ("internal", 4, 4, 0, 0, True),
    # One local rank is external without being asked; dense models start so and cannot serve.
    "m -dp 4 -dpl 1 -dpr 0": ("external", 4, 1, 0, 1, False),
    "m -dp 4 -dpl 1 -dph": ("external", 4, 1, 0, 1, False),
    "m -dp 4 -dpl 4 -dph --headless": ("internal", 4, 4, 0, 0, True),
    "m -dp 4 -ep --enable-eplb --enable-elastic-ep": ("internal", 4, 4, 0, 1, False),
    "m -dp 4 -dpl 2 --nnodes 2 --node-rank 1 -dph": ("hybrid", 4, 2, 2, 2, False),
    "m -dp 4 --nnodes 2 --node-rank 1 -dph": ("hybrid", 4, 2, 2, 1, False),
    "m -dp 4 -dpl 4 -dph": ("internal", 4, 4, 0, 4, False),
    "m --moe -dp 4 -dpl 1 -dph": ("external", 4, 1, 0, 1, False),
    "m --moe -dp 4 -dpl 1 -dpr 2": ("external", 4, 1, 2, 1, False),
    "m --moe -dp 4 -dpn 3": ("external", 4, 1, 3, 1, False),
    "m --moe -dp 4 --data-parallel-rank 3 -dpl 1 -dpe": ("external", 4, 1, 3, 1, False),
    "m --moe -dp 4 --nnodes 4 --node-rank 3 -dpe": ("external", 4, 1, 3, 1, False),
    "m --moe -dp 4 --nnodes 2 --node-rank 1 --headless": ("internal", 4, 2, 2, 0, True),
    "m -dp 2 --compilation-config.level 3 -O3 --enforce-eager --load-format dummy": ("internal", 2, 2, 0, 2, False),
    "m -dp 2 --no-enable-prefix-caching --kv-transfer-config {} --lora-modules a=b c=d": (
        *("internal", 2, 2, 0),
        *(2, False),
    ),
    "m --max-model-len 16k --gpu-memory-utilization 0.8 --max-num-seqs 8": ("internal", 1, 1, 0, 1, False),
    "m -dp 2 -tp 2 -pp 2 --enable-expert-parallel --enable-eplb": ("internal", 2, 2, 0, 2, False),
    "m -dp 2 --shutdown-timeout 30 --emulate-version 0.32.1": ("internal", 2, 2, 0, 2, False),
    "--model m -dp 2": ("internal", 2, 2, 0, 2, False),
}


@pytest.mark.parametrize("line", ACCEPTED)
def test_accepted_lines_start_what_vllm_would(line):
    found = launch(line)
    shape = (found.load_balancing, found.size, found.size_local, found.start_rank, found.api_servers, found.headless)
    assert shape == ACCEPTED[line]


REFUSED = {
    "m -dp 4 -dpn 1 -dpl 2 --moe": "requires --data-parallel-size-local 1",
    "m -dp 4 -dpl 2 -dph --headless": "not applicable in headless mode",
    "m -dp 4 -dph": "must be set to use --data-parallel-hybrid-lb",
    "m -dp 4 -dpl 2 -dph -dpe --moe": "cannot be enabled together",
    "m -dp 4 -dpn 1 -dpr 1 --moe": "more than one data parallel load balancing mode",
    "m -dp 4 -dpn 1 -dph -dpl 1 --moe": "more than one data parallel load balancing mode",
    "m -dp 4 -dpn 1": "Non-MoE models do not support external",
    "m -dp 4 --headless --api-server-count 2": "cannot be used with --headless",
    "m -dp 4 --headless -asc 1 -dpl 1": "cannot be used with --headless",
    "m -dp 4 --headless -dpl 0": "must be > 0 in headless mode",
    "m -dp 4 -dpl 5": "must be <= data_parallel_size",
    "m -dp 4 -dpl -1": "must be >= 0",
    "m -dp 4 -dpn 4 --moe": "must be in the range [0, 4)",
    "m -dp 4 -dpn -1 --moe": "must be in the range [0, 4)",
    "m -dpn 0 --moe": "can only be set when data_parallel_size > 1",
    "m -dpl 1 -dph --moe": "can only be set when data_parallel_size > 1",
    "m -dpe --moe": "requires --data-parallel-rank",
    "m -dp 4 -dpe --moe": "requires --data-parallel-rank",
    "m -dp 4 -dpl 4 -dpr 2": "incompatible with --data-parallel-start-rank 2",
    "m -dp 2 --nnodes 2 --node-rank -1": "must be less than --nnodes 2",
    "m -dp 4 -dpl 2 --nnodes 3 -tp 3": "must be divisible by the 2 data parallel node groups",
    "m -dp 2 -ep --enable-eplb --platform tpu": "only supported on CUDA, ROCm and XPU",
    "m -ep --enable-eplb": "requires --tensor-parallel-size or --data-parallel-size above 1",
    "m -dp 4 -ep --enable-eplb --enable-elastic-ep --elastic-ep-max-dp-size 2": "must be at least --data-parallel-size",
    "m -dp 0": "--data-parallel-size must be at least 1",
    "m -tp 0": "--tensor-parallel-size must be at least 1",
    "m -dp 2 --dp-sync-interval 0": "--dp-sync-interval must be at least 1",
    "m -dp 2 -dpb carrier-pigeon": "can only be ray or mp",
    "m -dp 2 -dpb ray": "needs a Ray cluster",
    "m -dp 4 --nnodes 2 --node-rank 2": "must be less than --nnodes 2",
    "m -dp 3 --nnodes 2": "not divisible by --nnodes 2",
    "m -dp 2 -tp 3 --nnodes 3": "must be divisible by the 2 data parallel node groups",
    "m -dp 4 --nnodes 2 -dpe --moe": "cannot unambiguously identify external data-parallel ranks",
    "m -dp 4 --nnodes 2 -dpb ray": "not supported with --data-parallel-backend ray",
    "m -dp 4 --enable-eplb": "--enable-eplb requires --enable-expert-parallel",
    "m -dp 4 --enable-elastic-ep": "--enable-elastic-ep requires --enable-eplb",
    "m -dp 4 -pp 2 -ep --enable-eplb --enable-elastic-ep": "requires --pipeline-parallel-size 1",
    "m -dp 4 -dpl 2 -dph -ep --enable-eplb --enable-elastic-ep --moe": "cannot be used with --data-parallel-hybrid-lb",
    "m -dp 4 --enable-fault-tolerance": "requires external load balancing",
    "m -dp 4 -dpn 0 --enable-fault-tolerance -asc 2 --moe": "requires external load balancing",
    "m -dp 4 -dpm -dpl 1 --moe": "--data-parallel-multi-port-external-lb requires",
    "m -dp 4 -dpm -dpl 3 --moe": "--data-parallel-multi-port-external-lb requires",
    "m -dp 4 -dpm -dpl 2 -dpe --moe": "goes with none of",
    "m -dp 4 -dpm -dpl 2 -asc 2 --moe": "requires --api-server-count 1",
    "m --emulate-version 0.9": "oldest wire that is implemented",
    "m --emulate-version newest": "not a version",
    "m --fault slow-toad": "unknown fault",
    "m --fault slow-load:minutes=3": "cannot use 'minutes=3'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_lines_name_the_flags(line):
    with pytest.raises(ValueError, match=re.escape(REFUSED[line])):
        launch(line)


@pytest.mark.parametrize(
    "line", ["m --no-such-flag", "m -dp four", "m --max-model-len 1.5", "m --data-parallel-siz", "m --port"]
)
def test_bad_syntax_ends_the_program_as_argparse_does(line, capsys):
    with pytest.raises(SystemExit) as leaving:
        launch(line)
    assert leaving.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_abbreviations_and_underscores_reach_the_same_flag():
    options = parse_options(["m", "-dp", "2", "--data_parallel_addr", "10.9.9.9"])
    assert options.data_parallel_address == "10.9.9.9"


def test_a_config_file_gives_flags_that_the_command_line_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "# ours\ndata-parallel-size: 4\ndata_parallel_size_local: 1 # one\nenforce-eager: true\nheadless: false\n"
    )
    options = parse_options(["m", "--config", str(path), "-dp", "8"])
    assert (options.data_parallel_size, options.data_parallel_size_local) == (8, 1)
    path.write_text("compilation:\n  level: 3\n")
    with pytest.raises(ValueError, match="only `name: value` lines"):
        parse_options(["m", f"--config={path}"])


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("auto", 32768), ("-1", 32768)]
)
def test_lengths_may_be_written_as_people_write_them(text, tokens):
    assert parse_options(["m", f"--max-model-len={text}"]).max_model_len == tokens


def test_the_rpc_address_of_a_single_rank_is_always_loopback():
    assert launch("m -dpa 10.0.0.1").address == "127.0.0.1"
    assert launch("m -dp 2 --master-addr 10.0.0.2").address == "10.0.0.2"


@pytest.mark.parametrize(
    ("config", "moe"),
    [
        ('{"num_experts": 8}', True),
        ('{"n_routed_experts": 64}', True),
        ('{"text_config": {"num_experts": 8}}', True),
        ('{"hidden_size": 8}', False),
    ],
)
def test_the_models_own_config_says_whether_it_has_experts(tmp_path, config, moe):
    (tmp_path / "config.json").write_text(config)
    assert is_moe(parse_options([str(tmp_path)])) is moe
    assert is_moe(parse_options([str(tmp_path), "--no-moe"])) is False


def test_the_version_comes_from_the_flag_then_the_environment(monkeypatch):
    monkeypatch.setenv("DP_ENGINE_VERSION", "0.32.4")
    assert parse_options(["m"]).version == "0.32.4"
    assert parse_options(["m", "--emulate-version", "0.33"]).version == "0.33"
