"""What `serve` starts and in which order, and what the exit codes say (protocol notes §2 and §8).

A *serving* node has API servers: the only one or the head of an internal group, every node of a hybrid or external one.
The node with rank 0 leads: it answers everybody's handshake and runs the coordinator. Other serving nodes answer only
their own ranks, which shake hands twice. Headless nodes have ranks and nothing else.

Everything is forked before the first ZeroMQ context of this process exists (see `processes`), so engines may be up
before the head's ROUTER is bound; they connect when it is, as remote ones do.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import resource
import select
import socket
from collections.abc import Callable, Sequence

import msgspec
import zmq
from msgspec import Struct

from dp_engine import devices, environment, logs, processes
from dp_engine.coordinator_process import CoordinatorEndpoints, run_coordinator
from dp_engine.data_sockets import DataEndpoints, DataSockets, bind_data_sockets
from dp_engine.endpoints import ipc_endpoint, tcp_endpoint
from dp_engine.engine import config_hash, run_engine
from dp_engine.engine_core import EngineConfig
from dp_engine.front_end import StartError, run_handshake
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, Init
from dp_engine.metrics import SharedMetrics
from dp_engine.modes import Launch, is_moe, resolve
from dp_engine.options import Options
from dp_engine.processes import Child, Stopper
from dp_engine.versions import Wire, wire_of

REPORT_TIMEOUT_S = 120


def serve(options: Options, *, first_local_rank: int = 0) -> int:
    """Run one node's part of a group. Returns the exit code. Raises ValueError for refused combinations.

    `first_local_rank`: where this server's devices begin, when a supervisor started several on one node.
    """
    environment.check(os.environ)
    launch = resolve(options, moe=is_moe(options), env=os.environ)
    _raise_file_limit()
    logs.info(f"vLLM stand-in engine version {options.version}, model {options.model}")
    if launch.children:
        # Only this process needs an HTTP client. Its servers need the same library, and share what is loaded.
        return int(importlib.import_module("dp_engine.supervisor").supervise(options, launch, serve))
    logs.info(
        f"Data parallel ({launch.load_balancing}): size {launch.size}, ranks of this node "
        f"{launch.start_rank}-{launch.local_ranks.stop - 1}"
        if launch.size_local > 0
        else f"Data parallel ({launch.load_balancing}): size {launch.size}, no rank on this node"
    )
    if launch.headless:
        return _serve_headless(options, launch)
    return _serve_node(options, launch, first_local_rank)


def _stop_grace_s(options: Options) -> float:
    return environment.stop_grace_s(os.environ, wire_of(options.version))


def _raise_file_limit() -> None:
    """A head holds several connections per rank: use what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fork_engines(
    options: Options,
    launch: Launch,
    *,
    handshake_address: str,
    own_handshake_address: str | None = None,
    first_local_rank: int = 0,
    close: list[int],
    into: list[Child],
) -> None:
    """Start this node's ranks, each with its part of the devices. `into` collects them. Raises DeviceError, OSError."""
    wire = wire_of(options.version)
    platform = options.platform or devices.detect_platform(os.environ)
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    for local_rank, rank in enumerate(launch.local_ranks, start=first_local_rank):
        mine = devices.of_rank(
            local_rank=local_rank,
            world_size=world_size,
            platform=platform,
            env=os.environ,
            ids=options.device_ids,
            wire=wire,
            alone=launch.size == 1,
        )
        config = EngineConfig(
            rank=rank,
            launch=launch,
            options=options,
            handshake_address=handshake_address,
            own_handshake_address=own_handshake_address,
            local=launch.leads,
            headless=launch.headless,
            platform=platform,
            devices=mine,
        )
        sets = launch.size > 1 and devices.sets_variable(platform, wire)
        with devices.applied(devices.PLATFORMS[platform], mine if sets else None):
            into.append(_fork_engine(config, close))


def _fork_engine(config: EngineConfig, close: list[int]) -> Child:
    rank = config.rank
    return processes.fork(
        f"EngineCore_DP{rank}",
        lambda: run_engine(config),
        title=f"VLLM::EngineCore_DP{rank}" if config.launch.size > 1 else "VLLM::EngineCore",
        command=f"VLLM::DP{rank}",
        close=close,
    )


