"""What the cluster looks like, as far as decisions need it. Pure: cached objects in, a frozen picture out.

Objects are decoded into typed subsets: ten times cheaper than whole dictionaries, and a newer API server's unknown
fields cannot break it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from dp_handshake.messages import LaunchPlan, Snapshot, WorkerSet
from dp_operator import naming


class _Observed(Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class OwnerReference(_Observed, frozen=True):
    uid: str = ""
    kind: str = ""
    name: str = ""
    controller: bool = False


class Meta(_Observed, frozen=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []

    @property
    def controllers(self) -> list[str]:
        """Uids of the owners that control the object; Kubernetes takes one at most."""
        return [owner.uid for owner in self.owner_references if owner.controller]


class Terminated(_Observed, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class Waiting(_Observed, frozen=True):
    reason: str = ""
    message: str = ""


class Running(_Observed, frozen=True):
    started_at: str | None = None


class ContainerState(_Observed, frozen=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Observed, frozen=True):
    name: str
    ready: bool = False
    started: bool | None = None  # None: the kubelet has not said
    restart_count: int = 0
    image: str = ""
    state: ContainerState = field(default_factory=ContainerState)
    last_state: ContainerState = field(default_factory=ContainerState)


class PodCondition(_Observed, frozen=True):
    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodStatus(_Observed, frozen=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[PodCondition] = []
    container_statuses: list[ContainerStatus] = []
    init_container_statuses: list[ContainerStatus] = []


class ContainerSpec(_Observed, frozen=True):
    name: str
    restart_policy: str = ""


class PodSpec(_Observed, frozen=True):
    node_name: str = ""
    init_containers: list[ContainerSpec] = []


class Pod(_Observed, frozen=True, dict=True):
    """A pod of some group; `engine` and `relay` are its containers of that name, where the kubelet reports them."""

    metadata: Meta
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        return self.metadata.name

    @functools.cached_property
    def engine(self) -> ContainerStatus | None:
        return next((c for c in self.status.container_statuses if c.name == "engine"), None)

    @property
    def relay(self) -> ContainerStatus | None:
        return next((c for c in self.status.init_container_statuses if c.name == "relay"), None)

    def condition(self, kind: str) -> PodCondition | None:
        for condition in self.status.conditions:
            if condition.type == kind:
                return condition
        return None

    @functools.cached_property
    def ready(self) -> bool:
        condition = self.condition("Ready")
        return condition is not None and condition.status == "True"


class ServiceSpec(_Observed, frozen=True):
    cluster_ip: str = field(default="", name="clusterIP")


class ServiceObject(_Observed, frozen=True):
    metadata: Meta
    spec: ServiceSpec = field(default_factory=ServiceSpec)


class Node(_Observed, frozen=True):
    """What matters of a node. `ready` is its condition: Unknown means that its kubelet has fallen silent."""

    name: str
    ready: str = "True"
    unschedulable: bool = False
    tainted: bool = False  # NoSchedule or NoExecute, whatever tolerates it

    @property
    def lost(self) -> bool:
        return self.ready == "Unknown"


class AnyObject(_Observed, frozen=True):
    """An object of which only the metadata matters."""

    metadata: Meta


class Obstacle(NamedTuple):
    """What is in the way of an object: somebody else's of that name, or the API server's refusal of this spec's."""

    reason: Literal["NameTaken", "ObjectRefused"]
    message: str
    incarnation: str = ""  # whose object it would be; none for what lives as long as the custom resource


