"""The monitor's HTTP side: check-in, snapshot, watch, readiness of pods, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from aiohttp import web

from dp_handshake.messages import CheckIn, CheckInReply, Snapshot

log = logging.getLogger(__name__)

MAX_WAIT_S = 25.0
MAX_BODY_BYTES = 65_536
WATCH_HEARTBEAT_S = 9.5
WATCH_INTERVAL_S = 0.2
_BACKLOG = 4096


class Source(Protocol):
    """What the HTTP side needs to know; implemented by the service."""

    released: asyncio.Event

    def check_in(self, message: CheckIn) -> CheckInReply: ...
    def waiting_reply(self) -> CheckInReply: ...
    def snapshot(self) -> Snapshot: ...
    async def changed(self, since: int) -> int: ...
    def readiness(self, pod: str) -> str: ...
    def metrics(self) -> str: ...


def application(source: Source, *, clock: Callable[[], float] = time.monotonic) -> web.Application:
    """Build the HTTP application; one handler per path of the module's API."""

    async def check_in(request: web.Request) -> web.Response:
        try:
            message = msgspec.json.decode(await request.read(), type=CheckIn)
        except (msgspec.MsgspecError, RecursionError) as error:
            return web.Response(status=400, text=f"not a check-in: {error}\n")
        reply = source.check_in(message)
        if reply.state == "waiting":
            wait_s = min(MAX_WAIT_S, max(0.0, message.wait_seconds))
            try:
                await asyncio.wait_for(source.released.wait(), wait_s)
            except TimeoutError:
                reply = source.waiting_reply()
            else:
                # Asked anew: while this poll waited, another launcher of the same pod may have taken its place.
                reply = source.check_in(message)
        return _json(reply, status=409 if reply.state == "refused" else 200)

    async def handshake(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") not in ("1", "true"):
            return _json(source.snapshot())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        version = 0
        while True:
            # A reader that went away raises here, which ends the handler.
            await response.write(msgspec.json.encode(source.snapshot()) + b"\n")
            await asyncio.sleep(WATCH_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                version = await asyncio.wait_for(source.changed(version), WATCH_HEARTBEAT_S)

    async def ready(request: web.Request) -> web.Response:
        reason = source.readiness(request.match_info["pod"])
        return web.Response(status=503 if reason else 200, text=(reason or "ready") + "\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=source.metrics(), content_type="text/plain", charset="utf-8")

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        started = clock()
        try:
            return await handler(request)  # type: ignore[misc, no-any-return]
        except (web.HTTPException, ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            # One bad request must not take the relay with it; the launcher asks again after a 500.
            log.exception("%s %s failed after %.3f s", request.method, request.path, clock() - started)
            return web.Response(status=500, text="internal error, see the relay's log\n")

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
    app.router.add_post("/v1/check-in", check_in)
    app.router.add_get("/v1/handshake", handshake)
    app.router.add_get("/v1/ready/{pod}", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    return app


def listening_socket(port: int) -> socket.socket:
    """Listen on every address, IPv6 and IPv4 on one socket where the kernel has IPv6. Raises OSError if taken."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True, reuse_port=False
            )
        except OSError as error:
            log.info("no IPv6 here (%s), listening on IPv4 only", error)
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


async def serve(source: Source, *, port: int) -> web.AppRunner:
    """Start serving; clean up with `runner.cleanup()`. Raises OSError if the port is taken."""
    runner = web.AppRunner(application(source), access_log=None, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, listening_socket(port), backlog=_BACKLOG).start()
    return runner


def _json(message: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(message), content_type="application/json")
