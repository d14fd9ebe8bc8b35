"""Copies of the objects we watch, kept true.

Three writers feed it: watch events, answers to our own writes (so that a reconcile sees what it just did), and a full
LIST that is compared with what is here. The last is needed: after a broken watch, kopf lists again and does not say
what vanished meanwhile. Older copies never replace newer ones, and a deleted object never comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from dp_operator import naming
from dp_operator.api import KIND
from dp_operator.observe import Node, Placed, place

Object = dict[str, Any]
Key = tuple[str, str]  # namespace and name of a custom resource

NODE = "Node"
_TOMBSTONES = 10_000
# Kinds that carry our labels. Nodes come on top where the operator sees the whole cluster.
WATCHED = ("Pod", "StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy")


class Cache:
    """Objects by kind and place, and by the custom resource they belong to."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], Object]] = {kind: {} for kind in (KIND, *WATCHED)}
        self._owned: dict[str, dict[tuple[str, str], Object]] = {}  # uid of owner -> (kind, name) -> object
        self._placed: dict[str, tuple[Object, Placed | None]] = {}  # uid -> the object and what it is
        self._nodes: dict[str, Node] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()  # uids

    def custom_resource(self, key: Key) -> Object | None:
        return self._objects[KIND].get(key)

    def keys(self) -> list[Key]:
        """All custom resources."""
        return list(self._objects[KIND])

    def owned(self, uid: str) -> list[tuple[str, Object]]:
        """(kind, object) of everything labelled with a custom resource's uid."""
        return [(kind, obj) for (kind, _), obj in self._owned.get(uid, {}).items()]

    def placed(self, kind: str, obj: Object) -> Placed | None:
        """What an object of this cache is, told once: a group of thousands is looked at with every rank that moves."""
        uid = obj["metadata"]["uid"]
        known = self._placed.get(uid)
        if known is None or known[0] is not obj:
            known = self._placed[uid] = (obj, place(kind, obj))
        return known[1]

    def nodes(self) -> dict[str, Node]:
        """What is known of every node; empty where nodes are not watched."""
        return self._nodes

    def put_node(self, obj: Object) -> list[Key]:
        """Take in a node. Returns the custom resources with pods on it if something that matters has changed.

        Kubelets report every few seconds; all but a few of these reports change nothing.
        """
        meta = obj["metadata"]
        ready = next(
            (c["status"] for c in (obj.get("status") or {}).get("conditions") or [] if c["type"] == "Ready"), ""
        )
        spec = obj.get("spec") or {}
        node = Node(
            name=meta["name"],
            ready=ready or "True",  # a node that has not reported yet has nothing to lose
            unschedulable=bool(spec.get("unschedulable")),
            tainted=any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in spec.get("taints") or []),
        )
        if self._nodes.get(node.name) == node:
            return []
        self._nodes[node.name] = node
        return self._on_node(node.name)

    def remove_node(self, name: str) -> list[Key]:
        """Forget a node that was taken out of the cluster; the garbage collector takes its pods."""
        return self._on_node(name) if self._nodes.pop(name, None) else []

    def _on_node(self, name: str) -> list[Key]:
        keys = {_key("Pod", pod) for pod in self._objects["Pod"].values() if pod["spec"]["nodeName"] == name}
        return [key for key in keys if key]

    def put(self, kind: str, obj: Object) -> Key | None:
        """Take in an object unless a newer or final state is known. Returns the custom resource concerned."""
        meta = obj["metadata"]
        if meta["uid"] in self._gone:
            return None
        place = (meta["namespace"], meta["name"])
        old = self._objects[kind].get(place)
        if old is not None and old["metadata"]["uid"] == meta["uid"] and _version(old) >= _version(obj):
            return None
        if old is not None:
            self._forget(kind, place, old)
        kept = _trimmed(kind, obj)
        self._objects[kind][place] = kept
        owner = _owner(kept)
        if owner:
            self._owned.setdefault(owner, {})[kind, meta["name"]] = kept
        return _key(kind, kept)

    def revive(self, kind: str, obj: Object) -> Key | None:
        """Take in an object that the API server has just shown, although it seemed to be gone for good.

        A watch by label says DELETED also when somebody takes the label away.
        """
        self._gone.pop(obj["metadata"]["uid"], None)
        return self.put(kind, obj)

    def remove(self, kind: str, obj: Object) -> Key | None:
        """Note that an object is gone for good. Returns the custom resource concerned."""
        meta = obj["metadata"]
        self._bury(meta["uid"])
        place = (meta["namespace"], meta["name"])
        old = self._objects[kind].get(place)
        if old is None or old["metadata"]["uid"] != meta["uid"]:
            return None
        del self._objects[kind][place]
        self._forget(kind, place, old)
        return _key(kind, old)

    def replace(
        self,
        kind: str,
        listed: Iterable[Object],
        *,
        known_before: set[str],
        vanished: Callable[[Object], None] | None = None,
    ) -> set[Key]:
        """Compare with a full list. Returns the custom resources for which something differed.

        known_before holds the uids that were here when the list was asked for: only those can have vanished, and
        vanished is called with each of them.
        """
        changed: set[Key] = set()
        seen = set()
        for obj in listed:
            seen.add(obj["metadata"]["uid"])
            key = self.put(kind, obj)
            if key:
                changed.add(key)
        for obj in list(self._objects[kind].values()):
            uid = obj["metadata"]["uid"]
            if uid in known_before and uid not in seen:
                if vanished:
                    vanished(obj)
                key = self.remove(kind, obj)
                if key:
                    changed.add(key)
        return changed

    def uids(self, kind: str) -> set[str]:
        return {obj["metadata"]["uid"] for obj in self._objects[kind].values()}

    def _forget(self, kind: str, place: tuple[str, str], obj: Object) -> None:
        self._placed.pop(obj["metadata"]["uid"], None)
        owner = _owner(obj)
        if owner and owner in self._owned:
            self._owned[owner].pop((kind, place[1]), None)
            if not self._owned[owner]:
                del self._owned[owner]

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > _TOMBSTONES:
            self._gone.popitem(last=False)