class IncarnationObjects(Struct, frozen=True, kw_only=True, dict=True):
    """All objects that carry one incarnation's label and are really the custom resource's own.

    Labels can be copied together with the object that carries them, so they are only how an object is found. What is
    taken for our own also has the name that we gave it and is controlled by the custom resource; a worker pod by one
    of the StatefulSets.
    """

    group: int
    id: str
    revision: str
    head: Pod | None = None
    workers: dict[str, Pod] = {}  # by pod name
    stateful_sets: dict[str, AnyObject] = {}
    rpc_service: ServiceObject | None = None
    config_map: AnyObject | None = None
    budget: AnyObject | None = None
    snapshot: Snapshot | None = None
    # The shape this incarnation was made with, from its ConfigMap: the spec may have moved on since.
    plan: LaunchPlan | None = None
    # Every pod of the launch plan -> its first rank, head first. Empty while there is no plan.
    first_ranks: dict[str, int] = {}

    @functools.cached_property
    def pods(self) -> list[Pod]:
        return ([self.head] if self.head else []) + list(self.workers.values())

    def holds(self, pod: str, rank: int) -> bool:
        """Whether a rank runs in a pod, by the launch plan."""
        first = self.first_ranks.get(pod)
        if self.plan is None or first is None:
            return False
        width = self.plan.head_ranks if pod == self.plan.head_pod else self.plan.size_local
        return first <= rank < first + width

    @property
    def serving_pods(self) -> list[Pod]:
        """Pods that have an API: the head; with Hybrid and External every pod of the group."""
        everyone = self.plan is not None and self.plan.load_balancing != "Internal"
        return self.pods if everyone else [self.head] if self.head else []

    @functools.cached_property
    def serves(self) -> bool:
        """Whether every pod that should have an API is there and ready."""
        expected = len(self.first_ranks) if self.plan and self.plan.load_balancing != "Internal" else 1
        pods = self.serving_pods
        return len(pods) >= expected and all(pod.ready and not pod.metadata.deletion_timestamp for pod in pods)

    @property
    def empty(self) -> bool:
        return not (self.pods or self.stateful_sets or self.rpc_service or self.config_map or self.budget)


class Picture(Struct, frozen=True, kw_only=True):
    """Everything observed about one custom resource."""

    incarnations: dict[str, IncarnationObjects] = {}
    kept: dict[tuple[str, str], dict[str, Any]] = {}  # (kind, name) -> whole object, for objects we apply
    obstacles: dict[tuple[str, str], Obstacle] = {}  # (kind, name) -> why that object cannot be made
    refused: dict[str, str] = {}  # incarnation -> why the API server refused one of its objects, for good
    blocked: dict[str, str] = {}  # incarnation -> why it does not take one of its objects now, such as a quota
    nodes: dict[str, Node] = {}  # empty where the operator may not read nodes

    def lost(self, pod: Pod) -> bool:
        """Whether a pod is on a node that has fallen silent."""
        node = self.nodes.get(pod.spec.node_name)
        return node is not None and node.lost


_TYPES: dict[str, Any] = {"Pod": Pod, "Service": ServiceObject}


class Placed(NamedTuple):
    """The typed subset of one object, and where its labels, name and owner put it."""

    obj: Pod | ServiceObject | AnyObject
    uid: str  # of the custom resource
    incarnation: str = ""  # empty: it lives as long as the custom resource
    group: int = 0
    revision: str = ""
    part: str = ""  # field of IncarnationObjects; empty where it is not what its labels say


def place(kind: str, raw: dict[str, Any]) -> Placed | None:
    """Decode one object and say what it is of its custom resource; None where it is nothing of it."""
    obj = msgspec.convert(raw, _TYPES.get(kind, AnyObject))
    labels, name = obj.metadata.labels, obj.metadata.name
    uid = labels.get(naming.LABEL_UID, "")
    is_worker = kind == "Pod" and labels.get(naming.LABEL_ROLE) != naming.HEAD
    # A pod without any owner was orphaned: nobody but us will ever take it away.
    orphaned = kind == "Pod" and not obj.metadata.owner_references
    if not uid or not (is_worker or orphaned or _controlled_by(uid, obj.metadata)):
        return None
    incarnation, group = labels.get(naming.LABEL_INCARNATION), labels.get(naming.LABEL_GROUP, "")
    if not incarnation:
        return None if kind == "Pod" else Placed(obj, uid)
    if not group.isdecimal():
        return None
    base = naming.base_name(labels.get(naming.LABEL_NAME, ""), int(group), incarnation)
    if is_worker:
        part = "workers"
    elif kind == "StatefulSet":
        part = "stateful_sets" if name.startswith(f"{base}-") else ""
    else:
        part, own_name = {
            "Pod": ("head", naming.head_name(base)),
            "Service": ("rpc_service", naming.rpc_service_name(base)),
            "ConfigMap": ("config_map", base),
            "PodDisruptionBudget": ("budget", base),
        }.get(kind, ("", ""))
        part = part if name == own_name else ""
    return Placed(obj, uid, incarnation, int(group), labels.get(naming.LABEL_REVISION, ""), part)


