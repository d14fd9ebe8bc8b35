"""One API server: its client, its HTTP port, and when it ends.

Runs in the launcher's own process when it is the only one, else in a child per index (protocol notes §8). Only these
processes import aiohttp.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import Struct, structs

from dp_engine import environment, logs, processes, tls
from dp_engine.client import EngineClient, EngineDeadError
from dp_engine.data_sockets import DataSockets
from dp_engine.endpoints import connect_stats
from dp_engine.http_server import Server
from dp_engine.metrics import SharedMetrics
from dp_engine.modes import Launch
from dp_engine.options import Options
from dp_engine.processes import Child, Stopper
from dp_engine.versions import wire_of

# How long /health says 503 before the server goes, so that a probe can see it.
DEATH_NOTICE_S = 1.0


class ApiServer(Struct, frozen=True, kw_only=True):
    """Everything one API server needs. `listener` is bound, not listening; `engines` are children to watch.

    `stats_fd` gives the coordinator's address once the handshake is over, where READY brings it (up to 0.19).
    """

    index: int
    launch: Launch
    options: Options
    sockets: DataSockets
    stats_address: str | None
    listener: socket.socket
    metrics: SharedMetrics
    stopper: Stopper | None = None  # when signals were already caught before this server started
    engines: Sequence[Child] = ()
    stats_fd: int | None = None


def run_api_server(server: ApiServer) -> int:
    """Serve until SIGTERM or a death. Returns the exit code: 1 only when the engines never got ready."""
    return asyncio.run(_run(server))


async def _run(server: ApiServer) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if server.stopper is not None and server.stopper.requested:
        return 0
    stopping = asyncio.create_task(stop.wait())
    if server.stats_fd is not None:
        server = structs.replace(server, stats_address=await _read_address(server.stats_fd, stopping))
    client = _make_client(server)
    watcher = asyncio.create_task(_watch_engines(server.engines, client))
    dying = asyncio.create_task(client.died.wait())
    timeout_s = environment.ready_timeout_s(os.environ, wire_of(server.options.version))
    connecting = asyncio.create_task(client.connect(timeout_s=timeout_s))
    await asyncio.wait({stopping, connecting, dying}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if stop.is_set():
            return 0
        client.check_alive()
        await connecting
        await _serve(server, client, stopping, dying)
    except (TimeoutError, EngineDeadError, KeyError, ValueError, TypeError, msgspec.DecodeError) as failure:
        logs.error(f"Engine core initialization failed: {type(failure).__name__} {failure}")
        return 1
    else:
        return 0
    finally:
        for task in (watcher, connecting, stopping, dying):
            task.cancel()
        client.close()


async def _read_address(fd: int, stopping: asyncio.Task[bool]) -> str | None:
    """What the launcher writes before it closes its end; None when that is nothing, or when told to stop first."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, readable.set)
    waiting = asyncio.create_task(readable.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    loop.remove_reader(fd)
    return os.read(fd, 4096).decode() or None if readable.is_set() else None


def _make_client(server: ApiServer) -> EngineClient:
    launch, sockets = server.launch, server.sockets
    return EngineClient(
        ranks=launch.managed_ranks,
        client=server.index,
        clients=launch.api_servers,
        waves=launch.coordinated,
        family=wire_of(server.options.version),
        inputs=sockets.inputs,
        outputs=sockets.outputs,
        stats=None if server.stats_address is None else connect_stats(sockets.context, server.stats_address),
        metrics=server.metrics.writer(server.index),
        subscribe=lambda address: connect_stats(sockets.context, address),
    )


async def _serve(
    server: ApiServer, client: EngineClient, stopping: asyncio.Task[bool], dying: asyncio.Task[bool]
) -> None:
    """Serve HTTP until told to stop or an engine dies."""
    options = server.options
    http = Server(client=client, options=options, metrics=server.metrics)
    runner = web.AppRunner(http.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    # The port listens from here on: until now a connection was refused, never answered with 503.
    await web.SockSite(runner, server.listener, ssl_context=tls.server_context(options)).start()
    logs.info(
        f"Application startup complete. API server {server.index} serves on {options.uds or f'port {options.port}'}"
    )
    await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        http.draining = True
        for site in list(runner.sites):
            await site.stop()
        await _drain(client, timeout_s=options.shutdown_timeout_s)
    elif environment.keeps_alive(os.environ):
        await stopping
    else:
        await asyncio.wait({stopping}, timeout=DEATH_NOTICE_S)
    await runner.cleanup()
    logs.info("Application shutdown complete.")


async def _drain(client: EngineClient, *, timeout_s: float) -> None:
    """Let running requests finish, for at most --shutdown-timeout seconds; 0 aborts them."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    logs.info(f"Shutting down: {client.unfinished} requests, draining for {timeout_s:g} s")
    while client.unfinished and client.dead is None and loop.time() < deadline:  # noqa: ASYNC110 - seconds at most
        await asyncio.sleep(0.02)


async def _watch_engines(engines: Sequence[Child], client: EngineClient) -> None:
    """When a local engine ends, take its siblings down, then say so."""
    if not engines:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for engine in engines:
        loop.add_reader(engine.pidfd, ended.set)
    await ended.wait()
    for engine in engines:
        loop.remove_reader(engine.pidfd)
    dead = processes.finished(engines)
    await asyncio.to_thread(processes.stop, engines)
    client.die(f"engine core processes ended: {dead}")
