"""The working process of the sidecar: monitor, relay, and what is read from /proc and /health, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import aiohttp
from msgspec import Struct, structs

from dp_handshake import checkin, monitor, proctcp, protocol, snapshot, tokens
from dp_handshake.addresses import canonical, endpoint
from dp_handshake.messages import CheckIn, CheckInReply, LaunchPlan, Snapshot
from dp_handshake.relay import Heartbeat, Port
from dp_handshake.state import Journal, Saved, load, read_journal, save

log = logging.getLogger(__name__)

PUBLISH_S = 0.2
TICK_S = 0.1
TICK_WHEN_READY_S = 1.0
HEALTH_S = 1.0
HEALTH_SOON_S = 0.25
LISTEN_POLL_S = 0.2
STAGE_POLL_S = 0.5
# A page of /metrics is long with many ranks: looking at it may use a hundredth of the time.
TOKENS_S = 10.0
TOKENS_SHARE = 0.01
# After a restart: time for the engine's ROUTER to let go of the identities that the earlier process held.
RESTART_GRACE_S = 0.5


class Settings(Struct, frozen=True, kw_only=True):
    """Where the service runs."""

    plan: LaunchPlan
    state_dir: Path
    pod_ip: str
    heartbeat: Heartbeat = Heartbeat()
    proc_net: Path = Path("/proc/net")


class Service:
    """Holds the state machines, and is the one place that feeds them and acts on what they say."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._plan = settings.plan
        self._pod_ip = canonical(settings.pod_ip) or settings.pod_ip
        self._roster = checkin.roster(self._plan)
        self._handshake = protocol.handshake(self._plan)
        self._seen = snapshot.Seen()
        self._port: Port | None = None
        self._state_path = settings.state_dir / "state.json"
        journal_path = settings.state_dir / "ranks.log"
        self._dirty = True
        self._version = 0
        self._published: Snapshot | None = None
        self._change = asyncio.Condition()
        self._urgent = asyncio.Event()
        self.released = asyncio.Event()
        self._resume(journal_path)
        self._journal = Journal(journal_path)

    # --- what the monitor asks -------------------------------------------------------------------------------------

    def check_in(self, message: CheckIn) -> CheckInReply:
        before = (self._roster.arrived.get(message.pod), self._roster.released_at, len(self._roster.restarted))
        reply = checkin.check_in(self._roster, message, now=time.time())
        after = (self._roster.arrived.get(message.pod), self._roster.released_at, len(self._roster.restarted))
        if before != after:
            self._dirty = True
        if before[1:] != after[1:]:
            # Nobody is told of a release or a refusal that a restart would forget.
            self._save()
        if self._roster.released_at is not None and not self.released.is_set():
            log.info("all %d pods have checked in: released", len(self._roster.places))
            self._release()
        return reply

    def waiting_reply(self) -> CheckInReply:
        return checkin.reply(self._roster)

    def snapshot(self) -> Snapshot:
        self._publish()
        return self._build()

    async def changed(self, since: int) -> int:
        async with self._change:
            await self._change.wait_for(lambda: self._version > since)
            return self._version

    def readiness(self, pod: str) -> str:
        return snapshot.pod_readiness(self._roster, self._handshake, self._seen, pod)

    def metrics(self) -> str:
        return snapshot.metrics(self._build(), self._handshake)

    # --- running ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises OSError if the monitor's port is taken."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = await monitor.serve(self, port=self._plan.monitor_port)
        log.info("monitor listens on port %d", self._plan.monitor_port)
        tasks = [
            asyncio.create_task(_forever(work))
            for work in (self._publisher, self._tcp_watch, self._health_watch, self._token_watch, self._ticker)
        ]
        try:
            await stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            self._publish()
            if self._port is not None:
                self._close_port(self._port)
            self._journal.close()
            await runner.cleanup()

    async def _publisher(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            self._publish()
            async with self._change:
                self._change.notify_all()

    async def _ticker(self) -> None:
        while True:
            await asyncio.sleep(TICK_S if self._seen.ready_at is None else TICK_WHEN_READY_S)
            if self._port is not None:
                self._port.tick()

    async def _health_watch(self) -> None:
        """Ask the engine's API until it answers 200. Before it is ready its port refuses (notes §8)."""
        await self.released.wait()
        port = self._plan.health_port or self._plan.api_port
        url = f"{endpoint(self._pod_ip, port, self._plan.api_scheme.lower())}{self._plan.health_path or '/health'}"
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            while not self._seen.api_ready:
                try:
                    # The certificate is the engine's own; its name is of no interest to a neighbour in the pod.
                    async with session.get(url, ssl=False, allow_redirects=False) as response:
                        if response.status == 200:
                            self._seen.api_ready = True
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    log.debug("%s: %s", url, error)
                if not self._seen.api_ready:
                    # Once every remote rank is READY, the answer is a moment away.
                    await asyncio.sleep(HEALTH_SOON_S if self._handshake.complete else HEALTH_S)
        log.info("the API answers 200")
        self._dirty = True
        if self._handshake.adopting and self._plan.load_balancing == "Internal":
            # An Internal head answers 200 only once every rank is READY, those included whose READY a killed relay
            # process forwarded without having written it down.
            for rank in range(self._plan.head_ranks, self._plan.size):
                protocol.step(self._handshake, protocol.Delivered(rank), now=time.time())

    async def _token_watch(self) -> None:
        """Look now and then, one API after the other, whether ranks with requests make tokens. Whoever is silent is left out."""
        watch, pause_s = tokens.Watch(), TOKENS_S
        timeout = aiohttp.ClientTimeout(total=5)
        # No connection stays open in between: an engine that drains must not wait for it.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                await asyncio.sleep(pause_s)
                if self._seen.ready_at is None:
                    continue
                started = time.monotonic()
                seen: dict[int, tokens.Counts] = {}
                for url in tokens.urls(self._plan, self._pod_ip, [m.ip for m in self._roster.arrived.values()]):
                    try:
                        async with session.get(url, ssl=False, allow_redirects=False) as response:
                            seen |= tokens.counts(await response.text())
                    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                        log.debug("%s: %s", url, error)
                watch.take(seen, now=time.time())
                if watch.stalls != self._seen.stalls:
                    self._seen.stalls = watch.stalls
                    self._dirty = True
                pause_s = max(TOKENS_S, (time.monotonic() - started) / TOKENS_SHARE)

    async def _tcp_watch(self) -> None:
        """Open the port once the engine's ROUTER listens, then follow the stages that no frame tells."""
        await self.released.wait()
        if self._plan.size == self._plan.head_ranks:
            log.info("every rank runs in this pod: vLLM uses ipc, the rpc port stays closed")
            return
        if self._handshake.adopting:
            await asyncio.sleep(RESTART_GRACE_S)
        while self._port is None:
            if self._handshake.complete or await asyncio.to_thread(self._engine_listens):
                self._open_port()
            else:
                await asyncio.sleep(LISTEN_POLL_S)
        while self._seen.ready_at is None:
            started = time.monotonic()
            rows = await asyncio.to_thread(self._rows)
            self._observe(rows)
            # With thousands of ranks reading /proc takes a while; it may use a twentieth of the time.
            await asyncio.sleep(max(STAGE_POLL_S, 20 * (time.monotonic() - started)))

    def _rows(self) -> list[proctcp.Connection]:
        ports = {self._plan.rpc_port + 1}
        data_port = proctcp.data_port(self._handshake.init) if self._handshake.init else None
        if data_port:
            ports.add(data_port)
        rows: list[proctcp.Connection] = []
        for name in ("tcp", "tcp6"):
            try:
                text = (self._settings.proc_net / name).read_text()
            except OSError as error:
                log.debug("%s", error)
                continue
            rows += proctcp.parse(text, local_ports=ports)
        return rows

    def _engine_listens(self) -> bool:
        return proctcp.listens(self._rows(), ip=self._pod_ip, port=self._plan.rpc_port + 1)

    def _observe(self, rows: list[proctcp.Connection]) -> None:
        seen = self._seen
        connected = proctcp.peers(rows, port=self._plan.rpc_port + 1).get(self._pod_ip, 0)
        loaded: dict[str, int] = {}
        data_port = proctcp.data_port(self._handshake.init) if self._handshake.init else None
        if data_port:
            loaded = proctcp.peers(rows, port=data_port)
        before = structs.astuple(seen)
        seen.local_connected = max(seen.local_connected, connected)
        seen.local_loaded = max(seen.local_loaded, loaded.get(self._pod_ip, 0))
        pods = {
            pod
            for pod, message in self._roster.arrived.items()
            if pod != self._plan.head_pod and loaded.get(canonical(message.ip) or "", 0) >= message.ranks
        }
        seen.loaded_pods = seen.loaded_pods | pods
        if before != structs.astuple(seen):
            self._dirty = True

    def _open_port(self) -> None:
        if self._seen.listening_at is None:
            self._seen.listening_at = time.time()
            self._save()
        port = Port(
            pod_ip=self._pod_ip,
            rpc_port=self._plan.rpc_port,
            state=self._handshake,
            peers=self._peers(),
            journal=self._journal,
            on_change=self._mark,
            heartbeat=self._settings.heartbeat,
        )
        self._port = port
        loop = asyncio.get_running_loop()

        def pump() -> None:
            if self._port is port and port.pump():
                loop.call_soon(pump)

        for descriptor in port.descriptors():
            loop.add_reader(descriptor, pump)
        loop.call_soon(pump)
        self._dirty = True
        log.info("the engine listens: rpc port %d is open", self._plan.rpc_port)

    def _close_port(self, port: Port) -> None:
        self._port = None
        loop = asyncio.get_running_loop()
        for descriptor in port.descriptors():
            loop.remove_reader(descriptor)
        port.close()

    def _peers(self) -> list[protocol.Peer]:
        return [
            protocol.Peer(
                pod=place.pod,
                address=canonical(self._roster.arrived[place.pod].ip) or self._roster.arrived[place.pod].ip,
                first_rank=place.first_rank,
                ranks=place.ranks,
            )
            for place in self._roster.places.values()
        ]

    def _release(self) -> None:
        protocol.step(self._handshake, protocol.Released(self._peers()), now=time.time())
        self.released.set()

    # --- telling and remembering -----------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._dirty = True

    def _build(self) -> Snapshot:
        return snapshot.build(self._plan, self._roster, self._handshake, self._seen, now=time.time())

    def _publish(self) -> None:
        """Write down what changed, then let the watchers see it: nothing told is forgotten by a restart."""
        if not self._dirty:
            return
        self._dirty = False
        if self._seen.ready_at is None and self._seen.api_ready and self._handshake.complete:
            self._seen.ready_at = time.time()
            log.info("ready: every rank is READY and the API answers")
        current = self._build()
        if self._published is None or structs.replace(current, time=0.0) != structs.replace(self._published, time=0.0):
            self._save()
            if self._published is None or self._published.stages != current.stages:
                shown = current.stages
                log.info(
                    "ranks: arrived %s; connected %s; loaded %s; ready %s",
                    *(text[:100] or "none" for text in (shown.arrived, shown.connected, shown.loaded, shown.ready)),
                )
            self._published = current
            self._version += 1

    def _save(self) -> None:
        seen, handshake = self._seen, self._handshake
        save(
            self._state_path,
            Saved(
                incarnation=self._plan.incarnation,
                check_ins=list(self._roster.arrived.values()),
                released_at=self._roster.released_at,
                restarted=self._roster.restarted,
                listening_at=seen.listening_at,
                ready_at=seen.ready_at,
                api_ready=seen.api_ready,
                local=snapshot.local(self._plan, seen),
                loaded_pods=sorted(seen.loaded_pods),
                lost=handshake.lost,
                violations=handshake.violations,
                violation_count=handshake.violation_count,
            ),
        )

    def _resume(self, journal_path: Path) -> None:
        saved = load(self._state_path, incarnation=self._plan.incarnation)
        if saved is None:
            # A rank log without the state belongs to nobody we know.
            with contextlib.suppress(OSError):
                journal_path.unlink(missing_ok=True)
            return
        roster, handshake, seen = self._roster, self._handshake, self._seen
        roster.arrived = {message.pod: message for message in saved.check_ins if message.pod in roster.places}
        roster.restarted = saved.restarted
        seen.listening_at, seen.ready_at, seen.api_ready = saved.listening_at, saved.ready_at, saved.api_ready
        seen.local_connected, seen.local_loaded = saved.local.connected, saved.local.loaded
        seen.loaded_pods = {pod for pod in saved.loaded_pods if pod in roster.places}
        handshake.lost, handshake.violations = saved.lost, saved.violations
        handshake.violation_count = saved.violation_count
        log.info("taking over from an earlier relay process: %d pods had checked in", len(roster.arrived))
        if saved.released_at is None or len(roster.arrived) < len(roster.places):
            return
        roster.released_at = saved.released_at
        self._release()
        stages, init = read_journal(journal_path, size=self._plan.size)
        if saved.listening_at is not None or any(stages):
            protocol.resume(handshake, stages, init, now=time.time())
            log.info("ranks: %s", protocol.summary(handshake))


async def _forever(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a piece of work to its end; begin it again a second after it broke."""
    while True:
        try:
            await work()
        except Exception:
            # Whatever it was, the rest of the relay carries the group's start and must go on.
            log.exception("a part of the relay failed and is started again")
            await asyncio.sleep(1)
        else:
            return


async def run(settings: Settings) -> None:
    """Run the service until it is told to stop."""
    raise_file_limit()
    await Service(settings).run()


def raise_file_limit() -> None:
    """Lift the soft limit of open files to the hard one: a rank takes two descriptors, a waiting launcher one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