def _serve_headless(options: Options, launch: Launch) -> int:
    """Engines only. Status 0 even when one dies: that is vLLM's, and why operators need more than an exit code."""
    logs.info(f"Launching {launch.size_local} data parallel engine(s) in headless mode")
    engines: list[Child] = []
    try:
        _fork_engines(
            options,
            launch,
            handshake_address=tcp_endpoint(launch.address, launch.rpc_port),
            close=[],
            into=engines,
        )
        stopper = Stopper()
        processes.wait_for_any(engines, wake_fd=stopper.fd)
        if stopper.requested:
            logs.info("Headless launcher: stopping engines")
        else:
            logs.error(f"Engine core proc(s) died unexpectedly: {processes.finished(engines)}; stopping the others")
    finally:
        processes.stop(engines, grace_s=options.shutdown_timeout_s + _stop_grace_s(options))
    return 0


def _bind_listener(options: Options) -> socket.socket:
    """Bind the API port early, so that a taken port ends the start at once; listen only when ready. Raises StartError."""
    if options.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(options.uds)
        except OSError as failure:
            raise StartError(f"cannot bind --uds {options.uds}: {failure.strerror}") from failure
        return listener
    host = options.host or "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
    except OSError as failure:
        raise StartError(f"cannot bind port {options.port} of {host}: {failure.strerror}") from failure
    return listener


def _fork_with_report(
    name: str, run: Callable[[int], int], *, title: str, command: str, close: list[int]
) -> tuple[Child, Callable[[], bytes]]:
    """Fork a child that reports once through a pipe; the second item waits for that. It raises StartError."""
    read_fd, write_fd = os.pipe()
    child = processes.fork(name, lambda: run(write_fd), title=title, command=command, close=[*close, read_fd])
    os.close(write_fd)

    def report() -> bytes:
        poll = select.poll()
        poll.register(read_fd, select.POLLIN)
        poll.poll(REPORT_TIMEOUT_S * 1000)
        os.set_blocking(read_fd, False)
        try:
            data = os.read(read_fd, 65536)
        except BlockingIOError:
            data = b""
        os.close(read_fd)
        if not data:
            raise StartError(f"{name} reported no endpoints")
        return data

    return child, report


def group_ports() -> list[int]:
    """Free ports for the group's store, as the head picks them: one to use and four spare; VLLM_PORT is their base."""
    base, reserved = environment.base_port(os.environ), environment.reserved_ports(os.environ)
    wanted = itertools.count(base) if base else itertools.repeat(0)
    ports: list[int] = []
    with contextlib.ExitStack() as taken:
        while len(ports) < 5:
            probe = taken.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", next(wanted)))
                port = probe.getsockname()[1]
                if port not in reserved:
                    ports.append(port)
    return ports


class Node(Struct, frozen=True, kw_only=True):
    """What the parts of a serving node share: made in the launcher, inherited by what it forks."""

    options: Options
    launch: Launch
    listener: socket.socket | None  # None offline
    metrics: SharedMetrics
    handshake_address: str  # that this node answers
    coordinator: CoordinatorEndpoints | None
    engines: list[Child]
    children: list[Child]  # all of them, engines included


def _serve_node(options: Options, launch: Launch, first_local_rank: int) -> int:
    children: list[Child] = []
    try:
        listener = _bind_listener(options)
        node = start_node(options, launch, children, listener=listener, first_local_rank=first_local_rank)
        return _serve_alone(node) if launch.api_servers == 1 else _serve_with_many(node)
    except (StartError, zmq.ZMQError) as failure:
        logs.error(str(failure))
        return 1
    finally:
        processes.stop(children, grace_s=_stop_grace_s(options))