def observe(
    uid: str,
    objects: list[tuple[str, dict[str, Any]]],
    snapshots: dict[str, Snapshot],
    *,
    place: Callable[[str, dict[str, Any]], Placed | None] = place,
    obstacles: dict[tuple[str, str], Obstacle] | None = None,
    refused: dict[str, str] | None = None,
    blocked: dict[str, str] | None = None,
    nodes: dict[str, Node] | None = None,
) -> Picture:
    """Sort cached objects (kind, object) of one custom resource by incarnation.

    Objects whose uid label is not this resource's are none of ours, whatever their name: a custom resource that was
    deleted and made anew under the same name must not touch what is left of the old one. Nor are objects that somebody
    copied from ours: see IncarnationObjects.
    """
    parts: dict[str, dict[str, Any]] = {}
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, raw in objects:
        placed = place(kind, raw)
        if placed is None or placed.uid != uid:
            continue
        obj, name = placed.obj, placed.obj.metadata.name
        if not placed.incarnation:
            kept[kind, name] = raw
            continue
        part = parts.get(placed.incarnation)
        if part is None:
            part = {"group": placed.group, "revision": placed.revision, "workers": {}, "stateful_sets": {}}
            parts[placed.incarnation] = part
        if placed.part in ("workers", "stateful_sets"):
            part[placed.part][name] = obj
        elif placed.part:
            part[placed.part] = obj
        if placed.part == "config_map":
            part["plan"], part["first_ranks"] = _launch_plan(raw["data"]["plan.json"])
        elif placed.part == "budget":
            kept[kind, name] = raw
    for part in parts.values():
        part["workers"] = _own_workers(part["workers"], part["stateful_sets"], part.get("first_ranks"))
    return Picture(
        incarnations={
            key: IncarnationObjects(id=key, snapshot=snapshots.get(key), **part) for key, part in parts.items()
        },
        kept=kept,
        obstacles=obstacles or {},
        refused=refused or {},
        blocked=blocked or {},
        nodes=nodes or {},
    )


@functools.lru_cache(maxsize=64)
def _launch_plan(text: str) -> tuple[LaunchPlan | None, dict[str, int]]:
    """A launch plan, which never changes, and the first rank of each of its pods."""
    plan = msgspec.json.decode(text, type=LaunchPlan | None)
    return plan, {plan.head_pod: 0, **worker_first_ranks(plan.workers)} if plan else {}


def _controlled_by(uid: str, meta: Meta) -> bool:
    return uid in meta.controllers


def _own_workers(pods: dict[str, Pod], sets: dict[str, AnyObject], planned: dict[str, int] | None) -> dict[str, Pod]:
    """Pods of the incarnation's StatefulSets, and pods of one that is gone, which only their names tell."""
    owners = {stateful_set.metadata.uid for stateful_set in sets.values()}

    def is_own(pod: Pod) -> bool:
        meta = pod.metadata
        if not owners.isdisjoint(meta.controllers):
            return True
        stateful_set = meta.name.rpartition("-")[0]
        if meta.owner_references and stateful_set in sets:
            return False
        if planned:
            return meta.name in planned
        labels = meta.labels
        base = naming.base_name(
            labels.get(naming.LABEL_NAME, ""), int(labels[naming.LABEL_GROUP]), labels[naming.LABEL_INCARNATION]
        )
        return stateful_set in (f"{base}-w", f"{base}-{labels.get(naming.LABEL_SET, '')}")

    return {name: pod for name, pod in pods.items() if is_own(pod)}


def worker_first_ranks(sets: list[WorkerSet]) -> dict[str, int]:
    """Worker pod name -> its first rank, in rank order."""
    pods = {
        f"{ws.name}-{n}": ws.first_rank + ws.rank_stride * n
        for ws in sets
        for n in range(ws.ordinal_start, ws.ordinal_start + ws.replicas)
    }
    return dict(sorted(pods.items(), key=lambda item: item[1]))


@functools.lru_cache(maxsize=4096)
def seconds(timestamp: str | None) -> float | None:
    """Seconds since the epoch of a Kubernetes timestamp, or None where there is none."""
    if not timestamp:
        return None
    return datetime.fromisoformat(timestamp).timestamp()


def timestamp(at: float | None) -> str | None:
    """Kubernetes timestamp (UTC, whole seconds) of seconds since the epoch."""
    return None if at is None else _timestamp(int(at))


@functools.lru_cache(maxsize=256)
def _timestamp(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
