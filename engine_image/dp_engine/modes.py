"""Which process this command line asks for, and which combinations vLLM refuses.

Order of evaluation and refusals follow protocol notes §1.3 and §1.4 for the emulated release. Pure: options, the kind
of model and the environment in, a Launch or a ValueError out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from dp_engine.options import Options
from dp_engine.versions import Wire, wire_of

LoadBalancing = Literal["internal", "hybrid", "external", "offline"]


class Launch(Struct, frozen=True, kw_only=True):
    """What one node starts: `size_local` ranks from `start_rank` on, and `api_servers` front ends (0 = headless)."""

    load_balancing: LoadBalancing
    size: int
    size_local: int
    start_rank: int
    headless: bool
    api_servers: int
    address: str
    rpc_port: int
    moe: bool
    dense_lock_step: bool = False  # up to 0.13 dense ranks step together as well
    without_coordinator: bool = False  # dense and external, 0.14 to 0.20
    elastic_ep: bool = False
    store_port: int | None = None  # where an offline group meets; INIT names it otherwise
    children: int = 0  # servers that a multi-port supervisor starts; 0: no supervisor

    @property
    def local_ranks(self) -> range:
        return range(self.start_rank, self.start_rank + self.size_local)

    @property
    def managed_ranks(self) -> range:
        """Ranks that this node's API servers use."""
        return range(self.size) if self.load_balancing == "internal" else self.local_ranks

    @property
    def all_local(self) -> bool:
        """Every rank that shakes hands here runs here and will: ipc instead of tcp, and the rpc port is never opened.

        The ranks of an elastic group may be elsewhere tomorrow.
        """
        return (self.size_local == self.size and not self.elastic_ep) or self.load_balancing == "offline"

    @property
    def clients_are_local(self) -> bool:
        """Front ends and the ranks that they use share a node: requests travel over ipc."""
        return self.all_local or self.load_balancing != "internal"

    @property
    def leads(self) -> bool:
        """The node that answers the group's handshake and runs the coordinator. Offline, every rank is its own."""
        return not self.headless and (self.start_rank == 0 or self.load_balancing == "offline")

    @property
    def runs_coordinator(self) -> bool:
        return self.leads and self.size > 1 and self.load_balancing != "offline" and not self.without_coordinator

    @property
    def coordinated(self) -> bool:
        """Ranks step together in waves: MoE, and up to 0.13 every model."""
        return self.size > 1 and (self.moe or self.dense_lock_step)


_MOE_CONFIG_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


def is_moe(options: Options) -> bool:
    """--moe or --no-moe, else what config.json of a local model directory says, else whether experts are asked for."""
    if options.moe is not None:
        return options.moe
    path = os.path.join(options.model, "config.json")
    if not os.path.isfile(path):
        return options.expert_parallel
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    # A model of several kinds of input keeps its language model's sizes in a part of their own.
    parts = [config, config.get("text_config") or {}]
    return any(isinstance(part.get(key), int) and part[key] > 0 for part in parts for key in _MOE_CONFIG_KEYS)


def _node_placement(options: Options) -> tuple[int, int]:
    """(first rank, local size) from --nnodes/--node-rank. Raises ValueError."""
    workers = options.tensor_parallel_size * options.pipeline_parallel_size
    total = workers * options.data_parallel_size
    if options.data_parallel_backend == "ray":
        raise ValueError("--nnodes > 1 is not supported with --data-parallel-backend ray")
    if total % options.nnodes:
        raise ValueError(f"the world size {total} is not divisible by --nnodes {options.nnodes}")
    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(
            f"--node-rank {options.node_rank} must be less than --nnodes {options.nnodes}, and not negative"
        )
    local_world = total // options.nnodes
    return options.node_rank * local_world // workers, max(local_world // workers, 1)