def start_node(
    options: Options,
    launch: Launch,
    children: list[Child],
    *,
    listener: socket.socket | None,
    first_local_rank: int = 0,
) -> Node:
    """Start coordinator and ranks. `children` collects them, so that the caller can stop them. Raises StartError."""
    ranks = launch.managed_ranks
    family = wire_of(options.version)
    metrics = SharedMetrics(clients=launch.api_servers, engines=len(ranks), first_rank=ranks.start, family=family)
    # A rank that kept the API port would keep it open after the front end has closed it.
    close = [] if listener is None else [listener.fileno()]
    coordinator_report = None
    if launch.runs_coordinator:
        child, coordinator_report = _fork_with_report(
            "DPCoordinator",
            lambda fd: run_coordinator(launch, family, fd),
            title="VLLM::DPCoordinator",
            command="VLLM::DPCoord",
            close=close,
        )
        children.append(child)
    head_address = tcp_endpoint(launch.address, launch.rpc_port)
    handshake_address = ipc_endpoint() if launch.all_local or not launch.leads else head_address
    engines: list[Child] = []
    try:
        _fork_engines(
            options,
            launch,
            handshake_address=handshake_address if launch.leads else head_address,
            own_handshake_address=None if launch.leads else handshake_address,
            first_local_rank=first_local_rank,
            close=close,
            into=engines,
        )
    finally:
        children += engines
    coordinator = None
    if coordinator_report is not None:
        coordinator = msgspec.json.decode(coordinator_report(), type=CoordinatorEndpoints)
    return Node(
        options=options,
        launch=launch,
        listener=listener,
        metrics=metrics,
        handshake_address=handshake_address,
        coordinator=coordinator,
        engines=engines,
        children=children,
    )


def _serve_alone(node: Node) -> int:
    """One API server: handshake and HTTP in this process. Status 0 even when an engine dies later."""
    stopper = Stopper()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = bind_sockets(context, node.launch, wire_of(node.options.version))
    machine = shake_hands(node, [sockets.endpoints], context, stopper)
    if machine is None:
        return 0
    return _run_api_server(node, 0, sockets, stopper=stopper, engines=node.engines, stats_address=machine.stats_address)


def _serve_with_many(node: Node) -> int:
    """Several API servers, each a child; this process shakes hands and watches. Status 1 when any part dies."""
    front_ends: list[Child] = []
    reports: list[Callable[[], bytes]] = []
    stats_address = node.coordinator.stats if node.coordinator else None
    # Up to 0.19 READY brings the coordinator's address to nodes that do not lead; front ends hear it then.
    late_stats = not node.launch.leads and wire_of(node.options.version).ready_has_blocks
    tell_stats: list[int] = []
    for index in range(node.launch.api_servers):
        read_fd, write_fd = os.pipe() if late_stats else (None, None)

        def run(report_fd: int, index: int = index, read_fd: int | None = read_fd) -> int:
            sockets = bind_sockets(zmq.Context(), node.launch, wire_of(node.options.version))
            os.write(report_fd, msgspec.json.encode(sockets.endpoints))
            os.close(report_fd)
            return _run_api_server(
                node, index, sockets, stopper=None, engines=[], stats_address=stats_address, stats_fd=read_fd
            )

        child, report = _fork_with_report(
            f"ApiServer_{index}",
            run,
            title=f"VLLM::APIServer_{index}",
            command=f"VLLM::API_{index}",
            close=[*tell_stats, *([] if write_fd is None else [write_fd])],
        )
        front_ends.append(child)
        reports.append(report)
        node.children.append(child)
        if read_fd is not None and write_fd is not None:
            os.close(read_fd)
            tell_stats.append(write_fd)
    if node.listener is not None:
        node.listener.close()  # the port closes when the last API server has gone
    stopper = Stopper()
    endpoints = [msgspec.json.decode(report(), type=DataEndpoints) for report in reports]
    machine = shake_hands(node, endpoints, zmq.Context(), stopper, front_ends=front_ends)
    if machine is None:
        return 0
    for write_fd in tell_stats:
        os.write(write_fd, (machine.stats_address or "").encode())
        os.close(write_fd)
    processes.wait_for_any(node.children, wake_fd=stopper.fd)
    if not stopper.requested:
        raise StartError(f"Process(es) ended unexpectedly: {processes.finished(node.children)}")
    # Front ends drain first; only then may engines and coordinator go.
    processes.stop(front_ends, grace_s=node.options.shutdown_timeout_s + _stop_grace_s(node.options))
    return 0


