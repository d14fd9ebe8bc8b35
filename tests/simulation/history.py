"""One history: a cluster, an operator, a user, and faults from a seed. And what must hold in every one of them.

`History.of(seed)` is a list of faults with times; `run` plays it and returns what went wrong. A history that fails is
shrunk by leaving out one fault after the other (`shrunk`), and replays exactly: everything random comes from seeds.

What the operator has to live with, and the kinds of faults (FAULTS) that bring it:

| trouble | kinds |
|---|---|
| killed at any step, away for long | `kill operator`, `operator away`; after every single write: test_kills.py |
| API server away | `api down` |
| 409, 429 with Retry-After, 500, 503, 504; an answer that is lost | `api errors`, `lost answers`, `webhook down` |
| 410: a continue token, a watch's resourceVersion that is too old | `lists expire`, `watch broken` |
| a watch that is dropped and goes on, or goes silent | `watch late`, `watch silent` |
| news that comes one by one, or in bursts to an operator that is busy | the histories' `slot_s` |
| clock steps | `clock step` |
| the resource deleted (in the background, in the foreground) and made anew while old pods end | `recreate` |
| children edited or deleted by hand | `child edited`, `child relabelled`, `child deleted`, `pod deleted` |
| a namespace that is terminating | `namespace goes` |
| a quota that refuses pods or anything else | `quota` |
| a child's name that a stranger has | `stranger` |
| engines that end, hang, crash always, are too old | `engine ends`, `hang`, `bad image`, `old image` |
| init containers that take long, or for ever | `long preparation` |
| heads that are unready, monitors that are deaf | `unready head`, `deaf monitor` |
| groups that are given up, and released | `give up`, and the histories' `max_restarts` |
| nodes that are lost or cordoned | `node lost`, `cordon` |
| drains, with each disruption policy and annotation drain-nodes | `drain`, `policy`, and the histories' `policy` |
| what users do | `new image`, `another new image`, `resize`, `scale`, `suspend`, `pause`, `restart` |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from dp_operator import api, naming, reconciler
from dp_operator.api import API_VERSION, KIND
from dp_operator.cache import WATCHED
from dp_operator.client import ApiError
from dp_operator.observe import timestamp
from tests.simulation.cluster import (
    BROKEN,
    HANGING,
    INVALID,
    NAMESPACE,
    OLD,
    UNPULLABLE,
    BrokenError,
    Cluster,
    Node,
    Object,
    is_ready,
)
from tests.simulation.process import Complaints, Process, Weather
from tests.simulation.virtual import DeadlockError, FranticError, Loop

GOOD = "vllm/vllm-openai:v0.32.0"
PATIENCE_S = 4000.0  # from the last fault to rest, at most
MOST_RELEASES = 4  # of groups that are given up: what ends them may strike once more
LOOP_S = 300  # how long a revision that never works is looked at
WRITES_PER_ATTEMPT = 25  # 15 are the most that were seen
ATTEMPTS_IN_VAIN = 60  # and one a second: to write into a namespace that is being deleted
QUIET_S = 740.0  # how long nothing may be written at rest: longer than two resyncs


class Fault(NamedTuple):
    at: float  # seconds after the start
    kind: str
    pick: int  # decides what is hit and how long


@dataclass(frozen=True)
class History:
    seed: int
    replicas: int
    size: int
    surge: int | str
    unavailable: int | str
    policy: str
    faults: tuple[Fault, ...]
    max_restarts: int | None = None
    report_lag_s: float = 0.0  # of the slowest kubelet, at most; every node has its own
    slot_s: float = 0.0  # what watches and relays tell comes in so often, all at once; 0: each by itself

    @staticmethod
    def of(seed: int) -> History:
        chance = random.Random(seed)
        replicas = chance.choice((1, 1, 1, 1, 2, 2, 3))
        surge, unavailable = chance.choice(((0, 1), (0, 1), (1, 0), (1, 1), (0, 2), ("50%", 0), (0, "34%")))
        count = chance.choice((1, 1, 1, 2, 2, 2, 3, 5))
        kinds = list(FAULTS)
        faults = sorted(
            Fault(
                at=round(chance.choice((20.0, 60.0, 120.0)) * chance.random(), 2),
                kind=chance.choice(kinds),
                pick=chance.randrange(1 << 30),
            )
            for _ in range(count)
        )
        return History(
            seed=seed,
            replicas=replicas,
            size=chance.choice((1, 1, 2, 2, 3)),
            surge=surge,
            unavailable=unavailable,
            policy=chance.choice(("Managed", "Managed", "Open", "Closed")),
            faults=tuple(faults),
            max_restarts=chance.choice((None, None, None, None, 0, 1)),
            report_lag_s=chance.choice((0.0, 0.3, 1.0, 1.2)),
            slot_s=chance.choice((0.0, 1.0, 2.0, 3.0)),
        )


class Outcome(NamedTuple):
    history: History
    wrong: str  # empty when all is well
    trace: list[str]
    reconciles: int = 0


class World:
    """A history being played."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.chance = random.Random(history.seed ^ 0x5EED)
        loads = history.size * (history.replicas + 2)
        nodes = {f"n{n}": -(-loads // 3) + 1 for n in range(4)}
        lag = random.Random(history.seed ^ 0x1A6)
        self.cluster = Cluster(self.chance, nodes, {name: history.report_lag_s * lag.random() for name in nodes})
        self.weather = Weather()
        self.process = Process(
            self.cluster, self.weather, Watchdog(self), random.Random(history.seed ^ 0xFACE), history.slot_s
        )
        self.spec: dict[str, Any] = {
            "model": {"name": "m", "architecture": "Dense"},
            "engine": {"image": GOOD},
            "dataParallel": {"size": history.size},
            "devices": {"assignment": "None"},
            "replicas": history.replicas,
            "rollout": {"maxSurge": history.surge, "maxUnavailable": history.unavailable},
            "disruption": {"policy": history.policy},
            "startup": {"timeoutSeconds": 120, "scheduleTimeoutSeconds": 60},
            "failurePolicy": {
                "backoffSeconds": 5,
                "maxBackoffSeconds": 40,
                "stableSeconds": 60,
                "unhealthySeconds": 20,
                "maxRestarts": history.max_restarts,
            },
        }
        self.annotations: dict[str, str] = {}
        self.troubles: list[str] = []  # what has gone wrong that must never go wrong
        self.last_fault_ends = 0.0
        self.generation = 0
        self.emptying_changed_at = 0.0  # which nodes are to be emptied, and who may say so
        self.draining: set[str] = set()  # nodes that a drain has to empty

    # --- the user ------------------------------------------------------------------------------------------------------
    def cr(self) -> Object | None:
        return self.cluster.objects.get((KIND, "web"))

    def make(self) -> None:
        if self.cluster.terminating:
            return  # refused
        self.generation += 1
        self.cluster._store(
            KIND,
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {
                    "name": "web",
                    "namespace": NAMESPACE,
                    "generation": self.generation,
                    "annotations": dict(self.annotations),
                    "labels": {},
                },
                "spec": self.spec,
                "status": {},
            },
            "ADDED",
        )

    def edit(self, **changes: Any) -> None:
        """The user applies another spec; a plain nested dict is merged one level deep."""
        self.emptying_changed_at = self.cluster.now
        for name, value in changes.items():
            old = self.spec.get(name)
            self.spec = self.spec | {name: {**old, **value} if isinstance(old, dict) else value}
        obj = self.cr()
        if obj is None:
            return
        self.generation += 1
        self.cluster.note(f"user edits {changes}")
        meta = obj["metadata"] | {"generation": self.generation, "annotations": dict(self.annotations)}
        self.cluster._change(obj, spec=self.spec, metadata=meta)

    def annotate(self, name: str, value: str) -> None:
        """The user sets an annotation, which is no new generation."""
        self.annotations[name] = value
        self.emptying_changed_at = self.cluster.now
        obj = self.cr()
        if obj:
            self.cluster.note(f"user sets {name} to {value!r}")
            self.cluster._change(obj, metadata=obj["metadata"] | {"annotations": dict(self.annotations)})

    def release(self) -> None:
        """What a person may do for groups that are given up."""
        what = self.chance.randrange(4)
        if self.misbehaves() or what == 0:
            self.edit(engine={"image": "vllm/vllm-openai:v0.32.10"})
        elif what == 1:
            self.edit(failurePolicy={"maxRestarts": None})
        else:
            self.annotate(naming.ANNOTATION_RESTART, str(self.chance.random()))

    def cordon(self, node: Node, *, unschedulable: bool) -> None:
        self.emptying_changed_at = self.cluster.now
        self.cluster.cordon(node, unschedulable=unschedulable)

    # --- what faults hit -----------------------------------------------------------------------------------------------
    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Undo a fault; only then is it over."""
        self.last_fault_ends = max(self.last_fault_ends, self.cluster.now + delay)
        self.cluster.loop.call_later(delay, action, *args)

    def pods(self) -> list[Object]:
        return [p for p in self.ours("Pod") if not p["metadata"].get("deletionTimestamp")]

    def ours(self, *kinds: str) -> list[Object]:
        return [o for kind in kinds for o in self.cluster.all(kind) if naming.LABEL_UID in o["metadata"]["labels"]]

    def misbehaves(self) -> bool:
        """Whether the image is one that never works."""
        return self.spec["engine"]["image"].rpartition(":")[2].startswith((BROKEN, HANGING, UNPULLABLE, INVALID, OLD))

    def given_up(self) -> bool:
        """Whether some group waits for a person."""
        obj = self.cr()
        return bool(obj) and any(map(self.is_given_up, api.decode(obj).status.groups))

    def is_given_up(self, group: api.GroupStatus) -> bool:
        most = self.spec["failurePolicy"]["maxRestarts"]
        return most is not None and group.state == "Waiting" and group.restarts > most

    # --- rest ----------------------------------------------------------------------------------------------------------
    def unrest(self) -> str:
        """Why the history has not come to its end; empty at rest."""
        obj = self.cr()
        if obj is None:
            theirs = {obj["metadata"]["uid"] for obj in self.cluster.strangers}
            objects = self.cluster.objects.items()
            left = [place for place, o in objects if place[0] != "Node" and o["metadata"]["uid"] not in theirs]
            return f"left behind: {left}" if left else ""
        status = api.decode(obj).status
        spec = self.spec
        wanted = 0 if spec.get("suspend") else spec["replicas"]
        conditions = {c.type: c for c in status.conditions}
        if not conditions:
            return "no status"
        if status.observed_generation != self.generation:
            return f"generation {self.generation} was not observed"
        if any(g.state == "Stopping" for g in status.groups):
            return "groups are being taken away"
        if conditions["Stalled"].reason == "NameTaken":
            return self._name_taken(conditions["Stalled"].message, status)
        if self.given_up() and conditions["Accepted"].status == "True":
            if any(g.state != "Serving" and not self.is_given_up(g) for g in status.groups):
                return "others are still tried"
            stalled = conditions["Stalled"]
            named = stalled.reason in ("TooManyRestarts", "RevisionRefused")
            return "" if named else f"given up, and said is {stalled.reason}"
        if self.misbehaves() and wanted:
            # Only the old one comes to rest, but every failure must have a name.
            named = any(g.last_failures for g in status.groups) or conditions["Stalled"].status == "True"
            return "" if named else "a broken revision without a named failure"
        if spec["rollout"].get("paused") and conditions["Available"].status == "True":
            return ""
        ready = conditions["Ready"]
        if ready.status != "True" and not (spec.get("suspend") and ready.reason == "Suspended"):
            return f"not Ready: {ready.reason}: {ready.message}"
        heads = [p for p in self.ours("Pod") if p["metadata"]["labels"][naming.LABEL_ROLE] == naming.HEAD]
        if len(heads) != wanted or not all(is_ready(head) for head in heads):
            return f"{len(heads)} heads for {wanted} groups"
        if self.draining:
            return f"{', '.join(self.draining)} is drained and not empty"
        for kind in ("Stalled", "DrainBlocked"):
            # A spec whose pods the API server refuses is not well, although no group is wanted now.
            refused = conditions[kind].reason == "RevisionRefused" and self.misbehaves()
            if conditions[kind].status != "False" and not refused:
                return f"all is well, and {kind} is {conditions[kind].reason}: {conditions[kind].message}"
        known = {g.incarnation for g in status.groups}
        for (kind, name), other in self.cluster.objects.items():
            label = (other["metadata"].get("labels") or {}).get(naming.LABEL_INCARNATION)
            if label and label not in known:
                return f"{kind} {name} belongs to nobody"
            if label and other["metadata"]["labels"][naming.LABEL_UID] != obj["metadata"]["uid"]:
                return f"{kind} {name} is of an earlier resource"
        if len(status.groups) != wanted:
            return f"{len(status.groups)} ledger entries for {wanted} groups"
        return ""

    def _name_taken(self, message: str, status: api.Status) -> str:
        """A stranger is named as long as it is there and has a name that is wanted, and no other would do."""
        there = [o["metadata"]["name"] for o in self.cluster.strangers if self.cluster.found(o["metadata"]["uid"])]
        for group in status.groups:
            if f"web-{group.index}-{group.incarnation}-rpc" in there and not group.created_at:
                return f"group {group.index} waits for a name although it could have another"
        wanted = ("web", *(f"web-{g.index}-{g.incarnation}" for g in status.groups))
        if any(name in message and (name == "web" or name.startswith(wanted[1:])) for name in there):
            return ""
        return f"of strangers there are {there}, of incarnations {wanted}, and what is said is: {message}"

    def strangers_go(self, kind: str) -> None:
        """They must be as they came."""
        for stranger in self.cluster.strangers:
            if stranger["kind"] == kind:
                if self.cluster.found(stranger["metadata"]["uid"]) is not stranger:
                    self.troubles.append(f"a stranger was touched: {stranger}")
                else:
                    self.cluster._drop(stranger)
        self.cluster.strangers = [o for o in self.cluster.strangers if o["kind"] != kind]


class Watchdog:
    """Looks at every write of the operator before it happens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._serving_when_decided: set[str] = set()  # incarnations
        self._served: dict[str, bool] = {}  # incarnation that goes by our own doing -> whether it was known to serve

    def _ledger(self, uid: str) -> dict[str, dict[str, Any]]:
        obj = self._world.cr()
        if obj is None or obj["metadata"]["uid"] != uid:
            return {}
        return {group["incarnation"]: group for group in obj["status"].get("groups", [])}

    def _seen_spec(self, process: Process) -> api.Spec:
        """The spec as the operator knows it."""
        raw = process.reconciler.cache.custom_resource((NAMESPACE, "web"))
        return api.decode(raw).spec

    def before_create(self, process: Process, manifest: Object) -> None:
        labels = manifest["metadata"]["labels"]
        incarnation = labels.get(naming.LABEL_INCARNATION)
        owner = manifest["metadata"]["ownerReferences"][0]["uid"]
        obj = self._world.cr()
        if obj is None or obj["metadata"]["uid"] != owner or incarnation is None:
            return  # garbage collection takes it away at once
        if incarnation not in self._ledger(owner):
            raise BrokenError(
                f"{manifest['kind']} {manifest['metadata']['name']} is made without an entry in the ledger"
            )
        if manifest["kind"] in ("Pod", "StatefulSet"):
            self._room(process, manifest)

    def _room(self, process: Process, head: Object) -> None:
        """Never more incarnations with pods than replicas and surge allow; those on a lost node aside."""
        labels = head["metadata"]["labels"]
        spec = self._seen_spec(process)
        surge = share(spec.rollout.max_surge, spec.replicas, up=True)
        alive: dict[str, int] = {}
        for pod in self._world.ours("Pod"):
            its = pod["metadata"]["labels"]
            if its[naming.LABEL_UID] != labels[naming.LABEL_UID] or self._world.cluster.out_of_reach(pod):
                continue
            if naming.LABEL_MANAGED_BY not in its:
                continue  # somebody took it out of the operator's sight; it is on its way out
            alive[its[naming.LABEL_INCARNATION]] = int(its[naming.LABEL_GROUP])
        alive[labels[naming.LABEL_INCARNATION]] = int(labels[naming.LABEL_GROUP])
        mine = sum(group == int(labels[naming.LABEL_GROUP]) for group in alive.values())
        if mine > (2 if surge else 1):
            raise BrokenError(f"{mine} incarnations of group {labels[naming.LABEL_GROUP]} at once, maxSurge is {surge}")
        wanted = [i for i in alive.values() if i < spec.replicas]
        if len(wanted) > spec.replicas + surge:
            raise BrokenError(f"{len(wanted)} incarnations for {spec.replicas} groups and maxSurge {surge}")

    def before_delete(self, process: Process, obj: Object) -> None:
        labels = obj["metadata"]["labels"]
        if naming.LABEL_UID not in labels:
            raise BrokenError(f"a stranger's {obj['kind']} {obj['metadata']['name']} is deleted")
        incarnation = labels.get(naming.LABEL_INCARNATION)
        if incarnation is None or naming.LABEL_MANAGED_BY not in labels:
            return  # what lost our label counts as lost
        entry = self._ledger(labels[naming.LABEL_UID]).get(incarnation)
        if entry and entry.get("state", "Starting") in ("Starting", "Serving") and obj["kind"] != "PodDisruptionBudget":
            raise BrokenError(f"{obj['kind']} {obj['metadata']['name']} is deleted, and the ledger says {entry}")
        if obj["kind"] == "Pod" and is_ready(obj) and self._served.get(incarnation):
            self._budget(process, obj)

    def decided(self, process: Process) -> None:
        """Note which groups the operator knew to serve when it decided: until it acts, another may have become ready."""
        raw = process.reconciler.cache.custom_resource((NAMESPACE, "web"))
        heads = self._serving(process, {naming.LABEL_UID: raw["metadata"]["uid"]}) if raw else []
        self._serving_when_decided = {head["metadata"]["labels"][naming.LABEL_INCARNATION] for head in heads}

    def before_apply(self, process: Process, manifest: Object) -> None:
        """A budget may let evictions through only where the group may go, and one group at a time."""
        labels = manifest["metadata"]["labels"]
        if manifest["kind"] != "PodDisruptionBudget" or manifest["spec"]["minAvailable"]:
            return
        mine = labels[naming.LABEL_INCARNATION]
        self._emptied(process, labels)
        if mine in self._serving_when_decided:
            budgets = self._world.ours("PodDisruptionBudget")
            exposed = {
                b["metadata"]["labels"][naming.LABEL_INCARNATION] for b in budgets if not b["spec"]["minAvailable"]
            }
            self._budget(process, manifest, exposed)

    def before_status(self, process: Process, obj: Object) -> None:
        """Note which groups that are to go are known to serve: until they really go, more can become ready."""
        if process.reconciler.cache.custom_resource((NAMESPACE, "web")) is None:
            return  # the answer will be 404
        before = self._ledger(obj["metadata"]["uid"])
        if any(f["reason"] == "EngineTooOld" and f.get("charged", True) for f in _failures(obj)):
            raise BrokenError("the attempt that shows the true version is charged")
        for group in obj["status"].get("groups", []):
            name = group["incarnation"]
            begun = group.get("state", "Starting") == "Starting" and name not in before
            most = self._seen_spec(process).failure_policy.max_restarts if begun and before else None
            if most is not None and group.get("restarts", 0) > most:
                raise BrokenError(f"group {group['index']} is tried again, maxRestarts is {most}: {group}")
            if group.get("state") == "Stopping" and before.get(name, {}).get("state", "Starting") != "Stopping":
                spec = self._seen_spec(process)
                wanted = not spec.suspend and group["index"] < spec.replicas  # a user who wants it no more ends it
                heads = self._serving(process, {naming.LABEL_UID: obj["metadata"]["uid"]})
                ours = [h for h in heads if h["metadata"]["labels"][naming.LABEL_INCARNATION] == name]
                self._served[name] = wanted and bool(ours)
                failure = next(iter(group.get("lastFailures", [])), None)
                if failure and failure.get("incarnation") == name:
                    self._failed(name, failure)

    def _failed(self, incarnation: str, failure: dict[str, Any]) -> None:
        """A group that serves may fail only if something truly happened to it; then no budget can keep it."""
        if self._served[incarnation] and incarnation not in self._world.cluster.injured:
            raise BrokenError(f"{incarnation} serves, nothing happened to it, and it is ended for {failure}")
        self._served[incarnation] = False

    def _emptied(self, process: Process, labels: dict[str, str]) -> None:
        """A group may be moved only off a node that is being emptied, and with policy Closed only where a person says so."""
        cache, cluster = process.reconciler.cache, self._world.cluster
        if cluster.now < self._world.emptying_changed_at + 10:
            return  # what the operator knew when it decided may just have changed
        named = cache.custom_resource((NAMESPACE, "web"))["metadata"]["annotations"]
        nodes = set(named.get(naming.ANNOTATION_DRAIN_NODES, "").split(","))
        if self._seen_spec(process).disruption.policy == "Managed":
            nodes |= {name for name, node in cache.nodes().items() if node.unschedulable}
        if not nodes & cluster.placed[labels[naming.LABEL_INCARNATION]]:
            raise BrokenError(
                f"the budget of {labels[naming.LABEL_INCARNATION]} is opened, and no node is to be emptied"
            )

    @staticmethod
    def _serving(process: Process, labels: dict[str, str]) -> list[Object]:
        """Ready heads, as the operator knows them."""
        return [
            pod
            for kind, pod in process.reconciler.cache.owned(labels[naming.LABEL_UID])
            if kind == "Pod" and pod["metadata"]["labels"].get(naming.LABEL_ROLE) == naming.HEAD and is_ready(pod)
        ]

    def _budget(self, process: Process, obj: Object, exposed: AbstractSet[str] = frozenset()) -> None:
        """A healthy serving group may go only if enough others serve that stay, as far as the operator can know."""
        labels = obj["metadata"]["labels"]
        spec = self._seen_spec(process)
        if spec.suspend or int(labels[naming.LABEL_GROUP]) >= spec.replicas:
            return
        others = {
            its[naming.LABEL_GROUP]
            for its in (head["metadata"]["labels"] for head in self._serving(process, labels))
            if its[naming.LABEL_INCARNATION] not in {labels[naming.LABEL_INCARNATION], *exposed}
            and int(its[naming.LABEL_GROUP]) < spec.replicas
        }
        unavailable = share(spec.rollout.max_unavailable, spec.replicas, up=False)
        surge = share(spec.rollout.max_surge, spec.replicas, up=True)
        if not unavailable and not surge:
            unavailable = 1
        if labels[naming.LABEL_GROUP] in others:
            return  # its successor serves
        if len(others) < spec.replicas - unavailable:
            raise BrokenError(
                f"{obj['kind']} {obj['metadata']['name']} goes while {len(others)} other of {spec.replicas} groups serve, "
                f"maxUnavailable is {unavailable}"
            )


def _failures(obj: Object) -> list[dict[str, Any]]:
    return [failure for group in obj["status"].get("groups", []) for failure in group.get("lastFailures", [])]


def share(value: int | str, whole: int, *, up: bool) -> int:
    """A number of groups from an int or a percentage."""
    if isinstance(value, int):
        return value
    part = int(value[:-1]) * whole
    return -(-part // 100) if up else part // 100


# --- faults ------------------------------------------------------------------------------------------------------------


def _kill(world: World, chance: random.Random) -> None:
    if chance.random() < 0.6:
        world.weather.kill_at_write = chance.randrange(1, 25)
    else:
        world.process.die(restart_after_s=chance.choice((0.5, 5.0, 60.0)))


def _away(world: World, chance: random.Random) -> None:
    """Nobody looks for a long time, such as while the operator's own node is replaced."""
    away_s = chance.choice((5.0, 150.0, 400.0))
    world.process.die(restart_after_s=away_s)
    world.later(away_s, lambda: None)


def _api_down(world: World, chance: random.Random) -> None:
    world.weather.down_until = world.cluster.now + chance.choice((1, 10, 60))


def _api_errors(world: World, chance: random.Random) -> None:
    world.weather.errors = [chance.choice((500, 429, 409, 503, 504)) for _ in range(chance.randrange(1, 12))]


def _webhook_down(world: World, chance: random.Random) -> None:
    down_s = chance.choice((2, 20, 90))
    world.weather.webhook_down_until = world.cluster.now + down_s
    world.later(down_s, world.cluster.note, "the webhook answers again")


def _lost_answers(world: World, chance: random.Random) -> None:
    world.weather.lost_answers = chance.randrange(1, 6)


def _watch_broken(world: World, chance: random.Random) -> None:
    kind = chance.choice((KIND, "Pod", "StatefulSet", "Service", "ConfigMap"))
    world.process.break_watch(kind, until=world.cluster.now + chance.choice((1, 10, 40)))


def _watch_late(world: World, chance: random.Random) -> None:
    kind = chance.choice((KIND, "Pod", "StatefulSet", "Service", "ConfigMap"))
    world.weather.late[kind] = world.cluster.now + chance.choice((5, 30, 70))


def _lists_expire(world: World, chance: random.Random) -> None:
    """A large cluster or a busy etcd: lists come in pages, and the next page may be asked for too late."""
    world.weather.page = chance.randrange(1, 4)
    world.weather.expiring_lists = chance.randrange(1, 5)
    world.later(100, setattr, world.weather, "page", 0)
    if chance.random() < 0.5:
        world.process.die(restart_after_s=chance.choice((0.5, 5.0)))
    else:
        _watch_broken(world, chance)


def _watch_silent(world: World, chance: random.Random) -> None:
    kind = chance.choice((KIND, "Pod", "StatefulSet", "Service", "ConfigMap"))
    world.weather.deaf[kind] = world.cluster.now + chance.choice((5, 30, 70))


def _clock_step(world: World, chance: random.Random) -> None:
    world.weather.clock_off_s = chance.choice((-600.0, -60.0, 60.0, 600.0))
    world.cluster.note(f"the operator's clock is off by {world.weather.clock_off_s:.0f} s")
    world.later(chance.choice((10, 100)), setattr, world.weather, "clock_off_s", 0.0)


def _quota(world: World, chance: random.Random) -> None:
    if chance.random() < 0.4:
        kind = chance.choice(("Service", "ConfigMap", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"))
        world.cluster.refusing.add(kind)
        world.cluster.note(f"a quota takes no {kind}")
        world.later(chance.choice((5, 40, 150)), world.cluster.refusing.discard, kind)
        children = world.ours(kind)
        if children:
            world.cluster._drop(chance.choice(children))
        return
    world.cluster.quota_pods = chance.randrange(world.history.size * world.history.replicas + 1)
    world.later(chance.choice((5, 40, 150)), setattr, world.cluster, "quota_pods", None)


def _engine_ends(world: World, chance: random.Random) -> None:
    pods = [p for p in world.pods() if world.cluster.runs(p)]
    if pods:
        pod = chance.choice(pods)
        code, reason = chance.choice(
            ((1, "Error"), (0, "Completed"), (137, "OOMKilled"), (139, "Error"), (143, "Error"))
        )
        world.cluster._engine_ends(pod["metadata"]["uid"], code, reason)


def _pod_deleted(world: World, chance: random.Random) -> None:
    pods = world.pods()
    if pods:
        pod = chance.choice(pods)
        world.cluster.note(f"somebody deletes pod {pod['metadata']['name']}")
        world.cluster.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])


def _child_deleted(world: World, chance: random.Random) -> None:
    kinds = ("StatefulSet", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy")
    children = world.ours(*kinds)
    if children:
        child = chance.choice(children)
        world.cluster.note(f"somebody deletes {child['kind']} {child['metadata']['name']}")
        world.cluster.delete(child["kind"], child["metadata"]["name"], child["metadata"]["uid"])


def _child_edited(world: World, chance: random.Random) -> None:
    children = world.ours("Service", "PodDisruptionBudget", "NetworkPolicy")
    if children:
        child = chance.choice(children)
        edited = child["spec"] | ({"minAvailable": 0} if "minAvailable" in child["spec"] else {"selector": {"a": "b"}})
        if child["metadata"]["name"].endswith("-rpc"):
            return
        world.cluster._change(child, spec=edited)


def _child_relabelled(world: World, chance: random.Random) -> None:
    """Somebody adds a label, or takes the one away that we watch by: then the object counts as lost."""
    children = world.ours("Pod", "StatefulSet", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy")
    if not children:
        return
    child = chance.choice(children)
    labels = dict(child["metadata"]["labels"])
    if chance.random() < 0.3:
        labels["team"] = "blue"
    else:
        labels.pop(naming.LABEL_MANAGED_BY, None)
        if child["kind"] in ("Pod", "StatefulSet", "ConfigMap"):
            world.cluster._injure(child)
    world.cluster.note(f"somebody edits the labels of {child['kind']} {child['metadata']['name']}")
    world.cluster.relabel(child, labels)


def _hang(world: World, chance: random.Random) -> None:
    world.cluster.slow_next_group = True
    if chance.random() < 0.5:
        _engine_ends(world, chance)


def _long_preparation(world: World, chance: random.Random) -> None:
    """What comes before the engines takes long for a while: within the limit, past it, or for ever."""
    world.cluster.preparation_s = chance.choice((30.0, 90.0, 1e6))
    world.cluster.note(f"init containers take {world.cluster.preparation_s:.0f} s")
    world.later(chance.choice((5, 40, 150)), setattr, world.cluster, "preparation_s", 0.0)
    if chance.random() < 0.7:
        _engine_ends(world, chance)


def _node_lost(world: World, chance: random.Random) -> None:
    node = chance.choice([n for n in world.cluster.nodes.values() if not n.lost] or [None])
    if node is None or sum(n.lost for n in world.cluster.nodes.values()) >= 1:
        return
    world.cluster.note(f"node {node.name} is lost")
    world.cluster.lose(node)

    def heal() -> None:
        world.cluster.note(f"node {node.name} is back")
        world.cluster.heal(node)

    world.later(chance.choice((1, 10, 60, 300)), heal)


def _cordon(world: World, chance: random.Random) -> None:
    node = chance.choice(list(world.cluster.nodes.values()))
    world.cluster.note(f"node {node.name} is cordoned")
    world.cordon(node, unschedulable=True)
    # Who drains a node keeps it cordoned.
    world.later(chance.choice((5, 100)), lambda: world.cordon(node, unschedulable=node.name in world.draining))


def _drain(world: World, chance: random.Random) -> None:
    """`kubectl drain`: cordon, then evict every pod every 5 s until all are gone. With Closed a person has to allow it."""
    node = chance.choice(list(world.cluster.nodes.values()))
    world.cluster.note(f"node {node.name} is drained")
    world.cordon(node, unschedulable=True)
    world.draining.add(node.name)
    world.later(600, lambda: None)
    gives_up_at = world.cluster.now + 550
    allowed_after_s = chance.choice((0, 20, 100, 500, None))

    def allow(value: str) -> None:
        if world.annotations.get(naming.ANNOTATION_DRAIN_NODES, "") != value:
            world.annotate(naming.ANNOTATION_DRAIN_NODES, value)

    forgets = chance.random() < 0.2

    def end(words: str) -> None:
        world.cluster.note(f"node {node.name} {words}")
        world.draining.discard(node.name)
        if not forgets:
            allow("")
        world.cordon(node, unschedulable=False)

    def turn() -> None:
        pods = [p for p in world.cluster.all("Pod") if p["spec"].get("nodeName") == node.name]
        if not pods and not node.lost:
            end("is empty")
            return
        if allowed_after_s is None and world.cluster.now > gives_up_at:
            end("is not drained after all")
            return
        for pod in pods:
            with contextlib.suppress(ApiError):
                world.cluster.evict(pod["metadata"]["name"])
        world.cluster.loop.call_later(5, turn)

    turn()
    if allowed_after_s is not None and world.spec["disruption"]["policy"] == "Closed":
        world.later(allowed_after_s, lambda: node.name in world.draining and allow(node.name))


def _policy(world: World, chance: random.Random) -> None:
    """Somebody changes whether evictions are let through, sometimes during a drain."""
    if chance.random() < 0.5:
        _drain(world, chance)
    world.later(chance.choice((0, 5, 60)), lambda: world.edit(disruption={"policy": "Managed"}))
    world.edit(disruption={"policy": chance.choice(("Open", "Closed", "Managed"))})


def _new_image(world: World, chance: random.Random) -> None:
    world.edit(engine={"image": f"vllm/vllm-openai:v0.32.{chance.randrange(1, 9)}"})


def _bad_image(world: World, chance: random.Random) -> None:
    """A rollout of something broken, corrected or rolled back some time later; sometimes never."""
    tag = f"{chance.choice((BROKEN, HANGING, UNPULLABLE, INVALID))}{chance.randrange(9)}"
    world.edit(engine={"image": f"vllm/vllm-openai:{tag}"})
    fixed = chance.choice((GOOD, "vllm/vllm-openai:v0.32.9"))
    if chance.random() < 0.7:
        world.later(chance.choice((3, 20, 100, 200)), lambda: world.edit(engine={"image": fixed}))


def _old_image(world: World, chance: random.Random) -> None:
    """An image that does not tell its vLLM version, which is too old for what is asked; corrected later, or never."""
    if world.spec["dataParallel"]["size"] < 2:
        return
    image = f"example/custom:{OLD}{chance.randrange(9)}"
    world.edit(engine={"image": image}, dataParallel={"headPlacement": "Dedicated"})
    if chance.random() < 0.7:
        world.later(chance.choice((3, 20, 100)), lambda: world.edit(engine={"image": GOOD}))


def _give_up(world: World, chance: random.Random) -> None:
    """A group that fails is tried again only so often; then a person is needed."""
    world.edit(failurePolicy={"maxRestarts": chance.randrange(2)})
    _engine_ends(world, chance)
    if chance.random() < 0.5:
        world.later(chance.choice((15, 40)), _engine_ends, world, chance)


def _resize(world: World, chance: random.Random) -> None:
    least = 2 if world.spec["dataParallel"].get("headPlacement") == "Dedicated" else 1
    world.edit(dataParallel={"size": max(least, chance.randrange(1, world.history.size + 2))})


def _scale(world: World, chance: random.Random) -> None:
    world.edit(replicas=chance.randrange(world.history.replicas + 1))


def _suspend(world: World, chance: random.Random) -> None:
    world.edit(suspend=True)
    world.later(chance.choice((2, 15, 60)), lambda: world.edit(suspend=False))


def _pause(world: World, chance: random.Random) -> None:
    world.edit(rollout={"paused": True})
    world.later(chance.choice((10, 60)), lambda: world.edit(rollout={"paused": False}))


def _restart(world: World, chance: random.Random) -> None:
    world.annotate(naming.ANNOTATION_RESTART, str(chance.random()))


def _recreate(world: World, chance: random.Random) -> None:
    obj = world.cr()
    if obj is None:
        return
    again_after_s = chance.choice((0.1, 2, 20)) if chance.random() < 0.8 else None

    def gone() -> None:
        if again_after_s is not None:
            world.later(again_after_s, lambda: world.cr() or world.make())

    if chance.random() > 0.3:
        world.cluster.note("the resource is deleted")
        world.cluster._drop(obj)
        gone()
    else:
        world.cluster.note("the resource is deleted, its objects before it")
        _delete_in_the_foreground(world, obj, gone)


def _delete_in_the_foreground(world: World, obj: Object, then: Callable[[], None]) -> None:
    """`kubectl delete --cascade=foreground`: the resource stays, marked, until everything that it owns is gone."""
    cluster, uid = world.cluster, obj["metadata"]["uid"]
    cluster._change(obj, metadata=obj["metadata"] | {"deletionTimestamp": timestamp(cluster.now)})

    def look() -> None:
        left = cluster.found(uid)
        if left is None:
            return  # with its namespace
        owned = [o for o in world.ours(*WATCHED) if any(r["uid"] == uid for r in o["metadata"]["ownerReferences"])]
        for child in owned:
            cluster.delete(child["kind"], child["metadata"]["name"], child["metadata"]["uid"])
        if owned:
            world.later(1, look)
        else:
            cluster._drop(left)
            then()

    world.later(0.5, look)


def _stranger(world: World, chance: random.Random) -> None:
    """The name of a child that is made next is somebody else's."""
    kind = chance.choice(("Service", "NetworkPolicy", "ConfigMap", "PodDisruptionBudget", "StatefulSet", "Pod"))
    world.cluster.squatters.add(kind)
    kept = next((obj for obj in world.ours(kind) if obj["metadata"]["name"] == "web"), None)
    if kept and chance.random() < 0.5:
        world.cluster._drop(kept)
    elif chance.random() < 0.5:
        _engine_ends(world, chance)
    stays = chance.random() < 0.15

    def go() -> None:
        world.cluster.squatters.discard(kind)
        if not stays:
            world.strangers_go(kind)

    world.later(chance.choice((20, 100, 300)), go)


def _namespace_goes(world: World, chance: random.Random) -> None:
    """Everything goes, the resource at some time too; meanwhile nothing new is taken. Often it is made anew after."""
    if world.cluster.terminating:
        return
    world.cluster.note("the namespace is deleted")
    began, attempts = world.cluster.now, world.process.attempts
    again = chance.random() < 0.7
    over = False

    def gone() -> None:
        nonlocal over
        over = True
        most = ATTEMPTS_IN_VAIN + (world.cluster.now - began)
        if world.process.attempts - attempts > most:
            world.troubles.append(f"{world.process.attempts - attempts} writes were tried in a namespace that goes")
        if again:
            world.cluster.terminating = False
            world.make()

    def wait() -> None:
        if not over:
            world.later(5, wait)

    world.cluster.forget_namespace(gone)
    wait()


def _deaf_monitor(world: World, chance: random.Random) -> None:
    relays = list(world.cluster.relays.values())
    if relays:
        relay = chance.choice(relays)
        relay.silent = True
        world.cluster._relay_changed(relay)

        def speak() -> None:
            relay.silent = False
            world.cluster._relay_changed(relay)

        world.later(chance.choice((5, 60)), speak)


def _unready_head(world: World, chance: random.Random) -> None:
    heads = [p for p in world.pods() if p["metadata"]["labels"][naming.LABEL_ROLE] == naming.HEAD and is_ready(p)]
    if heads:
        head = chance.choice(heads)
        world.cluster._injure(head)  # however short, because the operator may not hear of its end
        uid = head["metadata"]["uid"]
        world.cluster.note(f"head {head['metadata']['name']} is unready")
        world.cluster._set_ready(head, ready=False)

        def again() -> None:
            pod = world.cluster.found(uid)
            if pod and world.cluster.runs(pod):
                world.cluster._set_ready(pod, ready=True)

        world.later(chance.choice((3, 60)), again)


FAULTS: dict[str, Callable[[World, random.Random], None]] = {
    "kill operator": _kill,
    "operator away": _away,
    "api down": _api_down,
    "api errors": _api_errors,
    "webhook down": _webhook_down,
    "lost answers": _lost_answers,
    "watch broken": _watch_broken,
    "watch late": _watch_late,
    "watch silent": _watch_silent,
    "lists expire": _lists_expire,
    "clock step": _clock_step,
    "quota": _quota,
    "engine ends": _engine_ends,
    "pod deleted": _pod_deleted,
    "child deleted": _child_deleted,
    "child edited": _child_edited,
    "child relabelled": _child_relabelled,
    "hang": _hang,
    "long preparation": _long_preparation,
    "node lost": _node_lost,
    "cordon": _cordon,
    "drain": _drain,
    "policy": _policy,
    "new image": _new_image,
    "another new image": _new_image,
    "bad image": _bad_image,
    "old image": _old_image,
    "give up": _give_up,
    "resize": _resize,
    "scale": _scale,
    "suspend": _suspend,
    "pause": _pause,
    "restart": _restart,
    "recreate": _recreate,
    "stranger": _stranger,
    "namespace goes": _namespace_goes,
    "deaf monitor": _deaf_monitor,
    "unready head": _unready_head,
}


# --- playing -----------------------------------------------------------------------------------------------------------


async def _play(history: History, trace: list[str]) -> tuple[str, int]:
    world = World(history)
    world.cluster.trace = trace
    complaints = Complaints(world.troubles)
    reconciler.log.addHandler(complaints)
    reconciler.log.propagate = False
    reconciler.log.setLevel(logging.ERROR)

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        world.troubles.append(f"{context.get('exception')!r}")

    world.cluster.loop.set_exception_handler(on_error)
    start = world.cluster.now
    try:
        world.make()
        world.process.start()
        for fault in history.faults:
            await asyncio.sleep(max(0.0, start + fault.at - world.cluster.now))
            world.cluster.note(f"FAULT {fault.kind}")
            FAULTS[fault.kind](world, random.Random(fault.pick))
        wrong = await _rest(world)
    finally:
        reconciler.log.removeHandler(complaints)
        world.process.stop()
    return wrong, world.process.status_writes


async def _rest(world: World) -> str:
    """What is wrong with how a history ends; empty where nothing is."""
    wrong = await _calm(world)
    for _ in range(MOST_RELEASES):
        if wrong or not world.given_up():
            break
        await asyncio.sleep(60)  # the last fault may not have come to the operator yet
        wrong = await _calm(world)
        await asyncio.sleep(400)  # past stableSeconds of the others, and one resync
        wrong = wrong or await _quiet(world, 120.0)
        world.release()
        wrong = wrong or await _calm(world)
    if wrong:
        return wrong
    if world.cr() and world.misbehaves() and not world.spec["engine"]["image"].rpartition(":")[2].startswith(OLD):
        if world.weather.deaf:
            await asyncio.sleep(400)  # past one resync: it makes up for what a silent watch did not tell
        return await _loop_of_failures(world)
    await asyncio.sleep(400)  # past stableSeconds and one resync
    wrong = await _quiet(world, QUIET_S)
    if wrong:
        return wrong
    unrest = world.unrest()
    return f"rest did not last: {unrest}" if unrest else ""


async def _calm(world: World) -> str:
    """Wait for rest after the last fault."""
    calm_since: float | None = None
    while True:
        await asyncio.sleep(5)
        now = world.cluster.now
        if world.troubles:
            return world.troubles[0]
        if now < max(world.last_fault_ends, world.weather.down_until):
            continue
        calm_since = calm_since or now
        unrest = world.unrest()
        if not unrest:
            return ""
        if now > calm_since + PATIENCE_S:
            return f"no rest after {PATIENCE_S:.0f} s: {unrest}"


async def _quiet(world: World, length_s: float) -> str:
    """At rest nothing is written."""
    await asyncio.sleep(5)
    writes = world.process.writes
    world.cluster.note("quiet from here on")
    await asyncio.sleep(length_s)
    if world.troubles:
        return world.troubles[0]
    if world.process.writes != writes:
        return f"{world.process.writes - writes} writes at rest: {world.cluster.trace[-3:]}"
    return ""


async def _loop_of_failures(world: World) -> str:
    """A revision that never works is tried again for ever: so many writes an attempt, and none between two."""

    def ledger() -> set[tuple[str, str, int]]:
        """Restarts are part of it: a group that has served for stableSeconds writes once that it has none any more."""
        groups = world.cr()["status"].get("groups", [])
        return {(g["incarnation"], g.get("state", "Starting"), g.get("restarts", 0)) for g in groups}

    await asyncio.sleep(40)  # what the API server refused during a fault is asked about again every half minute
    first, seen, before = world.process.writes, set(), None
    idle = False
    for _ in range(LOOP_S // 5):
        writes, foreign = world.process.writes, world.process.foreign_changes
        now_there = ledger()
        was_idle, idle = idle, now_there == before and all(state in ("Waiting", "Serving") for _, state, _ in now_there)
        before = now_there
        seen |= {incarnation for incarnation, *_ in now_there}
        await asyncio.sleep(5)
        if world.troubles:
            return world.troubles[0]
        written = world.process.writes - writes
        if idle and was_idle and ledger() == before and foreign == world.process.foreign_changes and written:
            return f"{written} writes between two attempts: {world.cluster.trace[-3:]}"
    most = WRITES_PER_ATTEMPT * len(seen)
    written = world.process.writes - first
    return f"{written} writes for {len(seen)} attempts: {world.cluster.trace[-3:]}" if written > most else ""


def run(history: History) -> Outcome:
    """Play one history on a virtual clock."""
    loop = Loop()
    trace: list[str] = []
    count = 0
    try:
        wrong, count = loop.run_until_complete(_play(history, trace))
    except BrokenError as error:
        wrong = str(error)
    except FranticError:
        wrong = "the loop turns and turns"
    except DeadlockError:
        wrong = "nothing could happen any more"
    finally:
        loop.finish()
    return Outcome(history, wrong, trace, count)


def shrunk(history: History) -> Outcome:
    """Leave out whatever is not needed for the history to fail."""
    outcome = run(history)
    if not outcome.wrong:
        return outcome
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(history.faults)):
            less = replace(history, faults=history.faults[:index] + history.faults[index + 1 :])
            attempt = run(less)
            if attempt.wrong:
                history, outcome, smaller = less, attempt, True
                break
    return outcome


def main() -> None:
    """`python -m tests.simulation.history SEED`: play one seed, shrunk if it fails, and print what happened."""
    import sys

    outcome = shrunk(History.of(int(sys.argv[1])))
    print("\n".join(outcome.trace))
    print(msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(outcome.history))).decode())
    print(outcome.wrong or "all is well")


if __name__ == "__main__":
    main()
