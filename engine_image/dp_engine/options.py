"""The command line: vLLM's names, short forms and defaults for everything that matters to data parallelism.

Flags of vLLM that change nothing here (kernels, caches, parsers ...) are known by name, accepted and ignored, so
that one command line starts either engine. A flag unknown to both ends the program as argparse does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dp_engine.devices import PLATFORMS
from dp_engine.faults import Fault, parse_faults
from dp_engine.versions import emulated_version, unknown_flags, wire_of

# vLLM flags without effect here: those that take a value, and switches (which also exist with --no-).
_IGNORED_VALUES = """
additional-config aggregate-engine-logging-interval allowed-headers allowed-local-media-path allowed-media-domains
allowed-methods allowed-origins all2all-backend attention-backend attention-config block-size calculate-kv-scales
chat-template chat-template-content-format code-revision compilation-config config-format
convert cp-kv-cache-interleave-size disable-access-log-for-endpoints cpu-offload-gb cudagraph-capture-sizes cudagraph-metrics data-parallel-hybrid-port
dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size
decode-context-parallel-size default-chat-template-kwargs default-mm-loras device
distributed-executor-backend distributed-timeout-seconds
download-dir dtype ec-transfer-config exclude-tools-when-tool-choice-none
expert-placement-strategy fully-sharded-loras generation-config gpu-memory-utilization
h11-max-header-count h11-max-incomplete-event-size hf-config-path hf-overrides hf-token ignore-patterns
interleave-mm-strings io-processor-plugin kv-cache-dtype kv-cache-memory-bytes kv-cache-metrics-sample kv-events-config
kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config kernel-config limit-mm-per-prompt
load-format log-config-file logits-processor-pattern logits-processors logprobs-mode long-prefill-token-threshold
lora-dtype lora-modules mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype max-cpu-loras
max-cudagraph-capture-size max-log-len max-logprobs max-lora-rank max-loras
max-num-partial-prefills max-long-partial-prefills max-parallel-loading-workers middleware mm-encoder-attn-backend
mm-encoder-tp-mode mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs mm-shm-cache-max-object-size-mb
model-class-overrides model-impl model-loader-extra-config num-gpu-blocks-override num-lookahead-slots numa-bind-nodes
numa-bind-cpus offload-backend optimization-level otlp-traces-endpoint override-attention-dtype override-generation-config
performance-mode pooler-config prefill-context-parallel-size prefix-caching-hash-algo profiler-config pt-load-map-location
quantization ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin renderer-num-workers
response-role revision root-path runner safetensors-load-strategy scheduler-cls scheduler-reserve-full-isl
scheduling-policy seed show-hidden-metrics-for-version spec-method spec-model spec-tokens
speculative-config ssl-ca-certs ssl-cert-reqs stream-interval structured-outputs-config task
tokenizer tokenizer-mode tokenizer-revision tool-call-parser tool-parser-plugin tool-server ubatch-size
uvicorn-log-level video-pruning-rate weight-transfer-config worker-cls worker-extension-cls
max-waiting-queue-length tokens-only-cache structured-outputs-backend guided-decoding-backend rope-scaling rope-theta
swap-space nixl-config
""".split()  # noqa: SIM905 - a page of names
_IGNORED_SWITCHES = """
allow-credentials allow-deprecated-quantization async-scheduling batch-invariant
disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing disable-hybrid-kv-cache-manager
disable-log-requests disable-log-stats disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization
disable-sliding-window disable-uvicorn-access-log disable-uvicorn-metrics-access-log enable-auto-tool-choice
enable-chunked-prefill enable-cumem-allocator enable-dbo enable-flashinfer-autotune enable-force-include-usage enable-layerwise-nvtx-tracing
enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details enable-lora
enable-lora-bias enable-mfu-metrics enable-mm-embeds enable-offline-docs enable-prefix-caching enable-prompt-embeds
enable-prompt-tokens-details enable-reasoning enable-return-routed-experts enable-sleep-mode
enable-ssl-refresh enable-tokenizer-info-endpoint enforce-eager fault-tolerance
kv-cache-metrics language-model-only log-error-stack mm-encoder-only multi-modal-content numa-bind
return-tokens-as-token-ids skip-mm-profiling skip-tokenizer-init trust-request-chat-template
trust-remote-code use-gpu-for-pooling use-tqdm-on-load disable-jit-monitor moe-shared-experts-overlap
enable-ep-weight-filter enable-request-logging
""".split()  # noqa: SIM905 - a page of names


_IGNORED_LISTS = frozenset(
    """allowed-media-domains cudagraph-capture-sizes exclude-log-deltas ignore-patterns lora-modules middleware
    numa-bind-cpus numa-bind-nodes logits-processors disable-access-log-for-endpoints""".split()  # noqa: SIM905 - a page of names
)


# Ignored here, but ranks that step together must agree on them (protocol notes §2.6): what they are when nobody says
# anything. vLLM leaves out --disable-custom-all-reduce and --max-parallel-loading-workers, and so do we.
_GROUP_SETTINGS: dict[str, object] = {
    "all2all-backend": "allgather_reducescatter",
    "cp-kv-cache-interleave-size": 1,
    "dbo-decode-token-threshold": 32,
    "dbo-prefill-token-threshold": 512,
    "dcp-comm-backend": None,
    "dcp-kv-cache-interleave-size": 1,
    "decode-context-parallel-size": 1,
    "disable-nccl-for-dp-synchronization": None,
    "distributed-timeout-seconds": None,
    "enable-dbo": False,
    "enable-ep-weight-filter": False,
    "expert-placement-strategy": "linear",
    "prefill-context-parallel-size": 1,
    "ubatch-size": 0,
}
_EPLB_DEFAULTS = {
    "window_size": 1000,
    "step_interval": 3000,
    "num_redundant_experts": 0,
    "log_balancedness": False,
    "log_balancedness_interval": 1,
    "policy": "default",
    "communicator": None,
}
# Names that 0.11 has for parts of --eplb-config.
_OLD_EPLB_FLAGS = {
    "num-redundant-experts": "num_redundant_experts",
    "eplb-window-size": "window_size",
    "eplb-step-interval": "step_interval",
}


class Options(Struct, frozen=True, kw_only=True):
    """One parsed command line. None means that the user said nothing and vLLM derives the value."""

    model: str
    served_model_names: tuple[str, ...]
    host: str | None
    port: int
    api_server_count: int | None
    headless: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel: bool
    eplb: bool
    eplb_config: tuple[tuple[str, Any], ...]
    data_parallel_size: int
    data_parallel_size_local: int | None
    data_parallel_start_rank: int | None
    data_parallel_rank: int | None
    data_parallel_address: str | None
    data_parallel_rpc_port: int
    data_parallel_backend: str
    data_parallel_hybrid_lb: bool
    data_parallel_external_lb: bool
    data_parallel_multi_port_external_lb: bool
    supervisor_port: int
    probe_interval_s: float
    probe_timeout_s: float
    probe_failures: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    device_ids: tuple[str, ...] | None
    sync_interval_steps: int | None
    elastic_ep: bool
    elastic_ep_max_dp_size: int | None
    fault_tolerance: bool
    shutdown_timeout_s: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cpu_distributed_timeout_s: float
    api_key: str | None
    request_id_headers: bool
    server_load_tracking: bool
    ssl_keyfile: str | None
    ssl_certfile: str | None
    uds: str | None
    grpc: bool
    version: str
    moe: bool | None
    load_s: float
    tokens_per_second: float
    parallel_config_hash: str | None
    group_settings: tuple[tuple[str, str], ...]
    faults: tuple[Fault, ...]
    fault_endpoint: bool
    platform: str | None


def _dashes(item: str) -> str:
    """Spell a long flag with dashes."""
    if not item.startswith("--"):
        return item
    name, separator, value = item.partition("=")
    return name.replace("_", "-") + separator + value


def read_config(path: str) -> list[str]:
    """Arguments from a file of `name: value` lines, the flat part of YAML that `--config` files consist of.

    Raises ValueError on nested values and OSError on an unreadable file.
    """
    arguments: list[str] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            text = line.split(" #")[0].rstrip()
            if not text or text.startswith("#") or text == "---":
                continue
            name, separator, value = text.partition(":")
            value = value.strip().strip("'\"")
            if not separator or name != name.strip() or not value:
                raise ValueError(f"--config {path}, line {number}: only `name: value` lines are read here")
            if value in {"true", "True"}:
                arguments.append(f"--{name}")
            elif value not in {"false", "False"}:
                arguments += [f"--{name}", value]
    return arguments


def spell(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores and with `--config FILE` replaced by what the file says.

    The file's arguments come first, so that the command line wins. Raises as read_config does.
    """
    from_file: list[str] = []
    given: list[str] = []
    items = iter(argv)
    for item in items:
        if item == "--config" or item.startswith("--config="):
            path = item.partition("=")[2] or next(items, "")
            from_file += read_config(path)
        elif item.startswith("--") and "." in item.partition("=")[0]:
            # `--json-flag.key value` sets a part of the flag before the dot.
            name, separator, value = item.partition("=")
            flag, _, key = name.partition(".")
            value = value if separator else next(items, None)  # type: ignore[assignment]
            given.append(flag if value is None else f"{flag}={key}={value}")
        else:
            given.append(item)
    return [_dashes(item) for item in [*from_file, *given]]