def bind_sockets(context: zmq.Context[zmq.Socket[bytes]], launch: Launch, wire: Wire) -> DataSockets:
    """Inputs and outputs of one front end. Raises StartError."""
    try:
        return bind_data_sockets(context, launch, wire)
    except zmq.ZMQError as failure:
        raise StartError(f"cannot bind data sockets at {launch.address}: {failure.strerror}") from failure


def shake_hands(
    node: Node,
    endpoints: list[DataEndpoints],
    context: zmq.Context[zmq.Socket[bytes]],
    stopper: Stopper,
    *,
    front_ends: Sequence[Child] = (),
) -> FrontEndHandshake | None:
    """The handshake with everyone whom this node answers; None when told to stop first. Raises StartError.

    `front_ends` are the API servers among the node's children.
    """
    launch, wire = node.launch, wire_of(node.options.version)
    everyone = launch.leads and launch.load_balancing != "offline"
    machine = FrontEndHandshake(
        expected=[
            Expected(rank=rank, local=rank in launch.local_ranks)
            for rank in (range(launch.size) if everyone else launch.local_ranks)
        ],
        init=_init_message(launch, wire, endpoints, node.coordinator),
        remote_headless=launch.load_balancing == "internal",
        config_hash=config_hash(node.options, launch) if launch.coordinated and wire.ready_has_hash else None,
        ready_has_blocks=wire.ready_has_blocks,
        never=max(-launch.size_local, 0),
    )
    finished = run_handshake(
        machine,
        context=context,
        address=node.handshake_address,
        children=[child for child in node.children if child not in front_ends],
        front_ends=front_ends if wire.front_ends_watched else (),
        stopper=stopper,
        fault_list=node.options.faults,
    )
    if finished and launch.without_coordinator:
        raise StartError(
            f"vLLM {node.options.version} starts dense models with external load balancing but not their coordinator: "
            "front ends fail for want of its address"
        )
    return machine if finished else None


def _init_message(
    launch: Launch, wire: Wire, data: list[DataEndpoints], coordinator: CoordinatorEndpoints | None
) -> Init:
    addresses = Addresses(
        inputs=[endpoints.inputs for endpoints in data],
        outputs=[endpoints.outputs for endpoints in data],
        coordinator_input=coordinator.engine_input if coordinator else None,
        coordinator_output=coordinator.engine_output if coordinator else None,
        frontend_stats_publish_address=coordinator.stats if coordinator else None,
    )
    if not launch.coordinated or not (launch.leads or wire.own_init_has_group):
        return Init(addresses=addresses, parallel_config={})
    port, *spare = group_ports()
    parallel_config: dict[str, object] = {
        "data_parallel_master_ip": launch.address,
        "data_parallel_master_port": launch.store_port or port,
        "_data_parallel_master_port_list": spare,
    }
    if wire.coord_store:
        # 0: ranks take the port above. A port would send vLLM's ranks to a torch store, which speaks torch's protocol.
        parallel_config["_coord_store_port"] = 0
    parallel_config["data_parallel_size"] = launch.size
    return Init(addresses=addresses, parallel_config=parallel_config)


def _run_api_server(
    node: Node,
    index: int,
    sockets: DataSockets,
    *,
    stopper: Stopper | None,
    engines: list[Child],
    stats_address: str | None,
    stats_fd: int | None = None,
) -> int:
    # Only API servers load the HTTP stack: launchers and ranks stay small.
    module = importlib.import_module("dp_engine.api_server")
    server = module.ApiServer(
        index=index,
        launch=node.launch,
        options=node.options,
        sockets=sockets,
        stats_address=stats_address,
        listener=node.listener,
        metrics=node.metrics,
        stopper=stopper,
        engines=engines,
        stats_fd=stats_fd,
    )
    return int(module.run_api_server(server))
