"""One operator process in the simulated cluster: the real reconciler, cache and queue over a client that can fail."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from dp_handshake.messages import Snapshot
from dp_operator import naming, reconciler
from dp_operator.api import KIND
from dp_operator.client import ApiError, Client, path
from dp_operator.clock import SteadyClock
from dp_operator.render import Settings
from tests.simulation.cluster import Cluster, Object, Relay

SETTINGS = Settings(relay_image="relay:1")
WORKERS = 2
_KINDS = {path(kind): kind for kind in (KIND, *reconciler.WATCHED, "Node")}


class Weather:
    """What is wrong with the API server and the way to it. Shared by all processes of a history."""

    def __init__(self) -> None:
        self.down_until = 0.0
        self.errors: list[int] = []  # HTTP codes of the next requests
        self.webhook_down_until = 0.0  # an admission webhook for pods: what it does not answer for is an error
        self.lost_answers = 0  # writes that succeed and whose answer never comes
        self.kill_at_write: int | None = None  # the process dies right after that many more writes
        self.clock_off_s = 0.0  # how wrong the operator's time of day is
        self.deaf: dict[str, float] = {}  # kind -> until when its watch is silent
        # kind -> until when its watch is broken. Then its resourceVersion is too old (410), and all is listed anew.
        self.broken: dict[str, float] = {}
        self.late: dict[str, float] = {}  # kind -> until when its watch is broken; it goes on where it was
        self.page = 0  # objects in a page of a list; 0 is all
        self.expiring_lists = 0  # so many continue tokens are too old (410) when they come back


class FakeClient:
    """The client's few calls against the model. Every call takes time, so that others get in between."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cluster = process.cluster
        self._weather = process.weather
        self.server_ahead_s = 0.0
        self._pages: dict[str, list[Object]] = {}  # continue token -> what is left

    async def _request(self, act: Callable[[], Any], *, write: bool = True) -> Any:
        chance = self._process.chance
        if chance.random() < 0.7:
            await asyncio.sleep(0.002 + 0.02 * chance.random())
        weather = self._weather
        if self._cluster.now < weather.down_until:
            raise OSError("connection refused")
        if weather.errors:
            code = weather.errors.pop()
            raise ApiError(code, "Injected", "injected", 2.0 if code == 429 else None)
        self._process.attempts += write
        changes = self._cluster.changes
        answer = act()
        self._process.own_changes += self._cluster.changes - changes
        if write:
            self._process.writes += 1
            if weather.kill_at_write is not None:
                weather.kill_at_write -= 1
                if weather.kill_at_write <= 0:
                    weather.kill_at_write = None
                    self._process.die(restart_after_s=0.5)
            if weather.lost_answers:
                weather.lost_answers -= 1
                raise TimeoutError
        if chance.random() < 0.3:
            await asyncio.sleep(0.02 * chance.random())
        self.server_ahead_s = -weather.clock_off_s
        return answer

    list = Client.list  # its paging is tried here, too

    async def request(self, _: str, where: str, *, params: dict[str, str]) -> Object:
        """One page of a list. All pages are of the moment of the first one."""

        def act() -> Object:
            token = params.get("continue", "")
            if token and self._weather.expiring_lists:
                self._weather.expiring_lists -= 1
                raise ApiError(410, "Expired", "The provided continue parameter is too old")
            label = params.get("labelSelector", "").partition("=")[0]
            listed = self._pages.pop(token, None) or [
                obj
                for obj in self._cluster.all(_KINDS[where])
                if not label or label in obj["metadata"].get("labels", {})
            ]
            size = self._weather.page
            if not size or len(listed) <= size:
                return {"items": listed, "metadata": {}}
            token = f"{where}-{len(listed)}"
            self._pages[token] = listed[size:]
            return {"items": listed[:size], "metadata": {"continue": token}}

        return await self._request(act, write=False)

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return await self._request(lambda: self._cluster.get(kind, name), write=False)

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        kind = manifest["kind"]
        if kind == "Event":
            self._cluster.note(f"event {manifest['reason']}: {manifest['note']}")
            return await self._request(self._cluster.take_event)

        def act() -> Object:
            if kind in ("Pod", "StatefulSet") and self._cluster.now < self._weather.webhook_down_until:
                raise ApiError(500, "InternalError", 'Internal error occurred: failed calling webhook "pods.policy"')
            if dry_run:
                self._cluster.admit(manifest)
                return manifest
            self._process.watchdog.before_create(self._process, manifest)
            self._cluster.note(f"create {kind} {manifest['metadata']['name']}")
            return self._cluster.create(manifest)

        return await self._request(act, write=not dry_run)

    async def apply(self, manifest: Object) -> Object:
        def act() -> Object:
            self._process.watchdog.before_apply(self._process, manifest)
            self._cluster.note(f"apply {manifest['kind']} {manifest['metadata']['name']}")
            return self._cluster.apply(manifest)

        return await self._request(act)

    async def take_over(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """The model keeps no managedFields: who owns a field is tried on a real API server."""
        await self.get(kind, namespace, name)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> Object:
        def act() -> Object:
            obj = self._cluster.objects.get((kind, name))
            if obj and obj["metadata"]["uid"] == uid:
                self._process.watchdog.before_delete(self._process, obj)
            self._cluster.note(f"delete {kind} {name}")
            return self._cluster.delete(kind, name, uid, grace_s=grace_s)

        return await self._request(act)

    async def put_status(self, obj: Object) -> Object:
        def act() -> Object:
            answer = self._cluster.put_status(obj)
            groups = [
                f"{g['index']}/{g['incarnation']}/{g.get('revision', '')[:4]}:{g.get('state', 'Starting')}"
                for g in obj["status"].get("groups", [])
            ]
            self._cluster.note(f"status {' '.join(groups)}")
            self._process.status_writes += 1
            return answer

        self._process.watchdog.before_status(self._process, obj)
        return await self._request(act)

    async def log(self, namespace: str, pod: str, *, previous: bool) -> str:
        return await self._request(lambda: "Traceback (most recent call last):\nRuntimeError: x\n", write=False)


class FakeMonitors:
    """Snapshots of the relays that the operator follows and can reach."""

    def __init__(self, process: Process, changed: Callable[[tuple[str, str]], None]) -> None:
        self._process = process
        self._changed = changed
        self._wanted: dict[str, tuple[tuple[str, str], str]] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.errors: dict[str, str] = {}

    def follow(self, key: tuple[str, str], wanted: dict[str, str]) -> None:
        self._process.watchdog.decided(self._process)  # the operator says so right after it has decided
        for incarnation in [i for i, (k, _) in self._wanted.items() if k == key and i not in wanted]:
            del self._wanted[incarnation]
            self.snapshots.pop(incarnation, None)
            self.errors.pop(incarnation, None)
        for incarnation, ip in wanted.items():
            if self._wanted.get(incarnation) != (key, ip):
                self._wanted[incarnation] = (key, ip)
                for relay in self._process.cluster.relays.values():
                    if relay.incarnation == incarnation:
                        self.hear(relay)

    def hear(self, relay: Relay) -> None:
        self._process.arrive(0.01, self._take, relay)

    def _take(self, relay: Relay) -> None:
        wanted = self._wanted.get(relay.incarnation)
        if wanted is None or wanted[1] != relay.ip or not self._process.alive:
            return
        if self._process.cluster.reachable(relay):
            snapshot = relay.snapshot(self._process.cluster.now)
            before = self.snapshots.get(relay.incarnation)
            self.snapshots[relay.incarnation] = snapshot
            recovered = self.errors.pop(relay.incarnation, None) is not None
            if recovered or before is None or msgspec.structs.replace(before, time=snapshot.time) != snapshot:
                self._changed(wanted[0])  # like the real one, which wakes nobody for what is known
        elif relay.incarnation not in self.errors:
            self.errors[relay.incarnation] = "unreachable"
            self._changed(wanted[0])

    def close(self) -> None:
        self._wanted.clear()


class Process:
    """An operator that can be killed and comes back. `writes` counts API writes of all its lives."""

    def __init__(
        self, cluster: Cluster, weather: Weather, watchdog: Any, chance: random.Random, slot_s: float = 0.0
    ) -> None:
        self.cluster = cluster
        self.weather = weather
        self.watchdog = watchdog
        self.chance = chance
        self.alive = False
        self.writes = 0
        self.attempts = 0  # writes that came to the API server, whatever it said
        self.status_writes = 0
        self.own_changes = 0  # of objects in the cluster
        self.reconciler: reconciler.Reconciler | None = None
        self._monitors: FakeMonitors | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox: dict[str, list[tuple[str, Object]]] = {}
        self._listening = False
        self._lag_s = chance.choice((0.2, 1.5, 3.0))  # of watches and monitors, at most; every history has its own
        self._slot_s = slot_s
        cluster.watchers.append(self._saw)
        cluster.relay_watchers.append(self._heard)

    def start(self) -> None:
        self.alive = True
        self._inbox = {}
        self._listening = False

        def monitors(changed: Callable[[tuple[str, str]], None]) -> FakeMonitors:
            self._monitors = FakeMonitors(self, changed)
            return self._monitors

        client = FakeClient(self)
        self.reconciler = reconciler.Reconciler(
            client,  # type: ignore[arg-type]
            SETTINGS,
            namespaces=[],
            monitors=monitors,  # type: ignore[arg-type]
            clock=SteadyClock(
                wall=lambda: self.cluster.now + self.weather.clock_off_s + client.server_ahead_s,
                monotonic=self.cluster.loop.time,
            ),
            chance=self.chance,
        )
        self._tasks = [self.cluster.loop.create_task(self._run(self.reconciler))]

    @property
    def foreign_changes(self) -> int:
        return self.cluster.changes - self.own_changes

    async def _run(self, mine: reconciler.Reconciler) -> None:
        while True:
            try:
                await mine.resync()
                break
            except (ApiError, OSError, TimeoutError):
                await asyncio.sleep(1)
        # The watches begin a moment after the lists; kopf lists anew and tells what is there.
        await asyncio.sleep(0.1 + self.chance.random())
        self._listening = True
        for kind in self._kinds():
            self._relist(kind)
        works = [mine.work() for _ in range(WORKERS)]
        tasks = [self.cluster.loop.create_task(work) for work in (*works, mine.keep_true())]
        for task in tasks:
            task.add_done_callback(self._ended)
        self._tasks += tasks

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        """None of them may end by itself: the process would end with it."""
        if not task.cancelled():
            reconciler.log.error("%s ended: %r", task.get_name(), task.exception())

    def die(self, *, restart_after_s: float) -> None:
        if not self.alive:
            return
        self.cluster.note("operator dies")
        self.alive = False
        for task in self._tasks:
            task.cancel()
        if self.reconciler:
            self.reconciler.close()
        self.cluster.loop.call_later(restart_after_s, self.start)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    @staticmethod
    def _kinds() -> tuple[str, ...]:
        return (KIND, *reconciler.WATCHED, "Node")

    def _saw(self, kind: str, event: str, obj: Object) -> None:
        if not self._listening or not self.alive or kind not in self._kinds():
            return
        now = self.cluster.now
        if now < self.weather.deaf.get(kind, 0.0) or now < self.weather.broken.get(kind, 0.0):
            return
        if kind not in (KIND, "Node") and naming.LABEL_MANAGED_BY not in obj["metadata"]["labels"]:
            return
        inbox = self._inbox.setdefault(kind, [])
        inbox.append((event, obj))
        if len(inbox) == 1:
            self.arrive(0.02, self._deliver, kind, self.reconciler)

    def arrive(self, soonest_s: float, action: Callable[..., None], *args: Any) -> None:
        """Let news come in after the lag of its way: all that is due in a slot in one go, as a busy operator hears it."""
        lag_s = soonest_s + (self._lag_s - soonest_s) * self.cluster.chance.random()
        at = self.cluster.loop.time() + lag_s
        self.cluster.loop.call_at(math.ceil(at / self._slot_s) * self._slot_s if self._slot_s else at, action, *args)

    def _deliver(self, kind: str, to: reconciler.Reconciler) -> None:
        late_s = self.weather.late.get(kind, 0.0) - self.cluster.now
        if late_s > 0:
            self.cluster.loop.call_later(late_s, self._deliver, kind, to)
        elif to is self.reconciler and self.alive:
            inbox, self._inbox[kind] = self._inbox.get(kind, []), []
            for event, obj in inbox:
                to.seen(kind, {"type": event, "object": obj})

    def break_watch(self, kind: str, *, until: float) -> None:
        self.weather.broken[kind] = until
        self.cluster.loop.call_later(until - self.cluster.now + 0.01, self._relist, kind)

    def _relist(self, kind: str) -> None:
        self.weather.late.pop(kind, None)
        if self.reconciler and self.alive and self._listening:
            for obj in self.cluster.all(kind):
                if kind in (KIND, "Node") or naming.LABEL_MANAGED_BY in obj["metadata"]["labels"]:
                    self.reconciler.seen(kind, {"type": None, "object": obj})
            self.reconciler.relisted()

    def _heard(self, relay: Relay) -> None:
        if self._monitors and self.alive:
            self._monitors.hear(relay)


class Complaints(logging.Handler):
    """Tracebacks that the operator logs: a bug that it survives is a bug."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(level=logging.ERROR)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1]:
            text += f": {record.exc_info[1]!r}"
        self.found.append(text)
