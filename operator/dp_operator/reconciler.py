"""Observe, plan, apply: the only place that writes.

One call of `reconcile` handles one custom resource: the cache is turned into a picture, `plan` decides, the status
(with the ledger) is written first, then the steps in order. It is called again whenever something changed, and it may
be called at any time for no reason: an unchanged resource costs no API call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import time
import traceback
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec

from dp_operator import api, naming, rules, versions
from dp_operator.cache import NODE, WATCHED, Cache, Key
from dp_operator.client import ApiError, Client
from dp_operator.clock import SteadyClock
from dp_operator.failure import LogWanted, with_logs
from dp_operator.metrics import RECONCILES
from dp_operator.monitors import Monitors
from dp_operator.observe import Obstacle, Picture, observe, place
from dp_operator.plan import (
    Action,
    Apply,
    Create,
    Delete,
    Event,
    Plan,
    Situation,
    correction_event,
    failure_event,
    holds_up,
    plan,
)
from dp_operator.queue import FIRST_RETRY_S, LONGEST_RETRY_S, Queue
from dp_operator.render import Settings
from dp_operator.status import bounded, installed_version, is_progress, with_internal_error

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0  # at most one status write per object in this time
PROGRESS_INTERVAL_S = 2.5  # the same, for writes that only tell people how far the ranks are
# Surely past a moment, whatever rounding does: more than the queue's tick, within which a key counts as due.
PAST_S = 0.002
STRANGER_RECHECK_S = 30.0
GOING_RECHECK_S = 1.0
QUICK_ROUNDS = 8
LONGEST_ROUND_S = 30.0
# Where nobody answers, a try costs nobody anything, and no event may come that ends the wait once somebody does.
UNREACHABLE_RETRY_S = 3.0
LOG_TIMEOUT_S = 3.0
KEPT_LOG = 100_000  # characters of a log that are kept in memory while its group is taken away
RESYNC_S = 300.0
# The first lists are made before the watches begin; what was deleted in between is found by this one.
FIRST_RESYNC_S = 10.0
# What is forbidden for other reasons than the pods themselves: a quota counts what is there now, and some of that goes
# first; the operator's own rights; a namespace that is going away.
_OTHER_403 = re.compile(r"exceeded quota|status unknown for quota|cannot \w+ resource|is being terminated")
_SUCCESSES = RECONCILES.labels(result="success")
# Of lists. Watches go by LABEL_MANAGED_BY: a list also finds what somebody took that label from.
SELECTOR = naming.LABEL_UID


class Reconciler:
    """Cache, queue and monitors of one operator process, and the work on them."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        *,
        namespaces: list[str],
        monitors: Callable[[Callable[[Key], None]], Monitors] = Monitors,
        clock: Callable[[], float] | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """monitors, clock (seconds since the epoch) and chance are the world outside; a simulation has its own."""
        self.cache = Cache()
        self.queue: Queue[Key] = Queue()
        self._client = client
        self._settings = settings
        self._namespaces = namespaces or [""]
        self._sees_nodes = not namespaces
        # uid -> (generation, version in the image), what is wrong with its spec
        self._rules: dict[str, tuple[tuple[int, str | None], list[str]]] = {}
        self._verdicts: dict[str, dict[str, str]] = {}  # uid -> revision -> why it is refused, or ""
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}  # uid -> the revision that is asked about
        self._unasked: dict[str, str] = {}  # uid -> why the API server could not be asked about that revision
        self._monitors = monitors(self.queue.add)
        # Deadlines are compared with the API server's times, so its clock counts and not that of our node.
        self._clock = clock or SteadyClock(wall=lambda: time.time() + client.server_ahead_s)
        self._chance = chance or random.SystemRandom()
        self._status_written: dict[str, float] = {}  # uid -> monotonic time
        self._held_until: dict[str, float] = {}  # uid -> monotonic time before which nothing can be done
        self._obstacles: dict[str, dict[tuple[str, str], Obstacle]] = {}  # uid -> (kind, name) -> why
        self._refused: dict[str, str] = {}  # incarnation -> why
        self._blocked: dict[str, str] = {}  # incarnation -> why
        self._logs_of_others: dict[str, dict[str, str]] = {}  # incarnation -> pod -> what was read
        self._applied: dict[tuple[str, str], tuple[str, int]] = {}  # (uid, kind/name) -> version after it, its intent
        self._rounds: dict[str, int] = {}  # uid -> reconciles in a row that acted
        self._entries: dict[str, set[str]] = {}  # uid -> incarnations in the ledger
        self._followed: dict[Key, str] = {}
        self._relisted = asyncio.Event()
        self._errands: set[asyncio.Task[None]] = set()
        self._live: dict[str, set[str]] = {}  # uid -> incarnations that were released
        self._generations: dict[str, int] = {}  # uid -> generation that was last looked at

    def seen(self, kind: str, event: dict[str, Any]) -> None:
        """Take in one watch event."""
        obj = event["object"]
        if kind == NODE:
            deleted = event["type"] == "DELETED"
            for touched in self.cache.remove_node(obj["metadata"]["name"]) if deleted else self.cache.put_node(obj):
                self.queue.add(touched)
            return
        if event["type"] == "DELETED":
            key = self.cache.remove(kind, obj)
            self._gone(kind, obj, expected=key is None)
        else:
            key = self.cache.put(kind, obj)
        if key:
            if kind == "Pod" and self._is_news_of_an_end(key, obj):
                self._held_until.pop(obj["metadata"]["labels"].get(naming.LABEL_UID), None)
            self.queue.add(key)

    def _is_news_of_an_end(self, key: Key, pod: dict[str, Any]) -> bool:
        """Whether an engine has ended whose group has not failed yet, so that the ledger may be written at once."""
        statuses = (pod.get("status") or {}).get("containerStatuses") or []
        if not any(status["name"] == "engine" and status.get("state", {}).get("terminated") for status in statuses):
            return False
        incarnation = pod["metadata"]["labels"].get(naming.LABEL_INCARNATION)
        groups = ((self.cache.custom_resource(key) or {}).get("status") or {}).get("groups") or []
        return any(group["incarnation"] == incarnation and group.get("state") != "Stopping" for group in groups)

    def _gone(self, kind: str, obj: dict[str, Any], *, expected: bool) -> None:
        """Follow up an end, which may also mean that an object lost the label that we watch by."""
        meta = obj["metadata"]
        for uid, known in self._obstacles.items():
            if known.pop((kind, meta["name"]), None):
                self._later(uid, 0.0)
        if not expected and not meta.get("deletionTimestamp") and _is_a_groups(kind, obj):
            self._start(self._remove_unlabelled(kind, meta), f"look after {kind} {meta['name']}")

    async def _remove_unlabelled(self, kind: str, meta: dict[str, Any]) -> None:
        """Delete a group's object that somebody took our label from.

        It counts as lost, so nobody else would ever take it away: a head would go on taking traffic, a StatefulSet
        would make the pods of a group again that is to go.
        """
        failures = 0
        while True:
            try:
                if await self._exists(kind, meta["namespace"], meta["name"], meta["uid"]):
                    await self._client.delete(kind, meta["namespace"], meta["name"], meta["uid"])
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                if isinstance(error, ApiError) and error.status == 404:
                    return
                log.warning("%s %s/%s lost our label: %s", kind, meta["namespace"], meta["name"], error)
                await asyncio.sleep(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**failures))
                failures = min(failures + 1, 20)
            else:
                return

    def _start(self, errand: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Run something beside the work on keys; it ends with the operator at the latest."""
        task = asyncio.create_task(errand, name=name)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    def relisted(self) -> None:
        """Note that a watch began anew: what vanished meanwhile is not told, so compare soon."""
        self._relisted.set()

    async def resync(self) -> None:
        """LIST everything and compare."""
        for kind in (api.KIND, *WATCHED):
            known = self.cache.uids(kind)
            found: list[dict[str, Any]] = []
            for namespace in self._namespaces:
                selector = "" if kind == api.KIND else SELECTOR
                found += await self._client.list(kind, selector=selector, namespace=namespace)
                self._clock()  # it begins right after the first answer, which tells the API server's time
            watched = [obj for obj in found if kind == api.KIND or _is_watched(obj)]
            lost: list[dict[str, Any]] = [obj for obj in found if kind != api.KIND and not _is_watched(obj)]
            for key in self.cache.replace(kind, watched, known_before=known, vanished=lost.append):
                self.queue.add(key)
            for obj in lost:
                self._gone(kind, obj, expected=False)
        if self._sees_nodes:
            listed = await self._client.list(NODE)
            gone = set(self.cache.nodes()) - {obj["metadata"]["name"] for obj in listed}
            for keys in (*map(self.cache.put_node, listed), *map(self.cache.remove_node, gone)):
                for key in keys:
                    self.queue.add(key)

    async def keep_true(self) -> None:
        """Resync for ever: soon after the start and after every broken watch, rarely otherwise."""
        delay = FIRST_RESYNC_S
        while True:
            try:
                async with asyncio.timeout(delay):
                    await self._relisted.wait()
                    await asyncio.sleep(2)  # several watches break together
            except TimeoutError:
                pass
            self._relisted.clear()
            try:
                await self.resync()
                delay = RESYNC_S + self._chance.random() * 60
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("resync failed, trying again: %s", error)
                delay = FIRST_RESYNC_S

    async def work(self) -> None:
        """Handle keys for ever."""
        while True:
            key = await self.queue.get()
            try:
                await self.reconcile(key)
                self.queue.forget(key)
                _SUCCESSES.inc()
            except ApiError as error:
                delay = self.queue.retry(key, at_least_s=error.retry_after_s or 0.0)
                RECONCILES.labels(result="error").inc()
                log.warning("%s/%s: %s; next try in %.1f s", *key, error, delay)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                delay = self.queue.retry(key, at_most_s=UNREACHABLE_RETRY_S)
                RECONCILES.labels(result="error").inc()
                log.warning("%s/%s: API server: %r; next try in %.1f s", *key, error, delay)
            except Exception as error:
                # A bug met by one object must not stop the others; the traceback is the report.
                delay = self.queue.retry(key)
                RECONCILES.labels(result="bug").inc()
                log.exception("%s/%s: cannot be planned; next try in %.1f s", *key, delay)
                await self._confess(key, error)
            finally:
                self.queue.done(key)

    async def _confess(self, key: Key, error: Exception) -> None:
        """Say in the status that the operator has failed over a resource; whoever looks at it does not read our log."""
        raw = self.cache.custom_resource(key)
        if raw is None:
            return
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__} in {os.path.basename(place.filename)}:{place.lineno}"
        if isinstance(error, msgspec.ValidationError):
            words += f": {error}"[:500]
        status, generation = raw.get("status") or {}, raw["metadata"]["generation"]
        said = with_internal_error(status, words, generation=generation, now=self._clock())
        if said is status:
            return
        try:
            self.cache.put(api.KIND, await self._client.put_status(raw | {"status": said}))
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as refusal:
            log.warning("%s/%s: this could not be said in its status: %s", *key, refusal)

    def close(self) -> None:
        self._monitors.close()
        for task in self._errands:
            task.cancel()

    async def reconcile(self, key: Key) -> None:
        """Bring one custom resource a step further."""
        raw = self.cache.custom_resource(key)
        followed = self._followed.get(key)
        if followed and (raw is None or raw["metadata"]["uid"] != followed):
            self._forget(key, followed)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            # Owner references do the cleaning up.
            self._monitors.follow(key, {})
            return
        uid = raw["metadata"]["uid"]
        self._followed[key] = uid
        held_s = self._held_until.get(uid, 0.0) - _monotonic()
        if held_s > 0:
            self.queue.add_after(key, held_s + PAST_S)
            return
        cr = api.decode(raw)
        self._forgive(uid, cr.metadata.generation)
        revision = naming.revision(cr.spec)
        if uid in self._asking and self._asking[uid][0] != revision:
            self._ask_no_more(uid)
        picture = observe(
            uid,
            self.cache.owned(uid),
            self._monitors.snapshots,
            place=self.cache.placed,
            obstacles=dict(self._obstacles.get(uid, {})),
            refused=self._refused,
            blocked=self._blocked,
            nodes=self.cache.nodes(),
        )
        now = self._clock()
        decided = plan(
            Situation(
                cr=cr,
                picture=picture,
                settings=self._settings,
                now=now,
                token=self._chance.randbytes(16),
                errors=self._refusals(cr, revision),
                monitor_errors=self._monitors.errors,
                verdicts=self._verdicts.get(uid, {}),
                unasked=self._unasked.get(uid, ""),
            )
        )
        self._follow(key, cr, picture)
        if decided.checks:
            self._ask(uid, revision, decided.checks)
        if decided.logs:
            decided = await self._with_logs(cr, decided)
        unwritten = False
        if decided.status != cr.status:
            progress = is_progress(cr.status, decided.status)
            age_s = _monotonic() - self._status_written.get(uid, float("-inf"))
            # A group goes once, so this cannot become a storm; and what its pods tell of the cause may be gone in a second.
            interval_s = 0.0 if _goes(cr.status, decided.status) else STATUS_INTERVAL_S
            delay_s = (PROGRESS_INTERVAL_S if progress else interval_s) - age_s
            if delay_s > 0:
                self.queue.add_after(key, delay_s + PAST_S)
                if not progress:
                    # Nothing may be done before the ledger is written: what happens meanwhile need not be planned.
                    self._held_until[uid] = _monotonic() + delay_s
                    return
                # The steps rely on the ledger alone, and that has nothing new.
                unwritten = True
            elif not await self._write_status(key, raw, decided):
                return
        self._prune(uid, {entry.incarnation for entry in decided.status.groups})
        self._live[uid] = {entry.incarnation for entry in decided.status.groups if entry.released_at}
        if decided.events:
            # The ledger is written: its events are true whatever becomes of the actions. Neither waits for the other.
            self._start(self._post(raw, decided.events), f"events of {cr.metadata.namespace}/{cr.metadata.name}")
        acted = await self._act(uid, decided)
        self._rounds[uid] = self._rounds.get(uid, 0) + 1 if acted else 0
        if acted:
            # A start takes a few rounds at once. Whatever needs many more is going in circles, and circles are slow.
            beyond = self._rounds[uid] - QUICK_ROUNDS
            self.queue.add_after(key, 0.0 if beyond <= 0 else min(LONGEST_ROUND_S, 0.25 * 2 ** min(beyond, 10)))
        elif decided.look_again_at is not None and not (unwritten and decided.look_again_at <= now):
            # A look at once follows every change of the status; one that is not written yet has its own time.
            # Deadlines are whole seconds; a moment later they have surely passed.
            self.queue.add_after(key, decided.look_again_at - now + 0.05)

    def _refusals(self, cr: api.DataParallelDeployment, revision: str) -> list[str]:
        """Why the spec cannot be acted on; asked once per generation and version found in the image."""
        installed = installed_version(cr.status.groups, revision, naming.restart_token(cr))
        installed = installed or versions.known(cr.spec)
        asked = (cr.metadata.generation, installed)
        before, errors = self._rules.get(cr.metadata.uid, (None, []))
        if before != asked:
            errors = rules.refusals(name=cr.metadata.name, spec=cr.spec, installed=installed)
            self._rules[cr.metadata.uid] = (asked, errors)
        return errors

    def _forget(self, key: Key, uid: str) -> None:
        self._followed.pop(key, None)
        self._monitors.follow(key, {})
        self._status_written.pop(uid, None)
        self._held_until.pop(uid, None)
        self._obstacles.pop(uid, None)
        self._ask_no_more(uid)
        self._rounds.pop(uid, None)
        self._generations.pop(uid, None)
        self._live.pop(uid, None)
        self._prune(uid, set())
        self._rules.pop(uid, None)
        self._applied = {k: v for k, v in self._applied.items() if k[0] != uid}

    def _forgive(self, uid: str, generation: int) -> None:
        """Try what the API server refused again once the spec has changed."""
        if self._generations.get(uid) != generation:
            self._generations[uid] = generation
            known = self._obstacles.get(uid, {})
            self._obstacles[uid] = {place: what for place, what in known.items() if what.reason != "ObjectRefused"}

    def _prune(self, uid: str, incarnations: set[str]) -> None:
        """Forget what was noted about incarnations that are in the ledger no more."""
        for incarnation in self._entries.get(uid, set()) - incarnations:
            self._refused.pop(incarnation, None)
            self._blocked.pop(incarnation, None)
            self._logs_of_others.pop(incarnation, None)
        known = self._obstacles.get(uid, {})
        for name in [n for n, what in known.items() if what.incarnation and what.incarnation not in incarnations]:
            del known[name]
        self._entries[uid] = incarnations
        if not incarnations:
            del self._entries[uid]

    def _follow(self, key: Key, cr: api.DataParallelDeployment, picture: Picture) -> None:
        wanted: dict[str, str] = {}
        for entry in cr.status.groups:
            objects = picture.incarnations.get(entry.incarnation)
            head = objects.head if objects else None
            if entry.state in ("Starting", "Serving") and head and head.status.pod_ip:
                wanted[entry.incarnation] = head.status.pod_ip
        self._monitors.follow(key, wanted)

    def _ask(self, uid: str, revision: str, manifests: list[dict[str, Any]]) -> None:
        """Begin to ask the API server whether it takes the pods of a new revision, if nobody is at it yet.

        Beside the work on keys: a webhook that hangs or fails must not hold up the failures of groups that run.
        """
        if uid not in self._asking:
            self._asking[uid] = revision, self._start(self._verdict(uid, revision, manifests), f"ask about {revision}")

    def _ask_no_more(self, uid: str) -> None:
        """Drop a question, and its answer with it: policies change, so it is put anew if it comes up again."""
        if uid in self._asking:
            self._asking.pop(uid)[1].cancel()
        self._verdicts.pop(uid, None)
        self._unasked.pop(uid, None)

    async def _verdict(self, uid: str, revision: str, manifests: list[dict[str, Any]]) -> None:
        """Ask until the revision is taken: its refusal may end with a policy, and a failing webhook may be mended."""
        failures = 0
        while True:
            try:
                verdict = await self._refusal(manifests)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("revision %s cannot be asked about: %r", revision, error)
                if revision not in self._verdicts.get(uid, {}):
                    self._note_unasked(uid, str(error) or type(error).__name__)
                at_least_s = error.retry_after_s or 0.0 if isinstance(error, ApiError) else 0.0
                await asyncio.sleep(max(at_least_s, min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**failures)))
                failures = min(failures + 1, 20)
                continue
            failures = 0
            self._note_unasked(uid, "")
            if self._verdicts.get(uid, {}).get(revision) != verdict:
                self._verdicts[uid] = {revision: verdict}
                self._later(uid, 0.0)
            if not verdict:
                return
            await asyncio.sleep(STRANGER_RECHECK_S)

    def _note_unasked(self, uid: str, words: str) -> None:
        if self._unasked.get(uid, "") != words:
            self._unasked[uid] = words
            self._later(uid, 0.0)

    async def _refusal(self, manifests: list[dict[str, Any]]) -> str:
        """Why the API server refuses one of these; "" where it takes them all, or what it says is not about them."""
        for manifest in manifests:
            try:
                await self._client.create(manifest, dry_run=True)
            except ApiError as error:
                if error.status in (400, 422) or (error.status == 403 and not _OTHER_403.search(error.message)):
                    return f"the API server refuses the {manifest['kind']} of the new spec: {error.message}"[:1024]
                if error.status != 403:
                    raise
        return ""

    async def _with_logs(self, cr: api.DataParallelDeployment, decided: Plan) -> Plan:
        """Add to a failure what the engine's log says: its pod goes next. Without the log it is as good as it can be."""
        texts = await asyncio.gather(*(self._log_once(cr, wanted) for wanted in decided.logs))
        explained = bounded(with_logs(decided.status, list(zip(decided.logs, texts, strict=True))))
        events = list(decided.events)
        for before, after in zip(decided.status.groups, explained.groups, strict=True):
            if before == after:
                continue
            told = failure_event(before, before.last_failures[0])
            if told in events:
                # The event that tells of the failure tells the better reason, too.
                events[events.index(told)] = failure_event(after, after.last_failures[0])
            elif before.last_failures[0].pod != after.last_failures[0].pod:
                events.append(correction_event(after, after.last_failures[0]))
        return msgspec.structs.replace(decided, status=explained, events=events)

    async def _log_once(self, cr: api.DataParallelDeployment, wanted: LogWanted) -> str:
        """The log of an engine, of one that may only be a victim but once: its pod soon goes, and the log with it."""
        if not wanted.instead:
            return await self._log(cr, wanted)
        known = self._logs_of_others.setdefault(wanted.incarnation, {})
        if not known.get(wanted.pod):
            known[wanted.pod] = (await self._log(cr, wanted))[-KEPT_LOG:]
        return known[wanted.pod]

    async def _log(self, cr: api.DataParallelDeployment, wanted: LogWanted) -> str:
        """The log of an engine that ended, "" where it cannot be had in time: the head it may be of still has traffic."""
        namespace = cr.metadata.namespace
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                text = await self._client.log(namespace, wanted.pod, previous=wanted.previous)
                if not wanted.previous and await self._runs_again(namespace, wanted.pod):
                    # The kubelet was faster: that was the log of a launcher that is refused, if of anything.
                    text = await self._client.log(namespace, wanted.pod, previous=True)
                return text
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("%s/%s: no log of %s: %s", namespace, cr.metadata.name, wanted.pod, error)
            return ""

    async def _runs_again(self, namespace: str, pod: str) -> bool:
        """Whether the engine of a pod, which had ended, has been started again."""
        try:
            found = await self._client.get("Pod", namespace, pod)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        statuses = found.get("status", {}).get("containerStatuses", [])
        return any(status["name"] == "engine" and "terminated" not in status["state"] for status in statuses)

    async def _write_status(self, key: Key, raw: dict[str, Any], decided: Plan) -> bool:
        """Write the status. False: the resource has changed or is gone, and the key comes again if it must."""
        uid = raw["metadata"]["uid"]
        try:
            updated = await self._client.put_status(raw | {"status": msgspec.to_builtins(decided.status)})
        except ApiError as error:
            if error.status == 404:
                return False  # its DELETED event is on the way
            if error.status != 409:
                raise
            self.cache.put(api.KIND, await self._client.get(api.KIND, *key))
            self.queue.add(key)
            return False
        self._status_written[uid] = _monotonic()
        self.cache.put(api.KIND, updated)
        return True

    async def _act(self, uid: str, decided: Plan) -> bool:
        """Carry out the sequences, none of which waits for another. True if anything was done."""
        if not decided.sequences:
            return False
        results = await asyncio.gather(*(self._run(uid, steps) for steps in decided.sequences), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return any(results)

    async def _run(self, uid: str, steps: list[list[Action]]) -> bool:
        """Carry out the steps in order. True if anything was done."""
        acted = False
        for step in steps:
            results = await asyncio.gather(*(self._do(uid, action) for action in step), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            acted = acted or any(results)
            if holds_up(step, self._obstacles.get(uid, {})):
                break
        return acted

    async def _do(self, uid: str, action: Action) -> bool:
        match action:
            case Create(manifest):
                return await self._create(uid, manifest)
            case Apply(manifest):
                return await self._apply(uid, manifest)
            case Delete():
                return await self._delete(uid, action)

    async def _create(self, uid: str, manifest: dict[str, Any]) -> bool:
        kind, meta = manifest["kind"], manifest["metadata"]
        incarnation = meta["labels"].get(naming.LABEL_INCARNATION)
        try:
            made = await self._client.create(manifest)
            if kind in WATCHED:
                self.cache.put(kind, made)
            self._blocked.pop(incarnation, None)
        except ApiError as error:
            if error.status in (403, 404) and incarnation:
                # A quota, a namespace that is going away, a gang scheduler that is not installed: said in the status,
                # tried again later.
                self._blocked[incarnation] = f"the API server does not take {kind} {meta['name']}: {error.message}"
                raise
            if error.status == 409 and error.reason == "AlreadyExists":
                if kind in WATCHED:
                    return await self._meet(uid, manifest)
                return True  # a PodGroup that an earlier try made: its name has the incarnation's id in it
            if error.status not in (400, 403, 422):
                raise
            words = f"the API server refuses {kind} {meta['name']}: {error.message}"
            if incarnation in self._live.get(uid, set()):
                # A repair that fails, such as a Service whose address somebody has by now, is no reason to end a group
                # that was released: before, its launchers look for each other at that address. Tried again soon at
                # first: the API server needs a moment to free the address of a Service that was deleted.
                self._blocked[incarnation] = words
                raise
            log.warning("%s %s/%s was refused: %s", kind, meta["namespace"], meta["name"], error)
            if incarnation:
                self._refused[incarnation] = words
            else:
                refusal = Obstacle("ObjectRefused", f"the API server refuses it: {error.message}")
                self._stand_before(uid, manifest, refusal)
        return True

    async def _meet(self, uid: str, manifest: dict[str, Any]) -> bool:
        """Look at what is in the way of an object: it, unheard of; one that is going away; or a stranger's."""
        kind, wanted = manifest["kind"], manifest["metadata"]
        existing = await self._client.get(kind, wanted["namespace"], wanted["name"])
        meta = existing["metadata"]
        labels = meta.get("labels") or {}
        owners = {owner["uid"] for owner in meta.get("ownerReferences") or []}
        if labels.get(naming.LABEL_UID) == uid and uid in owners:
            if not _is_watched(existing) and naming.LABEL_INCARNATION in labels:
                # No watch would tell of it. It is made anew.
                await self._client.delete(kind, meta["namespace"], meta["name"], meta["uid"])
                self._later(uid, GOING_RECHECK_S)
                return False
            self.cache.revive(kind, existing)
            return True
        # What is left of an earlier resource of this name is on its way out, by the garbage collector.
        earlier = any(o["kind"] == api.KIND and o["uid"] != uid for o in meta.get("ownerReferences") or [])
        if meta.get("deletionTimestamp") or earlier:
            self._later(uid, GOING_RECHECK_S)
            return False
        words = "an object of this name exists that is not ours; rename or delete one of them"
        obstacle = Obstacle("NameTaken", words, wanted["labels"].get(naming.LABEL_INCARNATION, ""))
        self._stand_before(uid, manifest, obstacle)
        return True

    def _later(self, uid: str, delay_s: float) -> None:
        """Look at the custom resource again after delay_s, at once with 0."""
        for key, followed in self._followed.items():
            if followed == uid:
                self.queue.add_after(key, delay_s)

    def _stand_before(self, uid: str, manifest: dict[str, Any], obstacle: Obstacle) -> None:
        """Note what is in the way of an object, and ask now and then whether it still is.

        Until it is not, the object is left alone and the status stays. A stranger may go; a quota or a policy that
        refuses an object may be changed.
        """
        kind, meta = manifest["kind"], manifest["metadata"]
        place = (kind, meta["name"])
        self._obstacles.setdefault(uid, {})[place] = obstacle

        async def wait() -> None:
            while self._obstacles.get(uid, {}).get(place) is obstacle:
                await asyncio.sleep(STRANGER_RECHECK_S)
                gone = await self._has_gone(obstacle, manifest)
                if gone and self._obstacles.get(uid, {}).get(place) is obstacle:
                    del self._obstacles[uid][place]
                    self._later(uid, 0.0)

        self._start(wait(), f"{kind} {meta['namespace']}/{meta['name']} cannot be made")

    async def _has_gone(self, obstacle: Obstacle, manifest: dict[str, Any]) -> bool:
        """Whether the way is free, without writing: a stranger is looked for, for a refusal a dry run asks again."""
        meta = manifest["metadata"]
        try:
            if obstacle.reason == "NameTaken":
                await self._client.get(manifest["kind"], meta["namespace"], meta["name"])
                return False
            await self._client.create(manifest, dry_run=True)
        except ApiError as error:
            return obstacle.reason == "NameTaken" and error.status == 404
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return True

    async def _apply(self, uid: str, manifest: dict[str, Any]) -> bool:
        kind, meta = manifest["kind"], manifest["metadata"]
        place = (uid, f"{kind}/{meta['name']}")
        intent = hash(msgspec.json.encode(manifest, order="deterministic"))
        existing = next(
            (o for k, o in self.cache.owned(uid) if k == kind and o["metadata"]["name"] == meta["name"]), None
        )
        if existing and self._applied.get(place) == (existing["metadata"]["resourceVersion"], intent):
            # We applied exactly this and the server spells it differently: nothing is left to repair.
            return False
        if place not in self._applied:
            await self._client.take_over(kind, meta["namespace"], meta["name"], meta["uid"])
        applied = await self._client.apply(manifest)
        self._applied[place] = (applied["metadata"]["resourceVersion"], intent)
        self.cache.put(kind, applied)
        return True

    async def _delete(self, uid: str, action: Delete) -> bool:
        kind, name = action.kind, action.name
        found = next(((k, o) for k, o in self.cache.owned(uid) if o["metadata"]["uid"] == action.uid), None)
        if found is None:
            return False
        namespace = found[1]["metadata"]["namespace"]
        try:
            answer = await self._client.delete(kind, namespace, name, action.uid, grace_s=action.grace_s)
        except ApiError as error:
            if error.status == 409 and await self._exists(kind, namespace, name, action.uid):
                raise  # not about the uid: somebody changed it at the same moment
            if error.status not in (404, 409):
                raise
            # Gone already, or another object has the name by now: either way this one is no more.
            self.cache.remove(kind, found[1])
            return True
        if answer.get("kind") == kind and answer["metadata"].get("deletionTimestamp"):
            self.cache.put(kind, answer)
        else:
            self.cache.remove(kind, found[1])
        return True

    async def _exists(self, kind: str, namespace: str, name: str, uid: str) -> bool:
        try:
            existing = await self._client.get(kind, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return bool(existing["metadata"]["uid"] == uid)

    async def _post(self, raw: dict[str, Any], events: list[Event]) -> None:
        """Post Events in their order; losing one is no reason to stop."""
        for event in events:
            await self._post_one(raw["metadata"], event)

    async def _post_one(self, meta: dict[str, Any], event: Event) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name']}.{secrets.token_hex(8)}", "namespace": meta["namespace"]},
            "eventTime": at,
            "reportingController": f"{api.GROUP}/{naming.MANAGER}",
            "reportingInstance": os.environ.get("POD_NAME", naming.MANAGER),
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": event.note[:1024],
            "regarding": {
                "apiVersion": api.API_VERSION,
                "kind": api.KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
        }
        try:
            await self._client.create(body)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("event %s of %s/%s was not posted: %s", event.reason, meta["namespace"], meta["name"], error)


def _is_a_groups(kind: str, obj: dict[str, Any]) -> bool:
    """Whether an object is what its labels say: a copy that somebody made of one of ours has them, too."""
    placed = place(kind, obj)
    if placed is None or not placed.part:
        return False
    if placed.part != "workers":
        return True
    meta = placed.obj.metadata
    base = naming.base_name(meta.labels.get(naming.LABEL_NAME, ""), placed.group, placed.incarnation)
    return meta.name.startswith(f"{base}-") and any(owner.kind == "StatefulSet" for owner in meta.owner_references)


def _goes(before: api.Status, after: api.Status) -> bool:
    """Whether another group is to be taken away: it may have failed, and its head may have traffic."""
    going = {entry.incarnation for entry in before.groups if entry.state == "Stopping"}
    return any(entry.state == "Stopping" and entry.incarnation not in going for entry in after.groups)


def _is_watched(obj: dict[str, Any]) -> bool:
    """Whether an object has the label that the watches go by."""
    return bool(obj["metadata"]["labels"].get(naming.LABEL_MANAGED_BY) == naming.MANAGER)


def _monotonic() -> float:
    return asyncio.get_running_loop().time()
