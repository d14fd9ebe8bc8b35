"""What `serve` starts and in which order: head or headless, and what the exit codes say (protocol notes §2 and §8).

Everything is forked before the first ZeroMQ context of this process exists (see `processes`), so engines may be up
before the head's ROUTER is bound; they connect when it is, as remote ones do.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import socket
from collections.abc import Callable

import msgspec
import zmq
from msgspec import Struct

from dp_engine import logs, processes
from dp_engine.coordinator_process import CoordinatorEndpoints, run_coordinator
from dp_engine.data_sockets import DataEndpoints, DataSockets, bind_data_sockets
from dp_engine.endpoints import ipc_endpoint, tcp_endpoint
from dp_engine.engine import EngineConfig, config_hash, run_engine
from dp_engine.front_end import StartError, run_handshake
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, Init
from dp_engine.metrics import SharedMetrics
from dp_engine.modes import Launch, is_moe, resolve
from dp_engine.options import Options
from dp_engine.processes import Child, Stopper
from dp_engine.versions import wire_of

REPORT_TIMEOUT_S = 120


def serve(options: Options) -> int:
    """Run one node's part of a group. Returns the exit code. Raises ValueError for refused combinations."""
    launch = resolve(options, moe=is_moe(options))
    if launch.load_balancing != "internal":
        raise ValueError(f"{launch.load_balancing} data parallel load balancing is not available in this engine yet")
    _raise_file_limit()
    logs.info(f"vLLM stand-in engine version {options.version}, model {options.model}")
    logs.info(
        f"Data parallel: size {launch.size}, ranks of this node {launch.start_rank}-{launch.local_ranks.stop - 1}"
        if launch.size_local
        else f"Data parallel: size {launch.size}, no rank on this node"
    )
    if launch.headless:
        return _serve_headless(options, launch)
    return _serve_head(options, launch)


def _raise_file_limit() -> None:
    """A head holds several connections per rank: use what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fork_engines(options: Options, launch: Launch, *, handshake_address: str, close: list[int]) -> list[Child]:
    engines: list[Child] = []
    for rank in launch.local_ranks:
        config = EngineConfig(
            rank=rank,
            launch=launch,
            options=options,
            handshake_address=handshake_address,
            local=not launch.headless,
            headless=launch.headless,
        )
        name = f"EngineCore_DP{rank}"
        engines.append(processes.fork(name, lambda c=config: run_engine(c), title=f"VLLM::DP{rank}", close=close))  # type: ignore[misc]
    return engines


def _serve_headless(options: Options, launch: Launch) -> int:
    """Engines only. Status 0 even when one dies: that is vLLM's, and why operators need more than an exit code."""
    logs.info(f"Launching {launch.size_local} data parallel engine(s) in headless mode")
    address = tcp_endpoint(launch.address, launch.rpc_port)
    engines = _fork_engines(options, launch, handshake_address=address, close=[])
    stopper = Stopper()
    _wait_for_end(engines, stopper)
    if stopper.requested:
        logs.info("Headless launcher: stopping engines")
    else:
        logs.error(f"Engine core proc(s) ended: {processes.finished(engines)}; stopping the others")
    processes.stop(engines, grace_s=options.shutdown_timeout_s + 5)
    return 0


def _wait_for_end(children: list[Child], stopper: Stopper) -> None:
    """Until a child ends or a signal asks to stop."""
    poll = select.poll()
    poll.register(stopper.fd, select.POLLIN)
    for child in children:
        poll.register(child.pidfd, select.POLLIN)
    poll.poll()


def _bind_listener(options: Options) -> socket.socket:
    """Bind the API port early, so that a taken port ends the start at once; listen only when ready. Raises StartError."""
    host = options.host or "0.0.0.0"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
    except OSError as failure:
        raise StartError(f"cannot bind port {options.port} of {host}: {failure.strerror}") from failure
    return listener


def _fork_with_report(
    name: str, run: Callable[[int], int], *, title: str, close: list[int]
) -> tuple[Child, Callable[[], bytes]]:
    """Fork a child that reports once through a pipe; the second item waits for that. It raises StartError."""
    read_fd, write_fd = os.pipe()
    child = processes.fork(name, lambda: run(write_fd), title=title, close=[*close, read_fd])
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


