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
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec

from dp_operator import api, naming, rules
from dp_operator.cache import NODE, WATCHED, Cache, Key
from dp_operator.client import ApiError, Client
from dp_operator.clock import SteadyClock
from dp_operator.failure import with_log
from dp_operator.metrics import RECONCILES
from dp_operator.monitors import Monitors
from dp_operator.observe import Picture, observe
from dp_operator.plan import Action, Apply, Create, Delete, Event, Plan, Situation, plan
from dp_operator.queue import Queue
from dp_operator.render import Settings

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0  # at most one status write per object in this time
STRANGER_RECHECK_S = 30.0
LOG_TIMEOUT_S = 3.0
_REFUSED = "the API server refuses it"
RESYNC_S = 300.0
# The first lists are made before the watches begin; what was deleted in between is found by this one.
FIRST_RESYNC_S = 10.0
SELECTOR = f"{naming.LABEL_MANAGED_BY}={naming.MANAGER}"


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
        self._rules: dict[str, tuple[int, list[str]]] = {}  # uid -> generation, what is wrong with its spec
        self._verdicts: dict[str, dict[str, str]] = {}  # uid -> revision -> why it is refused, or ""
        self._monitors = monitors(self.queue.add)
        self._clock = clock or SteadyClock()
        self._chance = chance or random.SystemRandom()
        self._status_written: dict[str, float] = {}  # uid -> monotonic time
        self._strangers: dict[str, dict[tuple[str, str], str]] = {}  # uid -> (kind, name) -> why
        self._recheck_at: dict[str, float] = {}  # uid -> monotonic time to look at its strangers again
        self._refused: dict[str, str] = {}  # incarnation -> why
        self._blocked: dict[str, str] = {}  # incarnation -> why
        # (uid, kind/name) -> resourceVersion after our last apply, and what we applied
        self._applied: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
        self._followed: dict[Key, str] = {}
        self._relisted = asyncio.Event()

    def seen(self, kind: str, event: dict[str, Any]) -> None:
        """Take in one watch event."""
        obj = event["object"]
        if kind == NODE:
            deleted = event["type"] == "DELETED"
            for touched in self.cache.remove_node(obj["metadata"]["name"]) if deleted else self.cache.put_node(obj):
                self.queue.add(touched)
            return
        key = self.cache.remove(kind, obj) if event["type"] == "DELETED" else self.cache.put(kind, obj)
        if key:
            self.queue.add(key)

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
            for key in self.cache.replace(kind, found, known_before=known):
                self.queue.add(key)
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
                RECONCILES.labels(result="success").inc()
            except ApiError as error:
                delay = self.queue.retry(key, at_least_s=error.retry_after_s or 0.0)
                RECONCILES.labels(result="error").inc()
                log.warning("%s/%s: %s; next try in %.1f s", *key, error, delay)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                delay = self.queue.retry(key)
                RECONCILES.labels(result="error").inc()
                log.warning("%s/%s: API server: %r; next try in %.1f s", *key, error, delay)
            except Exception:
                # A bug met by one object must not stop the others; the traceback is the report.
                delay = self.queue.retry(key)
                RECONCILES.labels(result="bug").inc()
                log.exception("%s/%s: cannot be planned; next try in %.1f s", *key, delay)
            finally:
                self.queue.done(key)

    def close(self) -> None:
        self._monitors.close()

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
        await self._meet_again(uid, key)
        cr = api.decode(raw)
        picture = observe(
            uid,
            self.cache.owned(uid),
            self._monitors.snapshots,
            strangers=dict(self._strangers.get(uid, {})),
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
                errors=self._refusals(cr),
                monitor_errors=self._monitors.errors,
                verdicts=self._verdicts.get(uid, {}),
            )
        )
        self._follow(key, cr, picture)
        if decided.checks:
            await self._check(uid, naming.revision(cr.spec), decided.checks)
            self.queue.add(key)
        decided = await self._with_logs(cr, decided)
        if decided.status != cr.status and not await self._write_status(key, raw, decided):
            return
        acted = await self._act(uid, decided)
        for event in decided.events:
            await self._post(raw, event)
        if acted:
            self.queue.add(key)
        elif decided.look_again_at is not None:
            # Deadlines are whole seconds; a moment later they have surely passed.
            self.queue.add_after(key, decided.look_again_at - now + 0.05)

    def _refusals(self, cr: api.DataParallelDeployment) -> list[str]:
        """Why the spec cannot be acted on; asked once per generation."""
        generation, errors = self._rules.get(cr.metadata.uid, (-1, []))
        if generation != cr.metadata.generation:
            errors = rules.refusals(name=cr.metadata.name, spec=cr.spec)
            self._rules[cr.metadata.uid] = (cr.metadata.generation, errors)
        return errors

    def _forget(self, key: Key, uid: str) -> None:
        self._followed.pop(key, None)
        self._monitors.follow(key, {})
        self._status_written.pop(uid, None)
        self._strangers.pop(uid, None)
        self._recheck_at.pop(uid, None)
        self._verdicts.pop(uid, None)
        self._rules.pop(uid, None)
        self._applied = {k: v for k, v in self._applied.items() if k[0] != uid}

    def _follow(self, key: Key, cr: api.DataParallelDeployment, picture: Picture) -> None:
        wanted: dict[str, str] = {}
        for entry in cr.status.groups:
            objects = picture.incarnations.get(entry.incarnation)
            head = objects.head if objects else None
            if entry.state in ("Starting", "Serving") and head and head.status.pod_ip:
                wanted[entry.incarnation] = head.status.pod_ip
        self._monitors.follow(key, wanted)

    async def _check(self, uid: str, revision: str, manifests: list[dict[str, Any]]) -> None:
        """Ask the API server whether it takes the pods of a new revision. What is not about the pods is no refusal."""
        verdict = ""
        for manifest in manifests:
            try:
                await self._client.create(manifest, dry_run=True)
            except ApiError as error:
                if error.status in (400, 422):
                    verdict = f"the API server refuses the {manifest['kind']} of the new spec: {error.message}"[:1024]
                    break
                if error.status != 403:  # a quota counts what is there now, and some of that goes first
                    raise
        self._verdicts[uid] = {revision: verdict}

    async def _with_logs(self, cr: api.DataParallelDeployment, decided: Plan) -> Plan:
        """Add to a failure what the engine's log says: its pod goes next. Without the log it is as good as it can be."""
        for wanted in decided.logs:
            try:
                async with asyncio.timeout(LOG_TIMEOUT_S):
                    text = await self._client.log(cr.metadata.namespace, wanted.pod, previous=wanted.previous)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.info("%s/%s: no log of %s: %s", cr.metadata.namespace, cr.metadata.name, wanted.pod, error)
                continue
            decided = msgspec.structs.replace(decided, status=with_log(decided.status, wanted, text))
        return decided

    async def _write_status(self, key: Key, raw: dict[str, Any], decided: Plan) -> bool:
        """Write the status unless one was written within the last second. False: the key comes again."""
        uid = raw["metadata"]["uid"]
        since = _monotonic() - self._status_written.get(uid, float("-inf"))
        if since < STATUS_INTERVAL_S:
            self.queue.add_after(key, STATUS_INTERVAL_S - since + 0.001)  # surely past it, whatever rounding does
            return False
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
        """Carry out the steps in order. True if anything was done."""
        acted = False
        for step in decided.steps:
            results = await asyncio.gather(*(self._do(uid, action) for action in step), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            acted = acted or any(results)
        return acted

    async def _do(self, uid: str, action: Action) -> bool:
        match action:
            case Create(manifest):
                return await self._create(uid, manifest)
            case Apply(manifest):
                return await self._apply(uid, manifest)
            case Delete(kind, name, object_uid):
                return await self._delete(uid, kind, name, object_uid)

    async def _create(self, uid: str, manifest: dict[str, Any]) -> bool:
        kind, meta = manifest["kind"], manifest["metadata"]
        incarnation = meta["labels"].get(naming.LABEL_INCARNATION)
        try:
            self.cache.put(kind, await self._client.create(manifest))
            self._blocked.pop(incarnation, None)
        except ApiError as error:
            if error.status == 403 and incarnation:
                # A quota, or a namespace that is going away: said in the status, tried again later.
                self._blocked[incarnation] = f"the API server does not take {kind} {meta['name']}: {error.message}"
                raise
            if error.status == 409 and error.reason == "AlreadyExists":
                await self._meet(uid, kind, meta["namespace"], meta["name"])
                return True
            if error.status not in (400, 422):
                raise
            log.warning("%s %s/%s was refused: %s", kind, meta["namespace"], meta["name"], error)
            if incarnation:
                self._refused[incarnation] = f"the API server refuses {kind} {meta['name']}: {error.message}"
            else:
                self._strange(uid, kind, meta["name"], f"{_REFUSED}: {error.message}")
        return True

    async def _meet(self, uid: str, kind: str, namespace: str, name: str) -> None:
        """Look at an object that is in the way: ours and not heard of yet, or a stranger's."""
        existing = await self._client.get(kind, namespace, name)
        labels = existing["metadata"].get("labels") or {}
        owners = {owner["uid"] for owner in existing["metadata"].get("ownerReferences") or []}
        if labels.get(naming.LABEL_UID) == uid and uid in owners:
            self.cache.put(kind, existing)
            return
        self._strange(uid, kind, name, "an object of this name exists that is not ours; rename or delete one of them")

    def _strange(self, uid: str, kind: str, name: str, why: str) -> None:
        self._strangers.setdefault(uid, {})[kind, name] = why
        self._recheck_at[uid] = _monotonic() + STRANGER_RECHECK_S
        for key, followed in self._followed.items():
            if followed == uid:
                self.queue.add_after(key, STRANGER_RECHECK_S + 0.1)

    async def _meet_again(self, uid: str, key: Key) -> None:
        """See from time to time whether strangers have made room; reading is all it costs while they have not."""
        known = self._strangers.get(uid)
        if not known:
            return
        left_s = self._recheck_at[uid] - _monotonic()
        if left_s > 0:
            self.queue.add_after(key, left_s + 0.1)
            return
        self._recheck_at[uid] = _monotonic() + STRANGER_RECHECK_S
        self.queue.add_after(key, STRANGER_RECHECK_S + 0.1)
        for kind, name in list(known):
            if _REFUSED in known[kind, name]:
                del known[kind, name]  # only another attempt can tell
                continue
            try:
                existing = await self._client.get(kind, key[0], name)
            except ApiError as error:
                if error.status != 404:
                    raise
                del known[kind, name]
                continue
            if (existing["metadata"].get("labels") or {}).get(naming.LABEL_UID) == uid:
                del known[kind, name]
                self.cache.put(kind, existing)

    async def _apply(self, uid: str, manifest: dict[str, Any]) -> bool:
        kind, meta = manifest["kind"], manifest["metadata"]
        place = (uid, f"{kind}/{meta['name']}")
        existing = next(
            (o for k, o in self.cache.owned(uid) if k == kind and o["metadata"]["name"] == meta["name"]), None
        )
        if existing and self._applied.get(place) == (existing["metadata"]["resourceVersion"], manifest):
            # We applied exactly this and the server spells it differently: nothing is left to repair.
            return False
        applied = await self._client.apply(manifest)
        self._applied[place] = (applied["metadata"]["resourceVersion"], manifest)
        self.cache.put(kind, applied)
        return True

    async def _delete(self, uid: str, kind: str, name: str, object_uid: str) -> bool:
        found = next(((k, o) for k, o in self.cache.owned(uid) if o["metadata"]["uid"] == object_uid), None)
        if found is None:
            return False
        namespace = found[1]["metadata"]["namespace"]
        try:
            answer = await self._client.delete(kind, namespace, name, object_uid)
        except ApiError as error:
            if error.status == 409 and await self._exists(kind, namespace, name, object_uid):
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

    async def _post(self, raw: dict[str, Any], event: Event) -> None:
        """Post an Event; losing one is no reason to stop."""
        meta = raw["metadata"]
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


def _monotonic() -> float:
    return asyncio.get_running_loop().time()
