"""`python -m dp_operator`: run the operator. `python -m dp_operator plan -f FILE`: see what it would do, offline.

Configuration comes from the environment, as the chart sets it:

* DP_OPERATOR_IMAGE: image of the relay sidecar, normally the operator's own;
* POD_NAMESPACE: where the operator runs, for the NetworkPolicy that lets it reach the monitors;
* WATCH_NAMESPACES: comma-separated; all namespaces when empty;
* LEASE_NAME: with several replicas, the Lease that says who works. A single replica needs none, and then an idle
  operator writes nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine

import aiohttp
import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dp_operator import handlers, metrics, preview
from dp_operator.cache import Key
from dp_operator.client import ApiError, Client
from dp_operator.lease import Lease
from dp_operator.queue import Queue
from dp_operator.reconciler import Reconciler
from dp_operator.render import Settings

log = logging.getLogger("dp_operator")

WORKERS = 4
METRICS_PORT = 8080
HEALTH_PORT = 8081
# A key that waits this long for a worker, or is with one, means that workers hang. Every call has a limit of 30 s.
STUCK_AFTER_S = 300.0


async def run() -> int:
    """Run until a signal or until something that must not end has ended. Returns the exit status."""
    image = os.environ.get("DP_OPERATOR_IMAGE", "")
    if not image:
        log.error("DP_OPERATOR_IMAGE is not set: it names the image of the relay sidecar, normally this one")
        return 2
    namespaces = [n for n in os.environ.get("WATCH_NAMESPACES", "").split(",") if n]
    settings = Settings(relay_image=image, namespace=os.environ.get("POD_NAMESPACE", "dp-system"))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Client() as client:
        reconciler = Reconciler(client, settings, namespaces=namespaces)
        ready = asyncio.Event()
        lease_name = os.environ.get("LEASE_NAME", "")
        servers = await _serve(reconciler, ready, standby=bool(lease_name))
        lease = holding = None
        if lease_name:
            identity = os.environ.get("POD_NAME", socket.gethostname())
            lease = Lease(client, namespace=settings.namespace, name=lease_name, identity=identity)
            if not await _unless_stopped(lease.acquire(), stop):
                return 0
            # From here on: the first lists may take longer than others wait for a renewal.
            holding = asyncio.create_task(lease.hold(), name="lease")
        if not await _first_lists(reconciler, stop):
            return 0
        if holding and holding.done():
            holding.result()  # raises Lost before a worker begins
        # kopf cancels what is created after its start when it ends, so ours come before it.
        tasks = [asyncio.create_task(reconciler.work(), name=f"worker {n}") for n in range(WORKERS)]
        tasks.append(asyncio.create_task(reconciler.keep_true(), name="resync"))
        if holding:
            tasks.append(holding)
        tasks.append(asyncio.create_task(_watch(reconciler, namespaces, stop, ready), name="kopf"))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        # kopf takes the signals over and ends by itself then; any other end is an error.
        failed = [t for t in done if t is not stopping and (t.get_name() != "kopf" or t.exception())]
        for task in failed:
            log.error("%s ended: %r", task.get_name(), None if task.cancelled() else task.exception())
        stop.set()
        reconciler.close()
        for task in tasks[:-1]:
            task.cancel()
        await asyncio.wait([tasks[-1]], timeout=10)
        if lease:
            await lease.release()
        for server in servers:
            await server.cleanup()
        # Half an operator is worse than none: the kubelet starts a new one.
        return 1 if failed else 0


async def _unless_stopped(waiting: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Await something unless the process is told to stop first; False then."""
    task, stopping = asyncio.create_task(waiting), asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    for other in (task, stopping):
        other.cancel()
    return task in done


async def _first_lists(reconciler: Reconciler, stop: asyncio.Event) -> bool:
    """Know everything before deciding anything: a pod not listed yet would look like a pod that is lost."""
    while not stop.is_set():
        try:
            await reconciler.resync()
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("cannot list yet, trying again: %s", error)
            await asyncio.sleep(1)
        else:
            return True
    return False


async def _watch(reconciler: Reconciler, namespaces: list[str], stop: asyncio.Event, ready: asyncio.Event) -> None:
    await kopf.operator(
        registry=handlers.registry(reconciler.seen, reconciler.relisted, nodes=not namespaces),
        settings=handlers.settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


def health(queue: Queue[Key]) -> web.Response:
    """Answer of /healthz: the kubelet starts the operator anew when its workers hang."""
    if queue.oldest_age_s > STUCK_AFTER_S:
        return web.Response(status=503, text=f"no worker has taken a key for {queue.oldest_age_s:.0f} s\n")
    if queue.longest_visit_s > STUCK_AFTER_S:
        return web.Response(status=503, text=f"a worker has been with its key for {queue.longest_visit_s:.0f} s\n")
    return web.Response(text="ok\n")


async def _serve(reconciler: Reconciler, ready: asyncio.Event, *, standby: bool) -> list[web.AppRunner]:
    async def healthz(_: web.Request) -> web.Response:
        return health(reconciler.queue)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if standby or ready.is_set() else web.Response(status=503, text="starting\n")

    async def scrape(_: web.Request) -> web.Response:
        metrics.QUEUE_DEPTH.set(len(reconciler.queue))
        metrics.QUEUE_VISIT.set(reconciler.queue.longest_visit_s)
        metrics.QUEUE_AGE.set(reconciler.queue.oldest_age_s)
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    runners = []
    for port, routes in (
        (HEALTH_PORT, [web.get("/healthz", healthz), web.get("/readyz", readyz)]),
        (METRICS_PORT, [web.get("/metrics", scrape)]),
    ):
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, None, port).start()
        runners.append(runner)
    return runners


def main() -> None:
    """Entry point of the container."""
    if sys.argv[1:2] == ["plan"]:
        sys.exit(preview.main(sys.argv[2:]))
    logging.basicConfig(
        level=os.environ.get("LOG_LEVEL", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()