def _group_ports() -> list[int]:
    """Free ports for the group's store, as the head picks them: one to use and four spare."""
    sockets = [socket.socket() for _ in range(5)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class _Head(Struct, frozen=True, kw_only=True):
    """What the parts of a head share: made in the launcher, inherited by what it forks."""

    options: Options
    launch: Launch
    listener: socket.socket
    metrics: SharedMetrics
    handshake_address: str
    coordinator: CoordinatorEndpoints | None
    engines: list[Child]
    children: list[Child]  # all of them, engines included


def _serve_head(options: Options, launch: Launch) -> int:
    children: list[Child] = []
    try:
        head = _start_head(options, launch, children)
        return _serve_alone(head) if launch.api_servers == 1 else _serve_with_many(head)
    except StartError as failure:
        logs.error(str(failure))
        return 1
    finally:
        processes.stop(children, grace_s=5)


def _start_head(options: Options, launch: Launch, children: list[Child]) -> _Head:
    """Start coordinator and local engines; `children` collects them, so that the caller can stop them. StartError."""
    listener = _bind_listener(options)
    metrics = SharedMetrics(clients=launch.api_servers, engines=launch.size)
    close = [listener.fileno()]  # a rank that kept the API port would keep it open after the head has closed it
    coordinator_report = None
    if launch.size > 1:
        family = wire_of(options.version)
        child, coordinator_report = _fork_with_report(
            "DPCoordinator", lambda fd: run_coordinator(launch, family, fd), title="VLLM::DPCoord", close=close
        )
        children.append(child)
    handshake_address = ipc_endpoint() if launch.all_local else tcp_endpoint(launch.address, launch.rpc_port)
    engines = _fork_engines(options, launch, handshake_address=handshake_address, close=close)
    children += engines
    coordinator = None
    if coordinator_report is not None:
        coordinator = msgspec.json.decode(coordinator_report(), type=CoordinatorEndpoints)
    return _Head(
        options=options,
        launch=launch,
        listener=listener,
        metrics=metrics,
        handshake_address=handshake_address,
        coordinator=coordinator,
        engines=engines,
        children=children,
    )


def _serve_alone(head: _Head) -> int:
    """One API server: handshake and HTTP in this process. Status 0 even when an engine dies later."""
    stopper = Stopper()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = _bind_data_sockets(context, head.launch)
    if not _shake_hands(head, [sockets.endpoints], context, stopper):
        return 0
    return _run_api_server(head, 0, sockets, stopper=stopper, engines=head.engines)


def _serve_with_many(head: _Head) -> int:
    """Several API servers, each a child; this process shakes hands and watches. Status 1 when any part dies."""
    front_ends: list[Child] = []
    reports: list[Callable[[], bytes]] = []
    for index in range(head.launch.api_servers):

        def run(report_fd: int, index: int = index) -> int:
            sockets = _bind_data_sockets(zmq.Context(), head.launch)
            os.write(report_fd, msgspec.json.encode(sockets.endpoints))
            os.close(report_fd)
            return _run_api_server(head, index, sockets, stopper=None, engines=[])

        child, report = _fork_with_report(f"ApiServer_{index}", run, title=f"VLLM::API_{index}", close=[])
        front_ends.append(child)
        reports.append(report)
        head.children.append(child)
    head.listener.close()  # the port closes when the last API server has gone
    stopper = Stopper()
    endpoints = [msgspec.json.decode(report(), type=DataEndpoints) for report in reports]
    if not _shake_hands(head, endpoints, zmq.Context(), stopper):
        return 0
    _wait_for_end(head.children, stopper)
    if not stopper.requested:
        raise StartError(f"Process(es) ended unexpectedly: {processes.finished(head.children)}")
    # Front ends drain first; only then may engines and coordinator go.
    processes.stop(front_ends, grace_s=head.options.shutdown_timeout_s + 5)
    return 0


def _bind_data_sockets(context: zmq.Context[zmq.Socket[bytes]], launch: Launch) -> DataSockets:
    try:
        return bind_data_sockets(context, launch)
    except zmq.ZMQError as failure:
        raise StartError(f"cannot bind data sockets at {launch.address}: {failure.strerror}") from failure


def _shake_hands(
    head: _Head, endpoints: list[DataEndpoints], context: zmq.Context[zmq.Socket[bytes]], stopper: Stopper
) -> bool:
    """False when told to stop first. Raises StartError."""
    launch = head.launch
    machine = FrontEndHandshake(
        expected=[Expected(rank=rank, local=rank < launch.size_local) for rank in range(launch.size)],
        init=_init_message(launch, endpoints, head.coordinator),
        remote_headless=launch.load_balancing == "internal",
        config_hash=config_hash(head.options, launch) if launch.coordinated else None,
    )
    return run_handshake(
        machine,
        context=context,
        address=head.handshake_address,
        children=head.children,
        stopper=stopper,
        fault_list=head.options.faults,
    )


def _init_message(launch: Launch, data: list[DataEndpoints], coordinator: CoordinatorEndpoints | None) -> Init:
    addresses = Addresses(
        inputs=[endpoints.inputs for endpoints in data],
        outputs=[endpoints.outputs for endpoints in data],
        coordinator_input=coordinator.engine_input if coordinator else None,
        coordinator_output=coordinator.engine_output if coordinator else None,
        frontend_stats_publish_address=coordinator.stats if coordinator else None,
    )
    if not launch.coordinated:
        return Init(addresses=addresses, parallel_config={})
    port, *spare = _group_ports()
    parallel_config = {
        "data_parallel_master_ip": launch.address,
        "data_parallel_master_port": port,
        "_data_parallel_master_port_list": spare,
        "_coord_store_port": 0,  # no torch store here: ranks use the port above
        "data_parallel_size": launch.size,
    }
    return Init(addresses=addresses, parallel_config=parallel_config)


def _run_api_server(
    head: _Head, index: int, sockets: DataSockets, *, stopper: Stopper | None, engines: list[Child]
) -> int:
    # Only API servers load the HTTP stack: launchers and ranks stay small.
    module = importlib.import_module("dp_engine.api_server")
    server = module.ApiServer(
        index=index,
        launch=head.launch,
        options=head.options,
        sockets=sockets,
        stats_address=head.coordinator.stats if head.coordinator else None,
        listener=head.listener,
        metrics=head.metrics,
        stopper=stopper,
        engines=engines,
    )
    return int(module.run_api_server(server))
