"""The multi-port supervisor: one external-load-balancing server per local rank, and one health page for the node.

Its page is served only once every server has been healthy; from then on a server that ends or fails its probes ends the
node. The status is 0 whatever the reason, as in vLLM (protocol notes §1.1, `--data-parallel-multi-port-external-lb`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from enum import Enum

import aiohttp
from aiohttp import web
from msgspec import structs

from dp_engine import logs, processes, tls
from dp_engine.modes import Launch
from dp_engine.options import Options
from dp_engine.processes import Child

CHILD_EXIT_GRACE_S = 5.0


class Probe(Enum):
    """What one server answered."""

    WELL = "well"
    UNWELL = "unwell"  # anything but 200
    SILENT = "silent"  # no answer


class Health:
    """What the probes have shown: pure. Failures count only after all servers have been well at once.

    From then on one that is unwell has failed; one that is silent has when it was so `threshold` times in a row.
    """

    def __init__(self, *, children: int, threshold: int) -> None:
        self._silences = [0] * children
        self._threshold = threshold
        self.ready = False
        self.failed: int | None = None  # index of the first server that failed

    def probed(self, found: list[Probe]) -> None:
        """Take one round of probes, one answer a server."""
        if not self.ready:
            self.ready = all(probe is Probe.WELL for probe in found)
            return
        for index, probe in enumerate(found):
            self._silences[index] = self._silences[index] + 1 if probe is Probe.SILENT else 0
            if self.failed is None and (probe is Probe.UNWELL or self._silences[index] >= self._threshold):
                self.failed = index


def child_options(options: Options, launch: Launch, index: int) -> Options:
    """Options of the server of local rank `index`, as if it had been started by hand."""
    return structs.replace(
        options,
        port=options.port + index,
        api_server_count=1,
        data_parallel_rank=launch.start_rank + index,
        data_parallel_size_local=1,
        data_parallel_start_rank=None,
        data_parallel_multi_port_external_lb=False,
    )


def supervise(options: Options, launch: Launch, serve: Callable[..., int]) -> int:
    """Run a node of several servers until SIGTERM or until one of them fails. The status is 0 either way."""
    children: list[Child] = []
    try:
        for index in range(launch.children):
            mine = child_options(options, launch, index)
            rank = launch.start_rank + index
            name = f"APIServer_DP{rank}"
            logs.info(f"Starting the server of rank {rank} on port {mine.port}")
            child = processes.fork(
                name,
                lambda mine=mine, index=index: serve(mine, first_local_rank=index),  # type: ignore[misc]
                title=f"VLLM::{name}",
                command=f"VLLM::API_DP{rank}",
            )
            children.append(child)
        asyncio.run(_watch(options, launch, children))
    finally:
        processes.stop(children, grace_s=CHILD_EXIT_GRACE_S)
    return 0


async def _watch(options: Options, launch: Launch, children: list[Child]) -> None:
    loop = asyncio.get_running_loop()
    stop, ended = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for child in children:
        loop.add_reader(child.pidfd, ended.set)
    health = Health(children=launch.children, threshold=options.probe_failures)
    runner = web.AppRunner(_application(health, stop), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    probing = asyncio.create_task(_probe(options, launch, health, runner))
    waits = {asyncio.create_task(stop.wait()), asyncio.create_task(ended.wait()), probing}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for child in children:
        loop.remove_reader(child.pidfd)
    for task in waits:
        task.cancel()
    if stop.is_set():
        logs.info("Supervisor: stopping the servers")
    elif ended.is_set():
        logs.error(f"Server process(es) ended: {processes.finished(children)}; stopping the others")
    elif probing.done() and (failure := probing.exception()) is not None:
        logs.error(f"Supervisor: {failure}")
    stop.set()  # the page says 503 while the servers drain
    await asyncio.to_thread(processes.stop, children, grace_s=options.shutdown_timeout_s + CHILD_EXIT_GRACE_S)
    await runner.cleanup()


def _application(health: Health, stop: asyncio.Event) -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        well = health.ready and health.failed is None and not stop.is_set()
        return web.Response(status=200 if well else 503)

    app = web.Application()
    for path in ("/health", "/ready", "/readyz"):
        app.router.add_get(path, answer)
    return app


async def _probe(options: Options, launch: Launch, health: Health, runner: web.AppRunner) -> None:
    """Ask every server for its health again and again; returns when one has failed too often."""
    serving = False
    timeout = aiohttp.ClientTimeout(total=options.probe_timeout_s)
    scheme = "https" if options.ssl_certfile else "http"
    host = "127.0.0.1" if options.host in {None, "0.0.0.0", "::"} else options.host
    shown = f"[{host}]" if host is not None and ":" in host else host
    urls = [f"{scheme}://{shown}:{options.port + index}/health" for index in range(launch.children)]

    async def ask(session: aiohttp.ClientSession, url: str) -> Probe:
        try:
            # The servers' certificates name the node, not this loopback address.
            async with session.get(url, ssl=False) as response:
                return Probe.WELL if response.status == 200 else Probe.UNWELL
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Probe.SILENT

    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            health.probed(list(await asyncio.gather(*(ask(session, url) for url in urls))))
            if health.failed is not None:
                logs.error(f"The server of rank {launch.start_rank + health.failed} failed its health probes")
                return
            if health.ready and not serving:
                serving = True
                host, context = options.host or "0.0.0.0", tls.server_context(options)
                site = web.TCPSite(runner, host, options.supervisor_port, ssl_context=context)
                await site.start()
                logs.info(
                    f"All {launch.children} servers are healthy; supervisor serves on port {options.supervisor_port}"
                )
            await asyncio.sleep(options.probe_interval_s)