def human_int(text: str) -> int:
    """Read 4096, 4k (thousands), 4K (1024s), 1.5k: what vLLM accepts for lengths; `auto` and -1 mean its default."""
    if text in {"auto", "-1"}:
        return DEFAULT_MAX_MODEL_LEN
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"invalid integer value: {text!r}")
    scale = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    value = float(match[1]) * scale
    if value != math.floor(value):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(value)


def eplb_setting(text: str) -> dict[str, Any]:
    """Read a part of --eplb-config: `{"key": value}`, or `key=value` as `spell` writes `--eplb-config.key value`."""
    key, separator, value = text.partition("=")
    if separator and not text.lstrip().startswith("{"):
        return {key.replace("-", "_"): json.loads(value.lower()) if _NUMBER_OR_FLAG.fullmatch(value) else value}
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as failure:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {failure}") from None


def _eplb_config(parsed: argparse.Namespace) -> tuple[tuple[str, Any], ...]:
    """What of --eplb-config differs from vLLM's defaults, in order of names."""
    found: dict[str, Any] = {}
    for flag, key in _OLD_EPLB_FLAGS.items():
        if (value := getattr(parsed, flag.replace("-", "_"))) is not None:
            found[key] = value
    if parsed.eplb_log_balancedness:
        found["log_balancedness"] = True
    for part in parsed.eplb_config:
        found.update(part)
    return tuple(sorted((key, value) for key, value in found.items() if value != _EPLB_DEFAULTS.get(key, ...)))