def _mode(options: Options, wire: Wire) -> tuple[LoadBalancing, int, int]:
    """(load balancing, first rank, local size) in vLLM's order of evaluation. Raises ValueError."""
    size, local = options.data_parallel_size, options.data_parallel_size_local
    start, rank = options.data_parallel_start_rank, options.data_parallel_rank
    if options.data_parallel_external_lb and options.data_parallel_hybrid_lb:
        raise ValueError("--data-parallel-external-lb and --data-parallel-hybrid-lb cannot be enabled together")
    external = options.data_parallel_external_lb or rank is not None
    if external and wire.one_mode_only and (options.data_parallel_hybrid_lb or start is not None):
        raise ValueError(
            "Cannot use more than one data parallel load balancing mode: --data-parallel-rank or "
            "--data-parallel-external-lb goes with neither --data-parallel-start-rank nor --data-parallel-hybrid-lb"
        )
    node_rank, node_local = _node_placement(options) if options.nnodes > 1 else (0, None)
    if node_local is not None and size > 1 and options.data_parallel_external_lb:
        if rank is None and wire.node_rank_must_name_a_rank and options.nnodes % size:
            raise ValueError(
                f"--node-rank cannot unambiguously identify external data-parallel ranks: --nnodes {options.nnodes} is "
                f"not divisible by --data-parallel-size {size}"
            )
        rank = node_rank if rank is None else rank
    elif node_local is not None and local is None:
        local = node_local
    if external:
        if rank is None:
            raise ValueError("--data-parallel-external-lb requires --data-parallel-rank, or --nnodes and --node-rank")
        if local not in {None, 1}:
            raise ValueError(f"--data-parallel-rank requires --data-parallel-size-local 1, not {local}")
        return "external", rank, 1
    if local is None:
        if options.data_parallel_hybrid_lb:
            raise ValueError("--data-parallel-size-local must be set to use --data-parallel-hybrid-lb")
        return "internal", 0, size  # whatever the start rank says
    first = node_rank if start is None else start
    asked_by_start_rank = start is not None and (start > 0 or wire.start_rank_0_is_hybrid)
    if not options.data_parallel_hybrid_lb and not (asked_by_start_rank and not options.headless):
        return "internal", first, local
    if local == 1:
        return "external", first, local
    return ("internal" if local == size else "hybrid"), first, local