def _version(obj: Object) -> int:
    """resourceVersion, which the API defines as comparable numbers of one resource."""
    return int(obj["metadata"].get("resourceVersion") or 0)


def _owner(obj: Object) -> str | None:
    owner: str | None = (obj["metadata"].get("labels") or {}).get(naming.LABEL_UID)
    return owner


def _key(kind: str, obj: Object) -> Key | None:
    meta = obj["metadata"]
    name = meta["name"] if kind == KIND else (meta.get("labels") or {}).get(naming.LABEL_NAME)
    return (meta["namespace"], name) if name else None


def _trimmed(kind: str, obj: Object) -> Object:
    """Only what decisions and comparisons read: memory is per object and there are many."""
    kept = {name: value for name, value in obj.items() if name != "managedFields"}
    kept["metadata"] = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    if kind == "Pod":
        spec = obj.get("spec") or {}
        # Whoever waits for an init container must tell it from a sidecar.
        inits = [c for c in spec.get("initContainers") or [] if c.get("restartPolicy")]
        sidecars = [{"name": c["name"], "restartPolicy": c["restartPolicy"]} for c in inits]
        kept["spec"] = {"nodeName": spec.get("nodeName") or ""} | ({"initContainers": sidecars} if sidecars else {})
        status = obj.get("status") or {}
        names = ("phase", "reason", "message", "podIP", "conditions", "containerStatuses", "initContainerStatuses")
        kept["status"] = {name: status[name] for name in names if status.get(name) is not None}
    elif kind == "StatefulSet":
        kept.pop("spec", None)
        kept.pop("status", None)
    elif kind == "ConfigMap":
        kept["data"] = {"plan.json": (obj.get("data") or {}).get("plan.json", "null")}
    elif kind != KIND:
        kept.pop("status", None)
    return kept