def _group_settings(parsed: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """What of the settings that ranks must agree on differs from vLLM's defaults."""
    found: list[tuple[str, str]] = []
    for name, default in _GROUP_SETTINGS.items():
        value = getattr(parsed, f"ignored_{name}")
        text = str(value[0] if isinstance(value, list) else value)
        if value is not None and text != str(default):
            found.append((name, text))
    return tuple(found)


_NUMBER_OR_FLAG = re.compile(r"-?\d+(\.\d+)?|[Tt]rue|[Ff]alse|null")
DEFAULT_MAX_MODEL_LEN = 32768
_SWITCH = argparse.BooleanOptionalAction


def build_parser(prog: str, version: str) -> argparse.ArgumentParser:
    """Parser of `serve` as of `version`. Defaults are vLLM's (protocol notes §1.1) unless the flag is our own."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Serve a pretend model with vLLM's data-parallel machinery, on CPU."
    )
    unknown = unknown_flags(version)

    def add(*names: str, **how: Any) -> None:
        known = [name for name in names if name.lstrip("-") not in unknown]
        if known:
            parser.add_argument(*known, **how)
        else:
            parser.set_defaults(**{names[0].lstrip("-").replace("-", "_"): how.get("default")})

    add("model_tag", nargs="?", help="model name or path")
    add("--model")
    add("--served-model-name", nargs="+", default=[])
    add("--host")
    add("--port", type=int, default=8000)
    add("--api-server-count", "-asc", type=int)
    add("--headless", action=_SWITCH, default=False)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--data-parallel-size", "-dp", type=int, default=1)
    add("--data-parallel-size-local", "-dpl", type=int)
    add("--data-parallel-start-rank", "-dpr", type=int)
    add("--data-parallel-rank", "-dpn", type=int)
    add("--data-parallel-address", "-dpa")
    add("--data-parallel-rpc-port", "-dpp", type=int, default=29550)
    add("--data-parallel-backend", "-dpb", default="mp")
    add("--data-parallel-hybrid-lb", "-dph", action=_SWITCH, default=False)
    add("--data-parallel-external-lb", "-dpe", action=_SWITCH, default=False)
    add("--data-parallel-multi-port-external-lb", "-dpm", action=_SWITCH, default=False)
    add("--data-parallel-supervisor-port", type=int, default=9256)
    add("--dp-supervisor-probe-interval-s", type=float, default=5)
    add("--dp-supervisor-probe-timeout-s", type=float, default=5)
    add("--dp-supervisor-probe-failure-threshold", type=int, default=3)
    add("--nnodes", "-n", type=int, default=1)
    add("--node-rank", "-r", type=int, default=0)
    add("--master-addr", default="127.0.0.1")
    add("--master-port", type=int, default=29501)
    add("--device-ids")
    add("--dp-sync-interval", type=int)
    add("--elastic-ep-max-dp-size", type=int)
    add("--fault-tolerance-config")
    add("--enable-elastic-ep", action=_SWITCH, default=False)
    add("--enable-fault-tolerance", action=_SWITCH, default=False)
    add("--enable-expert-parallel", "-ep", action=_SWITCH, default=False)
    add("--enable-eplb", action=_SWITCH, default=False)
    add("--eplb-config", action="append", type=eplb_setting, default=[])
    for flag in _OLD_EPLB_FLAGS:
        add(f"--{flag}", type=int)
    add("--eplb-log-balancedness", action=_SWITCH, default=False)
    add("--shutdown-timeout", type=int, default=0)
    add("--max-model-len", type=human_int, default=DEFAULT_MAX_MODEL_LEN)
    add("--max-num-seqs", type=human_int, default=256)
    add("--max-num-batched-tokens", type=human_int, default=2048)
    add("--cpu-distributed-timeout-seconds", type=float)
    add("--api-key", nargs="*", default=[])
    add("--enable-request-id-headers", action=_SWITCH, default=False)
    add("--enable-server-load-tracking", action=_SWITCH, default=False)
    add("--ssl-keyfile")
    add("--ssl-certfile")
    add("--uds")
    add("--grpc", action="store_true", default=False)
    for name in _IGNORED_VALUES:
        add(f"--{name}", nargs="+" if name in _IGNORED_LISTS else 1, dest=f"ignored_{name}", help=argparse.SUPPRESS)
    for name in _IGNORED_SWITCHES:
        add(f"--{name}", action=_SWITCH, dest=f"ignored_{name}", help=argparse.SUPPRESS)
    add("-q", "-O", "-sc", "-ac", "-cc", nargs=1, dest="ignored_short", help=argparse.SUPPRESS)
    own = parser.add_argument_group("stand-in engine")
    own.add_argument("--emulate-version", help="vLLM release to imitate (default: DP_ENGINE_VERSION, else the newest)")
    own.add_argument("--moe", action=_SWITCH, help="ranks form one lock-stepped group; default: config.json of MODEL")
    own.add_argument("--load-seconds", type=float, default=0.2, help="how long the pretended model load takes")
    own.add_argument("--tokens-per-second", type=float, default=100.0, help="per request; 0 = as fast as possible")
    own.add_argument("--parallel-config-hash", help="instead of the computed hash that MoE ranks must agree on")
    own.add_argument("--fault", action="append", default=[], help="KIND[:key=value,...]; see docs/engine.md")
    own.add_argument("--enable-fault-endpoint", action=_SWITCH, default=False, help="POST /fault injects faults")
    own.add_argument("--platform", choices=list(PLATFORMS), help="default: what the environment's variables suggest")
    return parser


def _asked_version(arguments: Sequence[str]) -> str:
    """The version decides which flags exist, so it is read before the others."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--emulate-version")
    return emulated_version(early.parse_known_args(arguments)[0].emulate_version)