def _check(options: Options, wire: Wire, load_balancing: LoadBalancing, first: int, local: int, *, moe: bool) -> None:
    """Refusals that do not depend on how the mode was found. Raises ValueError naming the flags."""
    size = options.data_parallel_size
    by_flag = options.data_parallel_external_lb or options.data_parallel_rank is not None
    _check_ranges(options, wire, local)
    if size < 1:
        raise ValueError(f"--data-parallel-size must be at least 1, not {size}")
    if options.data_parallel_backend not in {"mp", "ray"}:
        raise ValueError(f"--data-parallel-backend can only be ray or mp, not {options.data_parallel_backend!r}")
    if options.data_parallel_backend == "ray":
        raise ValueError("--data-parallel-backend ray needs a Ray cluster: the stand-in engine has none")
    if local > size:
        raise ValueError(f"--data-parallel-size-local {local} must be <= data_parallel_size {size}")
    if load_balancing == "external" and size == 1:
        raise ValueError("--data-parallel-external-lb can only be set when data_parallel_size > 1")
    if size > 1 and not 0 <= first < size:
        raise ValueError(f"--data-parallel-rank {first} must be in the range [0, {size})")
    # A hybrid node of one rank becomes external without this check, and fails later for want of a coordinator.
    if by_flag and size > 1 and not moe and wire.dense_external == "refused":
        raise ValueError("Non-MoE models do not support external data parallel mode (--data-parallel-external-lb)")
    if options.nnodes > 1 and load_balancing != "external" and options.nnodes % max(size // max(local, 1), 1):
        raise ValueError(
            f"--nnodes {options.nnodes} must be divisible by the {size // local} data parallel node groups"
        )
    if options.headless:
        if (options.api_server_count or 0) > (0 if wire.headless_refuses_count else 1):
            raise ValueError(f"--api-server-count={options.api_server_count} cannot be used with --headless")
        if load_balancing == "hybrid":
            raise ValueError("--data-parallel-hybrid-lb is not applicable in headless mode (--headless)")
        if local <= 0:
            raise ValueError("--data-parallel-size-local must be > 0 in headless mode (--headless)")
    _check_experts(options, wire, load_balancing, moe=moe)
    if options.fault_tolerance and (not by_flag or options.api_server_count not in {None, 1}):
        raise ValueError("--enable-fault-tolerance requires external load balancing and --api-server-count 1")


def _check_ranges(options: Options, wire: Wire, local: int) -> None:
    """Numbers that are none of their kind. Raises ValueError.

    Until ranges were checked, a negative number of local ranks started a head that waits for ever (see the launcher).
    """
    at_least_1 = {
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--dp-sync-interval": 1 if options.sync_interval_steps is None else options.sync_interval_steps,
    }
    for flag, value in at_least_1.items():
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, not {value}")
    if local < 0 and (wire.checks_ranges or options.data_parallel_size == 1):
        raise ValueError(f"--data-parallel-size-local must be >= 0, not {local}")
    if wire.checks_ranges and not 1 <= options.data_parallel_rpc_port <= 65535:
        raise ValueError(f"--data-parallel-rpc-port must be in 1..65535, not {options.data_parallel_rpc_port}")
    if wire.checks_ranges and options.shutdown_timeout_s < 0:
        raise ValueError(f"--shutdown-timeout must be >= 0, not {options.shutdown_timeout_s}")


def _check_experts(options: Options, wire: Wire, load_balancing: LoadBalancing, *, moe: bool) -> None:
    """What expert parallelism asks for. Raises ValueError."""
    if options.expert_parallel and not moe:
        raise ValueError("--enable-expert-parallel: the number of experts in the model must be greater than 0")
    if options.eplb:
        if options.platform not in {None, "cuda", "rocm", "xpu"}:
            raise ValueError(
                f"--enable-eplb is only supported on CUDA, ROCm and XPU devices, not on {options.platform}"
            )
        if not options.expert_parallel:
            raise ValueError("--enable-eplb requires --enable-expert-parallel")
        if options.tensor_parallel_size * options.data_parallel_size <= 1:
            raise ValueError("--enable-eplb requires --tensor-parallel-size or --data-parallel-size above 1")
    elif dict(options.eplb_config).get("num_redundant_experts"):
        raise ValueError("--eplb-config.num_redundant_experts requires --enable-eplb")
    if not options.elastic_ep:
        return
    if not options.eplb:
        raise ValueError("--enable-elastic-ep requires --enable-eplb")
    if options.pipeline_parallel_size > 1:
        raise ValueError("--enable-elastic-ep requires --pipeline-parallel-size 1")
    if load_balancing == "hybrid":
        raise ValueError("--enable-elastic-ep cannot be used with --data-parallel-hybrid-lb")
    if load_balancing == "external" and not wire.elastic_external:
        raise ValueError(
            "--enable-elastic-ep cannot be used with --data-parallel-rank or --data-parallel-external-lb before 0.33"
        )
    largest = options.elastic_ep_max_dp_size
    if largest is not None and largest < options.data_parallel_size:
        raise ValueError(
            f"--elastic-ep-max-dp-size {largest} must be at least --data-parallel-size {options.data_parallel_size}"
        )


def _api_servers(options: Options, wire: Wire) -> int:
    """How many API servers a serving node starts when nothing is said: since 0.15 one per engine that it manages."""
    if options.api_server_count is not None:
        count = options.api_server_count
    elif not wire.api_servers_derived or options.data_parallel_external_lb or options.data_parallel_rank is not None:
        count = 1
    elif options.data_parallel_hybrid_lb or options.data_parallel_start_rank is not None:
        count = options.data_parallel_size_local or 1
    else:
        count = options.data_parallel_size
    return min(count, 1) if options.elastic_ep else count


def _resolve_supervisor(options: Options, *, moe: bool) -> Launch:
    """A node whose supervisor starts one external server per local rank. Raises ValueError."""
    size, local = options.data_parallel_size, options.data_parallel_size_local or 0
    start = options.data_parallel_start_rank
    if start is None:
        start = options.node_rank * local
    flag = "--data-parallel-multi-port-external-lb"
    if options.data_parallel_rank is not None or options.data_parallel_external_lb or options.data_parallel_hybrid_lb:
        raise ValueError(
            f"{flag} goes with none of --data-parallel-rank, --data-parallel-external-lb, --data-parallel-hybrid-lb"
        )
    if options.headless or options.api_server_count not in {None, 1}:
        raise ValueError(f"{flag} requires --api-server-count 1 and no --headless")
    if options.uds is not None or options.grpc:
        raise ValueError(f"{flag} does not support {'--grpc' if options.grpc else '--uds'}")
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise ValueError("--ssl-keyfile and --ssl-certfile must be provided together")
    if size < 2 or local < 2 or size % local:
        raise ValueError(
            f"{flag} requires --data-parallel-size >= 2 and a --data-parallel-size-local >= 2 that divides it"
        )
    if not 0 <= start <= size - local:
        raise ValueError(f"--data-parallel-start-rank {start} leaves no room for {local} of {size} ranks")
    if options.port <= options.supervisor_port < options.port + local:
        raise ValueError(
            f"--data-parallel-supervisor-port {options.supervisor_port} is one of the servers' ports "
            f"{options.port}-{options.port + local - 1}"
        )
    one = msgspec.structs.replace(options, data_parallel_external_lb=True, nnodes=1)
    _check(one, wire_of(options.version), "external", start, 1, moe=moe)
    return Launch(
        load_balancing="external",
        size=size,
        size_local=local,
        start_rank=start,
        headless=False,
        api_servers=1,
        address=options.data_parallel_address or options.master_addr,
        rpc_port=options.data_parallel_rpc_port,
        moe=moe,
        children=local,
    )


def _offline(options: Options, wire: Wire, env: Mapping[str, str], *, moe: bool) -> Launch | None:
    """One rank of a group that the VLLM_DP_* variables describe; None when they do not. Raises ValueError."""
    size = int(env.get("VLLM_DP_SIZE") or 1)
    if size <= 1 or options.data_parallel_size != 1 or options.data_parallel_size_local == 0:
        return None
    if not moe and not wire.dense_offline:
        raise ValueError(
            "Offline data parallel mode (VLLM_DP_SIZE) is not supported for dense models: "
            "give --moe, or a local model whose config.json has experts"
        )
    rank = int(env.get("VLLM_DP_RANK") or 0)
    if not 0 <= rank < size:
        raise ValueError(f"VLLM_DP_RANK {rank} must be in the range [0, {size})")
    return Launch(
        load_balancing="offline",
        size=size,
        size_local=1,
        start_rank=rank,
        headless=False,
        api_servers=1,
        address=env.get("VLLM_DP_MASTER_IP") or "127.0.0.1",
        rpc_port=options.data_parallel_rpc_port,
        moe=moe,
        dense_lock_step=wire.dense_lock_step,
        store_port=int(env.get("VLLM_DP_MASTER_PORT") or 0) or None,
    )


def resolve(options: Options, *, moe: bool, env: Mapping[str, str] | None = None) -> Launch:
    """Decide what to start. Raises ValueError, naming the flags, for a combination that vLLM refuses.

    `env` holds the VLLM_DP_* variables of an offline rank; None means that there are none.
    """
    wire = wire_of(options.version)
    if options.data_parallel_multi_port_external_lb:
        return _resolve_supervisor(options, moe=moe)
    if (offline := _offline(options, wire, env or {}, moe=moe)) is not None:
        return offline
    # No API server at all is another way to say headless.
    count = options.api_server_count
    headless = options.headless or (count is not None and count < 1)
    options = msgspec.structs.replace(options, headless=headless)
    if options.grpc:
        raise ValueError("--grpc asks for a gRPC server: the stand-in engine has none")
    load_balancing, first, local = _mode(options, wire)
    _check(options, wire, load_balancing, first, local, moe=moe)
    size = options.data_parallel_size
    if load_balancing == "internal" and not headless and first > 0:
        raise ValueError(
            f"found internal DPLB, which is incompatible with --data-parallel-start-rank {first}: "
            "the node that serves the API holds rank 0"
        )
    address = options.data_parallel_address or options.master_addr
    return Launch(
        load_balancing=load_balancing,
        size=size,
        size_local=local,
        start_rank=first,
        headless=headless,
        api_servers=0 if headless else _api_servers(options, wire),
        address="127.0.0.1" if size == 1 else address,
        rpc_port=options.data_parallel_rpc_port,
        moe=moe,
        dense_lock_step=wire.dense_lock_step,
        elastic_ep=options.elastic_ep,
        without_coordinator=load_balancing == "external" and not moe and wire.dense_external != "works",
    )
