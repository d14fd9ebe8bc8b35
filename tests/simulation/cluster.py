"""A small model of what the operator stands on: API server, StatefulSet controller, scheduler, kubelets, relays.

What it assumes of Kubernetes was seen on a real one: uids and resourceVersions, 409 on a stale status write or a wrong
uid, 403 by quota, pods of a deleted StatefulSet that end by the garbage collector, workers that restart in place, pods
of a lost node that are never confirmed gone, evictions that honour budgets. A container's end is reported by its node's
kubelet up to about a second later, each node with its own lag, so what is reported first need not have been first.

Objects are never changed in place: a change makes a new dictionary, so that a watcher may keep what it got.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dp_handshake.messages import Local, PodRestarted, RankLost, Snapshot, Stages
from dp_handshake.ranks import format_ranks
from dp_operator import naming
from dp_operator.api import KIND
from dp_operator.client import ApiError
from dp_operator.observe import timestamp
from tests.simulation.virtual import START

Object = dict[str, Any]
NAMESPACE = "ns"
GRACE_S = 30  # of pods in this model
NODE_GRACE_S = 3.0  # from the last heartbeat to Ready=Unknown
TAINT_EVICTION_S = 30.0
# Images that misbehave, by the beginning of their tag.
BROKEN, HANGING, UNPULLABLE, INVALID = "broken", "hanging", "unpullable", "invalid"
# An image whose tag says nothing, with a vLLM that has no Dedicated heads.
OLD, OLD_VERSION = "old", "0.13.0"


class BrokenError(Exception):
    """An invariant does not hold."""


@dataclass
class Node:
    name: str
    capacity: int
    lost: bool = False
    unschedulable: bool = False
    back_at: float = 0.0
    report_lag_s: float = 0.0  # from a container's end until its kubelet has reported it
    deferred: list[Callable[[], None]] = field(default_factory=list)  # what its kubelet does when it is back


class End(NamedTuple):
    """What truly became of an engine, whenever it was reported and in whatever order."""

    at: float
    pod: str
    exit_code: int
    reason: str


@dataclass
class Relay:
    """The relay of one head pod and the start of its group."""

    head_uid: str
    incarnation: str
    plan: dict[str, Any]
    ip: str
    arrived: dict[str, str] = field(default_factory=dict)  # pod -> launch
    told: set[str] = field(default_factory=set)  # pods whose launcher found an engine that is too old
    connected: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    released_at: float | None = None
    ready_at: float | None = None
    lost: list[RankLost] = field(default_factory=list)
    restarted: list[PodRestarted] = field(default_factory=list)
    silent: bool = False

    @property
    def head_ranks(self) -> int:
        return self.plan["sizeLocal"] if self.plan["headPlacement"] == "Colocated" else 0

    @functools.cached_property
    def pods(self) -> dict[str, list[int]]:
        """Every pod of the group -> its ranks."""
        local = self.plan["sizeLocal"]
        firsts = {
            f"{ws['name']}-{n}": ws["firstRank"] + ws["rankStride"] * n
            for ws in self.plan["workers"]
            for n in range(ws.get("ordinalStart", 0), ws.get("ordinalStart", 0) + ws["replicas"])
        }
        return {
            self.plan["headPod"]: list(range(self.head_ranks)),
            **{p: list(range(r, r + local)) for p, r in firsts.items()},
        }

    def ranks(self, pods: set[str]) -> str:
        return format_ranks([rank for pod, ranks in self.pods.items() if pod in pods for rank in ranks])

    def snapshot(self, now: float) -> Snapshot:
        head = self.plan["headPod"]
        local = self.head_ranks
        return Snapshot(
            incarnation=self.incarnation,
            time=now,
            size=self.plan["size"],
            expected_pods=len(self.pods),
            arrived_pods=len(self.arrived),
            missing_pods=[p for p in self.pods if p not in self.arrived],
            released_at=self.released_at,
            listening_at=self.released_at,
            ready_at=self.ready_at,
            api_ready=self.ready_at is not None,
            stages=Stages(
                arrived=self.ranks(set(self.arrived)),
                connected=self.ranks(self.connected),
                loaded=self.ranks(self.ready),
                ready=self.ranks(self.ready),
            ),
            local=Local(
                expected=local,
                connected=local * (head in self.connected),
                loaded=local * (head in self.ready),
                ready=local * (head in self.ready),
            ),
            engine_versions={OLD_VERSION: len(self.told)} if self.told else {},
            lost=[*self.lost],
            restarted=[*self.restarted],
        )


class Cluster:
    """The cluster's state and everything in it that acts by itself."""

    def __init__(
        self, chance: random.Random, nodes: dict[str, int], report_lags_s: dict[str, float] | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.chance = chance
        self.objects: dict[tuple[str, str], Object] = {}
        self.by_uid: dict[str, tuple[str, str]] = {}
        self.watchers: list[Callable[[str, str, Object], None]] = []
        self.relay_watchers: list[Callable[[Relay], None]] = []
        lags_s = report_lags_s or {}
        self.nodes = {
            name: Node(name, capacity, report_lag_s=lags_s.get(name, 0.0)) for name, capacity in nodes.items()
        }
        self.ends: dict[str, list[End]] = {}  # incarnation -> engines that ended by themselves, in their true order
        # Incarnations that truly lost something that they cannot serve without, by whomever: only these may fail.
        self.injured: set[str] = set()
        self._lost_kinds: dict[str, set[str]] = {}  # incarnation -> kinds of objects that it can lose one of
        self._ended: set[str] = set()  # uids of pods whose engine has ended, reported or not
        self.placed: dict[str, set[str]] = {}  # incarnation -> nodes that its pods came to
        self.relays: dict[str, Relay] = {}  # head pod uid ->
        self.numbers = itertools.count(1)
        self.changes = 0  # of objects, by whomever
        self.addresses = itertools.count(1)
        self.quota_pods: int | None = None
        self.refusing: set[str] = set()  # kinds of which a quota takes no more
        self.terminating = False  # the namespace
        self.squatters: set[str] = set()  # kinds: somebody makes the next one of them first, under its name
        self.strangers: list[Object] = []  # what they made, as it must stay
        self.images_mended = False  # images that could not be pulled can be now
        self.slow_next_group = False
        self.preparation_s = 0.0  # of init containers, for pods whose turn comes now
        self.trace: list[str] = []
        self.charged_faults = 0
        for name in nodes:
            self._store("Node", {"kind": "Node", "metadata": {"name": name, "namespace": "", "labels": {}}}, "ADDED")
            self._node_changed(self.nodes[name])

    # --- store -------------------------------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return START + self.loop.time()

    def after(self, low: float, high: float, action: Callable[..., None], *args: Any) -> None:
        self.loop.call_later(low + (high - low) * self.chance.random(), action, *args)

    def note(self, words: str) -> None:
        self.trace.append(f"{self.loop.time():8.2f} {words}")

    def all(self, kind: str) -> list[Object]:
        return [obj for (k, _), obj in self.objects.items() if k == kind]

    def found(self, uid: str) -> Object | None:
        place = self.by_uid.get(uid)
        return self.objects.get(place) if place else None

    def _store(self, kind: str, obj: Object, event: str) -> Object:
        number = next(self.numbers)
        self.changes += 1
        meta = obj["metadata"] | {"resourceVersion": str(number)}
        if event == "ADDED":
            meta |= {"uid": f"{kind}-{number}", "creationTimestamp": timestamp(self.now)}
        obj = obj | {"metadata": meta}
        place = (kind, meta["name"])
        self.objects[place] = obj
        self.by_uid[meta["uid"]] = place
        self._tell(kind, event, obj)
        return obj

    def _change(self, obj: Object, **parts: Any) -> Object:
        return self._store(obj["kind"], obj | parts, "MODIFIED")

    def _tell(self, kind: str, event: str, obj: Object) -> None:
        for watcher in self.watchers:
            watcher(kind, event, obj)

    def _injure(self, obj: Object) -> None:
        self.injured.add(obj["metadata"]["labels"].get(naming.LABEL_INCARNATION, ""))

    def _lose(self, obj: Object) -> None:
        """Note what an object's end means for its group."""
        kind, incarnation = obj["kind"], (obj["metadata"].get("labels") or {}).get(naming.LABEL_INCARNATION)
        if not incarnation:
            return
        if kind in ("Pod", "StatefulSet"):
            self.injured.add(incarnation)
        elif kind in ("ConfigMap", "Service"):
            # Either can be made again from the other; and what does not run yet waits for its ConfigMap.
            lost = self._lost_kinds.setdefault(incarnation, set())
            lost.add(kind)
            cr = self.objects.get((KIND, "web"))
            groups = (cr or {}).get("status", {}).get("groups", [])
            serving = any(g["incarnation"] == incarnation and g.get("state") == "Serving" for g in groups)
            if len(lost) == 2 or (kind == "ConfigMap" and not serving):
                self.injured.add(incarnation)

    def _drop(self, obj: Object) -> None:
        kind, meta = obj["kind"], obj["metadata"]
        self._lose(obj)
        self.changes += 1
        del self.objects[kind, meta["name"]]
        del self.by_uid[meta["uid"]]
        self._tell(kind, "DELETED", obj | {"metadata": meta | {"resourceVersion": str(next(self.numbers))}})
        self.after(0.02, 0.5, self._collect, meta["uid"])

    def _collect(self, uid: str) -> None:
        """Garbage collection of what an object owned, and the StatefulSet controller's answer to a vanished pod."""
        for obj in list(self.objects.values()):
            owners = obj["metadata"].get("ownerReferences") or []
            if owners and all(owner["uid"] not in self.by_uid for owner in owners):
                self.delete(obj["kind"], obj["metadata"]["name"], obj["metadata"]["uid"])

    def forget_namespace(self, then: Callable[[], None]) -> None:
        """Somebody deletes the namespace: everything goes, in any order, and nothing new is taken from now on."""
        self.terminating = True

        def sweep(kind: str, uid: str) -> None:
            obj = self.found(uid)
            self.strangers = [stranger for stranger in self.strangers if stranger is not obj]
            if obj and kind == "Pod":
                self.delete(kind, obj["metadata"]["name"], uid)
            elif obj:
                self._drop(obj)

        def look() -> None:
            if any(kind != "Node" for kind, _ in self.objects):
                self.loop.call_later(2, look)
            else:
                self.note("the namespace is gone")
                then()

        late_s = self.chance.choice((3.0, 60.0))  # until the custom resource's turn comes, at most
        for kind, name in self.objects:
            if kind != "Node":
                uid = self.objects[kind, name]["metadata"]["uid"]
                self.after(0.5, late_s if kind == KIND else 5.0, sweep, kind, uid)
        self.loop.call_later(2, look)

    def _squat(self, manifest: Object) -> None:
        """Somebody was faster and made an object of this name."""
        self.squatters -= {manifest["kind"]}
        meta = {"name": manifest["metadata"]["name"], "namespace": NAMESPACE, "labels": {}}
        spec = manifest.get("spec", {}) | {"selector": {"app": "theirs"}}
        if manifest["kind"] == "Service":
            spec["clusterIP"] = f"198.19.9.{next(self.addresses) % 250}"
        elif manifest["kind"] == "PodDisruptionBudget":
            spec["selector"] = {"matchLabels": {"app": "theirs"}}
        stranger = {"kind": manifest["kind"], "metadata": meta, "spec": spec}
        self.strangers.append(self._store(manifest["kind"], stranger, "ADDED"))
        self.note(f"a stranger has {manifest['kind']} {meta['name']}")

    # --- what the API server offers --------------------------------------------------------------------------------
    def create(self, manifest: Object) -> Object:
        kind, meta = manifest["kind"], manifest["metadata"]
        if kind in self.squatters and (kind, meta["name"]) not in self.objects and not self.terminating:
            self._squat(manifest)
        self.admit(manifest)
        if kind == "Service":
            manifest = manifest | {"spec": manifest["spec"] | {"clusterIP": self._address(manifest)}}
        obj = self._store(kind, manifest, "ADDED")
        if any(owner["uid"] not in self.by_uid for owner in manifest["metadata"].get("ownerReferences") or []):
            self.after(0.02, 0.5, self._collect, "")  # its owner went a moment ago
        if kind == "Pod":
            self.after(0.05, 0.5, self._schedule, obj["metadata"]["uid"])
        elif kind == "StatefulSet":
            self.after(0.05, 0.5, self._fill_set, obj["metadata"]["uid"])
        return obj

    def take_event(self) -> Object:
        self._in_namespace("event")
        return {}

    def _in_namespace(self, what: str) -> None:
        if self.terminating:
            words = f"unable to create new content in namespace {NAMESPACE} because it is being terminated"
            raise ApiError(403, "Forbidden", f"{what} is forbidden: {words}")

    def admit(self, manifest: Object) -> None:
        """Refuse what cannot be made now. That is all that a dry run does."""
        kind, meta = manifest["kind"], manifest["metadata"]
        self._in_namespace(f"{kind} {meta['name']}")
        if (kind, meta["name"]) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {meta['name']} already exists")
        if kind == "Pod" and self.quota_pods is not None and len(self.all("Pod")) >= self.quota_pods:
            raise ApiError(403, "Forbidden", "exceeded quota: pods")
        if kind in self.refusing:
            raise ApiError(403, "Forbidden", f"exceeded quota: count/{kind.lower()}s")
        if kind not in ("Pod", "StatefulSet"):
            return
        pod = manifest["spec"] if manifest["kind"] == "Pod" else manifest["spec"]["template"]["spec"]
        image = pod["containers"][0]["image"]
        if image.rpartition(":")[2].startswith(INVALID):
            raise ApiError(422, "Invalid", f"{manifest['kind']}: spec.containers[0].image: Invalid value")

    def _address(self, service: Object) -> str:
        """Addresses are reused at once, as a small service range would."""
        used = {obj["spec"]["clusterIP"] for obj in self.all("Service")}
        asked: str | None = service["spec"].get("clusterIP")
        if asked:
            if asked in used:
                raise ApiError(422, "Invalid", "spec.clusterIPs: provided IP is already allocated")
            return asked
        return next(ip for ip in (f"198.19.0.{n}" for n in itertools.count(1)) if ip not in used)

    def get(self, kind: str, name: str) -> Object:
        if (kind, name) not in self.objects:
            raise ApiError(404, "NotFound", f"{kind} {name}")
        return self.objects[kind, name]

    def apply(self, manifest: Object) -> Object:
        kind, meta = manifest["kind"], manifest["metadata"]
        old = self.objects.get((kind, meta["name"]))
        if old is None or old["metadata"]["uid"] != meta["uid"]:
            raise ApiError(409, "Conflict", "uid mismatch")
        merged = _merged(old, manifest)
        return old if merged == old else self._store(kind, merged, "MODIFIED")

    def put_status(self, obj: Object) -> Object:
        old = self.objects.get((KIND, obj["metadata"]["name"]))
        if old is None:
            raise ApiError(404, "NotFound", "gone")
        if old["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self._change(old, status=obj["status"])

    def delete(self, kind: str, name: str, uid: str, *, grace_s: int | None = None) -> Object:
        obj = self.objects.get((kind, name))
        if obj is None:
            raise ApiError(404, "NotFound", f"{kind} {name}")
        if obj["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "uid precondition")
        if kind != "Pod" or not obj["spec"].get("nodeName"):
            self._drop(obj)
            if kind == "Pod":
                self._refill(obj)
            return {"kind": "Status"}
        if obj["metadata"].get("deletionTimestamp"):
            return obj
        self._injure(obj)
        meta = obj["metadata"] | {
            "deletionTimestamp": timestamp(self.now + (grace_s or GRACE_S)),
            "deletionGracePeriodSeconds": grace_s or GRACE_S,
        }
        obj = self._change(obj, metadata=meta)
        self.after(0.5, 6.0, self._on_node, obj, self._end_deletion)
        return obj

    def evict(self, name: str) -> None:
        """The eviction subresource. Raises ApiError 429 where a budget forbids it."""
        pod = self.get("Pod", name)
        labels = pod["metadata"]["labels"]
        budgets = [b for b in self.all("PodDisruptionBudget") if _selects(b["spec"]["selector"]["matchLabels"], labels)]
        if len(budgets) > 1:
            raise ApiError(500, "InternalError", "more than one PodDisruptionBudget")
        for budget in budgets:
            selector = budget["spec"]["selector"]["matchLabels"]
            healthy = [p for p in self.all("Pod") if _selects(selector, p["metadata"]["labels"]) and is_ready(p)]
            always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
            if is_ready(pod):
                allowed = len(healthy) - 1 >= budget["spec"]["minAvailable"]
            else:
                allowed = always or len(healthy) >= budget["spec"]["minAvailable"]
            if not allowed:
                raise ApiError(429, "TooManyRequests", "would violate the pod's disruption budget")
        if not pod["metadata"].get("deletionTimestamp"):
            self.note(f"evicted {name}")
            pod = self._conditions(
                pod, DisruptionTarget={"status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API"}
            )
            self.delete("Pod", name, pod["metadata"]["uid"])

    def relabel(self, obj: Object, labels: dict[str, str]) -> None:
        """Somebody edits labels. To a watch by label an object that has lost it is gone."""
        changed = self._change(obj, metadata=obj["metadata"] | {"labels": labels})
        if naming.LABEL_MANAGED_BY in obj["metadata"]["labels"] and naming.LABEL_MANAGED_BY not in labels:
            version = {"resourceVersion": changed["metadata"]["resourceVersion"]}
            self._tell(obj["kind"], "DELETED", obj | {"metadata": obj["metadata"] | version})

    # --- StatefulSets ------------------------------------------------------------------------------------------------
    def _fill_set(self, uid: str) -> None:
        owner = self.found(uid)
        if owner is None:
            return
        start = owner["spec"]["ordinals"]["start"]
        name = owner["metadata"]["name"]
        for ordinal in range(start, start + owner["spec"]["replicas"]):
            there = self.objects.get(("Pod", f"{name}-{ordinal}"))
            if there and there["metadata"].get("ownerReferences"):
                continue
            pod = {
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-{ordinal}",
                    "namespace": NAMESPACE,
                    "labels": owner["spec"]["template"]["metadata"]["labels"],
                    "ownerReferences": [{"kind": "StatefulSet", "uid": uid, "name": name, "controller": True}],
                },
                "spec": owner["spec"]["template"]["spec"],
            }
            try:
                self.create(pod)
            except ApiError:
                self.after(2, 4, self._fill_set, uid)
                return

    def _refill(self, pod: Object) -> None:
        for owner in pod["metadata"].get("ownerReferences") or []:
            if owner["kind"] == "StatefulSet":
                self.after(0.02, 0.4, self._fill_set, owner["uid"])

    # --- scheduler and kubelets --------------------------------------------------------------------------------------
    def _on_node(self, pod: Object, action: Callable[[str], None]) -> None:
        """Let the pod's kubelet do something now, or when its node is back."""
        uid = pod["metadata"]["uid"]
        current = self.found(uid)
        if current is None:
            return
        node = self.nodes[current["spec"]["nodeName"]]
        if node.lost:
            node.deferred.append(lambda: self._on_node(current, action))
        else:
            action(uid)

    def _schedule(self, uid: str) -> None:
        pod = self.found(uid)
        if pod is None or pod["spec"].get("nodeName"):
            return
        used: dict[str, int] = {}
        for other in self.all("Pod"):
            place = other["spec"].get("nodeName")
            if place:
                used[place] = used.get(place, 0) + 1
        free = [
            node.name
            for node in self.nodes.values()
            if not node.unschedulable and not node.lost and used.get(node.name, 0) < node.capacity
        ]
        if not free:
            if not _condition(pod, "PodScheduled"):
                self._conditions(
                    pod,
                    PodScheduled={"status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"},
                )
            self.after(1, 3, self._schedule, uid)
            return
        node_name = self.chance.choice(free)
        self.placed.setdefault(pod["metadata"]["labels"][naming.LABEL_INCARNATION], set()).add(node_name)
        pod = self._change(pod, spec=pod["spec"] | {"nodeName": node_name})
        self.after(0.1, 0.5, self._on_node, pod, self._pull)

    def _pull(self, uid: str) -> None:
        pod = self.found(uid)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            return
        image = pod["spec"]["containers"][0]["image"]
        config = next(v["configMap"]["name"] for v in pod["spec"]["volumes"] if "configMap" in v)
        if image.rpartition(":")[2].startswith(UNPULLABLE) and not self.images_mended:
            waiting = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
            if (pod.get("status") or {}).get("containerStatuses") != [waiting]:
                self._change(pod, status=(pod.get("status") or {}) | {"containerStatuses": [waiting]})
            self.after(4, 8, self._on_node, pod, self._pull)
        elif ("ConfigMap", config) not in self.objects:
            self.after(1, 2, self._on_node, pod, self._pull)
        elif naming.LABEL_UID not in self.objects["ConfigMap", config]["metadata"]["labels"]:
            raise BrokenError(f"pod {pod['metadata']['name']} mounts what a stranger has made")
        else:
            if self.preparation_s:
                runs = {"running": {"startedAt": timestamp(self.now)}}
                waits = {"waiting": {"reason": "PodInitializing"}}
                names = [c["name"] for c in pod["spec"].get("initContainers", [])] + ["fetch"]
                status = (pod.get("status") or {}) | {
                    "initContainerStatuses": [{"name": name, "state": runs} for name in names],
                    "containerStatuses": [{"name": "engine", "state": waits}],
                }
                pod = self._change(pod, status=status)
            self.after(0.3 + self.preparation_s, 3.0 + self.preparation_s, self._on_node, pod, self._run)

    def _run(self, uid: str) -> None:
        pod = self.found(uid)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            return
        config = next(v["configMap"]["name"] for v in pod["spec"]["volumes"] if "configMap" in v)
        if ("ConfigMap", config) not in self.objects:
            self.after(1, 2, self._on_node, pod, self._pull)
            return
        plan = json.loads(self.objects["ConfigMap", config]["data"]["plan.json"])
        labels = pod["metadata"]["labels"]
        if plan["incarnation"] != labels[naming.LABEL_INCARNATION]:
            raise BrokenError(f"pod {pod['metadata']['name']} reads the launch plan of {plan['incarnation']}")
        number = next(self.addresses)
        status = {
            **(pod.get("status") or {}),
            "phase": "Running",
            "podIP": f"198.18.{number // 250}.{number % 250}",
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": timestamp(self.now)}}}],
        }
        if labels[naming.LABEL_ROLE] == naming.HEAD:
            running = {"running": {"startedAt": timestamp(self.now)}}
            status["initContainerStatuses"] = [{"name": "relay", "state": running}]
            relay = Relay(head_uid=uid, incarnation=plan["incarnation"], plan=plan, ip=status["podIP"])
            self.relays[uid] = relay
        pod = self._change(pod, status=status)
        if uid in self.relays:
            self._relay_changed(self.relays[uid])
        self.after(0.05, 1.0, self._on_node, pod, lambda u: self._check_in(u, plan, f"{u}/0"))

    def _check_in(self, uid: str, plan: dict[str, Any], launch: str) -> None:
        pod = self.found(uid)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            return
        # The head's relay is beside it; the others go by the address of the Service.
        relay = self.relays.get(uid) or self._relay_at(plan["monitorHost"])
        if relay is None:
            self.after(1, 2, self._on_node, pod, lambda u: self._check_in(u, plan, launch))
            return
        name = pod["metadata"]["name"]
        if relay.incarnation != pod["metadata"]["labels"][naming.LABEL_INCARNATION]:
            self._engine_ends(uid, 1, "Error")  # a monitor refuses whoever is not in its plan, and the launcher ends
            return
        image = pod["spec"]["containers"][0]["image"]
        if image.rpartition(":")[2].startswith(OLD) and plan.get("needsVersion"):
            if self.chance.random() < 0.7:  # it tells the monitor for a while, whoever listens
                relay.told.add(name)
                self._relay_changed(relay)
            words = f"not started: the image has vLLM {OLD_VERSION}, and headPlacement Dedicated needs 0.14 or newer"
            self._engine_ends(uid, 1, "Error", cascade=False, message=words)
            return
        if relay.released_at is not None:
            if relay.arrived.get(name) != launch:
                message = f"pod {name} checked in again after the release"
                relay.restarted.append(PodRestarted(time=self.now, pod=name, message=message))
                self._relay_changed(relay)
            return
        relay.arrived[name] = launch
        self._relay_changed(relay)
        if set(relay.arrived) == set(relay.pods):
            self._release(relay)

    def _relay_at(self, address: str) -> Relay | None:
        """Whom a ClusterIP leads to."""
        service = next((s for s in self.all("Service") if s["spec"]["clusterIP"] == address), None)
        if service is None:
            return None
        for relay in self.relays.values():
            head = self.found(relay.head_uid)
            if head and not self._node_lost(head) and _selects(service["spec"]["selector"], head["metadata"]["labels"]):
                return relay
        return None

    def _release(self, relay: Relay) -> None:
        relay.released_at = self.now
        self._relay_changed(relay)
        hangs, self.slow_next_group = self.slow_next_group, False
        for name in relay.pods:
            pod = self.objects["Pod", name]
            if pod["metadata"]["labels"][naming.LABEL_INCARNATION] != relay.incarnation:
                raise BrokenError(f"pod {name} takes part in the handshake of {relay.incarnation}")
            tag = pod["spec"]["containers"][0]["image"].rpartition(":")[2]
            uid = pod["metadata"]["uid"]
            if tag.startswith(BROKEN):
                self.after(1, 4, self._engine_ends, uid, 1, "Error")
            elif not hangs and not tag.startswith(HANGING):
                self.after(0.5, 6.0, self._on_node, pod, lambda u, r=relay, n=name: self._rank_ready(r, n, u))

    def _rank_ready(self, relay: Relay, name: str, uid: str) -> None:
        pod = self.found(uid)
        if pod is None or not self.runs(pod) or self.found(relay.head_uid) is None:
            return
        relay.connected.add(name)
        relay.ready.add(name)
        if relay.ready == set(relay.pods):
            relay.ready_at = self.now
            for member in relay.pods:
                other = self.objects.get(("Pod", member))
                if other and not self._node_lost(other):
                    self._set_ready(other, ready=True)
        self._relay_changed(relay)

    def _set_ready(self, pod: Object, *, ready: bool) -> None:
        if is_ready(pod) != ready:
            self._conditions(pod, Ready={"status": "True" if ready else "False"})

    def _conditions(self, pod: Object, **conditions: dict[str, str]) -> Object:
        status = pod.get("status") or {}
        kept = [c for c in status.get("conditions") or [] if c["type"] not in conditions]
        at = timestamp(self.now)
        new = [{"type": kind, "lastTransitionTime": at, **words} for kind, words in conditions.items()]
        return self._change(pod, status={"phase": "Pending", **status, "conditions": kept + new})

    def runs(self, pod: Object) -> bool:
        """Whether a pod's engine truly runs, in its first life."""
        return is_running(pod) and pod["metadata"]["uid"] not in self._ended

    def _engine_ends(self, uid: str, code: int, reason: str, *, cascade: bool = True, message: str = "x") -> None:
        """An engine ends now. Its connections close at once; its kubelet reports the end a little later."""
        pod = self.found(uid)
        if pod is None or not self.runs(pod) or self._node_lost(pod):
            return
        labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
        self.note(f"engine of {name} ends with {code} {reason}")
        self.charged_faults += 1
        self._ended.add(uid)
        self._injure(pod)
        self.ends.setdefault(labels[naming.LABEL_INCARNATION], []).append(End(self.now, name, code, reason))
        ended = {"exitCode": code, "reason": reason, "finishedAt": timestamp(self.now), "message": message}
        lag_s = self.nodes[pod["spec"]["nodeName"]].report_lag_s
        if lag_s:
            self.loop.call_later(lag_s, self._on_node, pod, lambda u: self._report_end(u, ended))
        else:
            self._report_end(uid, ended)
        relay = next((r for r in self.relays.values() if name in r.pods), None)
        if relay is None:
            return
        if relay.released_at is not None and relay.ready_at is None and relay.pods[name]:
            relay.lost.append(RankLost(time=self.now, rank=relay.pods[name][0], pod=name, message="connection closed"))
            self._relay_changed(relay)
        if labels[naming.LABEL_ROLE] != naming.HEAD:
            self.after(1 + lag_s, 2 + lag_s, self._on_node, pod, lambda u: self._check_in(u, relay.plan, f"{u}/again"))
        if cascade and self.chance.random() < 0.4:
            soonest_s = 0.1 if lag_s else 1.0
            for member in relay.pods:
                other = self.objects.get(("Pod", member))
                if other and member != name:
                    self.loop.call_later(
                        soonest_s + 3 * self.chance.random(),
                        lambda u=other["metadata"]["uid"]: self._engine_ends(u, 1, "Error", cascade=False),
                    )

    def _report_end(self, uid: str, ended: dict[str, Any]) -> None:
        pod = self.found(uid)
        if pod is None:
            return
        state: dict[str, Any] = {"state": {"terminated": ended}}
        if pod["metadata"]["labels"][naming.LABEL_ROLE] != naming.HEAD and not pod["metadata"].get("deletionTimestamp"):
            restarted = {"running": {"startedAt": timestamp(self.now)}}
            state = {"restartCount": 1, "state": restarted, "lastState": state["state"]}
        pod = self._change(pod, status=pod["status"] | {"containerStatuses": [{"name": "engine", **state}]})
        self._set_ready(pod, ready=False)

    def _end_deletion(self, uid: str) -> None:
        pod = self.found(uid)
        if pod:
            if self.chance.random() < 0.3 and self.runs(pod):
                # The exit code is reported before the object goes.
                ended = {"exitCode": 143, "reason": "Error", "finishedAt": timestamp(self.now)}
                engine = {"name": "engine", "state": {"terminated": ended}}
                pod = self._change(pod, status=pod["status"] | {"containerStatuses": [engine]})
                self.after(0.1, 1.0, self._on_node, pod, self._gone)
            else:
                self._gone(uid)

    def _gone(self, uid: str) -> None:
        pod = self.found(uid)
        if pod:
            self._drop(pod)
            self._refill(pod)
            self._ended.discard(uid)
            self.relays.pop(uid, None)

    # --- nodes ---------------------------------------------------------------------------------------------------------
    def _node_lost(self, pod: Object) -> bool:
        name = pod["spec"].get("nodeName")
        return bool(name) and self.nodes[name].lost

    def out_of_reach(self, pod: Object) -> bool:
        """Whether a pod's node is lost, or was until so short a time ago that the operator may not know better."""
        name = pod["spec"].get("nodeName")
        return self._node_lost(pod) or (bool(name) and self.now - self.nodes[name].back_at < 10)

    def _node_changed(self, node: Node) -> None:
        obj = self.objects["Node", node.name]
        unknown = node.lost
        self._change(
            obj,
            spec={"unschedulable": node.unschedulable},
            status={"conditions": [{"type": "Ready", "status": "Unknown" if unknown else "True"}]},
        )

    def lose(self, node: Node) -> None:
        """The node is cut off; what runs on it goes on, unseen."""
        node.lost = True
        for pod in self.all("Pod"):
            if pod["spec"].get("nodeName") == node.name:
                self._injure(pod)
        self.loop.call_later(NODE_GRACE_S, self._notice_loss, node)
        self.loop.call_later(NODE_GRACE_S + TAINT_EVICTION_S, self._evict_by_taint, node)
        for relay in self.relays.values():
            self._relay_changed(relay)

    def _notice_loss(self, node: Node) -> None:
        if node.lost:
            self._node_changed(node)
            for pod in self.all("Pod"):
                if pod["spec"].get("nodeName") == node.name and is_ready(pod):
                    self._set_ready(pod, ready=False)

    def _evict_by_taint(self, node: Node) -> None:
        if node.lost:
            for pod in self.all("Pod"):
                if pod["spec"].get("nodeName") == node.name and not pod["metadata"].get("deletionTimestamp"):
                    tainted = {"status": "True", "reason": "DeletionByTaintManager", "message": "taint"}
                    self._conditions(pod, DisruptionTarget=tainted)
                    self.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])

    def heal(self, node: Node) -> None:
        node.lost = False
        node.back_at = self.now
        self._node_changed(node)
        deferred, node.deferred = node.deferred, []
        for action in deferred:
            action()
        for relay in self.relays.values():
            if relay.ready_at is not None:
                for name in relay.pods:
                    pod = self.objects.get(("Pod", name))
                    if pod and self.runs(pod) and not pod["metadata"].get("deletionTimestamp"):
                        self._set_ready(pod, ready=True)
            self._relay_changed(relay)

    def cordon(self, node: Node, *, unschedulable: bool) -> None:
        node.unschedulable = unschedulable
        self._node_changed(node)

    # --- relays --------------------------------------------------------------------------------------------------------
    def _relay_changed(self, relay: Relay) -> None:
        for watcher in self.relay_watchers:
            watcher(relay)

    def reachable(self, relay: Relay) -> bool:
        head = self.found(relay.head_uid)
        return head is not None and not relay.silent and not self._node_lost(head)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _condition(pod: Object, kind: str) -> dict[str, str] | None:
    return next((c for c in (pod.get("status") or {}).get("conditions") or [] if c["type"] == kind), None)


def is_ready(pod: Object) -> bool:
    condition = _condition(pod, "Ready")
    return condition is not None and condition["status"] == "True" and not pod["metadata"].get("deletionTimestamp")


def is_running(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return bool(statuses) and "running" in statuses[0]["state"] and "lastState" not in statuses[0]