def parse_options(argv: Sequence[str], *, prog: str = "dp-engine serve") -> Options:
    """Parse the arguments after `serve`. Exits like argparse (2) on bad syntax, raises ValueError on bad values."""
    spelt = spell(argv)
    version = _asked_version(spelt)
    wire_of(version)
    parsed = build_parser(prog, version).parse_args(spelt)
    model = parsed.model_tag or parsed.model or "Qwen/Qwen3-0.6B"
    return Options(
        model=model,
        served_model_names=tuple(parsed.served_model_name) or (model,),
        host=parsed.host,
        port=parsed.port,
        api_server_count=parsed.api_server_count,
        headless=parsed.headless,
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        expert_parallel=parsed.enable_expert_parallel,
        eplb=parsed.enable_eplb,
        eplb_config=_eplb_config(parsed),
        data_parallel_size=parsed.data_parallel_size,
        data_parallel_size_local=parsed.data_parallel_size_local,
        data_parallel_start_rank=parsed.data_parallel_start_rank,
        data_parallel_rank=parsed.data_parallel_rank,
        data_parallel_address=parsed.data_parallel_address,
        data_parallel_rpc_port=parsed.data_parallel_rpc_port,
        data_parallel_backend=parsed.data_parallel_backend,
        data_parallel_hybrid_lb=parsed.data_parallel_hybrid_lb,
        data_parallel_external_lb=parsed.data_parallel_external_lb,
        data_parallel_multi_port_external_lb=bool(parsed.data_parallel_multi_port_external_lb),
        supervisor_port=parsed.data_parallel_supervisor_port,
        probe_interval_s=parsed.dp_supervisor_probe_interval_s,
        probe_timeout_s=parsed.dp_supervisor_probe_timeout_s,
        probe_failures=parsed.dp_supervisor_probe_failure_threshold,
        nnodes=parsed.nnodes,
        node_rank=parsed.node_rank,
        master_addr=parsed.master_addr,
        master_port=parsed.master_port,
        device_ids=None if parsed.device_ids is None else tuple(parsed.device_ids.split(",")),
        sync_interval_steps=parsed.dp_sync_interval,
        elastic_ep=parsed.enable_elastic_ep,
        elastic_ep_max_dp_size=parsed.elastic_ep_max_dp_size,
        fault_tolerance=parsed.enable_fault_tolerance,
        shutdown_timeout_s=parsed.shutdown_timeout,
        max_model_len=parsed.max_model_len,
        max_num_seqs=parsed.max_num_seqs,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        cpu_distributed_timeout_s=parsed.cpu_distributed_timeout_seconds or 300.0,
        api_key=parsed.api_key[0] if parsed.api_key else None,
        request_id_headers=parsed.enable_request_id_headers,
        server_load_tracking=parsed.enable_server_load_tracking,
        ssl_keyfile=parsed.ssl_keyfile,
        ssl_certfile=parsed.ssl_certfile,
        uds=parsed.uds,
        grpc=bool(parsed.grpc),
        version=version,
        moe=parsed.moe,
        load_s=parsed.load_seconds,
        tokens_per_second=parsed.tokens_per_second,
        parallel_config_hash=parsed.parallel_config_hash,
        group_settings=_group_settings(parsed),
        faults=parse_faults(parsed.fault),
        fault_endpoint=parsed.enable_fault_endpoint,
        platform=parsed.platform,
    )
