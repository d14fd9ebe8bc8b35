"""A small world for the plan: an API server, controllers and kubelets reduced to what one custom resource needs.

It is a fake, because here thousands of moments are tried in milliseconds; what it assumes of Kubernetes is what the
end-to-end tests see on a real one.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec

from dp_handshake.messages import LaunchPlan, Local, Snapshot, Stages
from dp_handshake.ranks import format_ranks
from dp_operator import api, naming, observe
from dp_operator.failure import with_logs
from dp_operator.plan import Apply, Create, Delete, Plan, Situation, plan
from dp_operator.render import Settings

SETTINGS = Settings(relay_image="relay:1")
START = 1_800_000_000.0


def spec(**changes: Any) -> dict[str, Any]:
    """A valid spec of 4 Dense ranks without devices; changes replace whole top-level fields."""
    return {
        "model": {"name": "m", "architecture": "Dense"},
        "engine": {"image": "vllm/vllm-openai:v0.32.0"},
        "dataParallel": {"size": 4},
        "devices": {"assignment": "None"},
        **changes,
    }


def resource(**changes: Any) -> api.DataParallelDeployment:
    """The custom resource `web` with that spec."""
    return api.decode(
        {"metadata": {"name": "web", "namespace": "ns", "uid": "uid-1", "generation": 1}, "spec": spec(**changes)}
    )


class World:
    """Objects, a clock, and one custom resource under the plan's care."""

    def __init__(self, **changes: Any) -> None:
        self.now = START
        self.cr = resource(**changes)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.obstacles: dict[tuple[str, str], observe.Obstacle] = {}
        self.refused: dict[str, str] = {}
        self.blocked: dict[str, str] = {}
        self.errors: list[str] = []
        self.monitor_errors: dict[str, str] = {}
        self.nodes: dict[str, observe.Node] = {}
        self.verdicts: dict[str, str] | None = None
        self.engine_logs: dict[str, str] = {}  # by pod
        self.log: list[str] = []
        self.status_writes = 0
        self._numbers = itertools.count(1)

    # --- the operator's turn ---------------------------------------------------------------------------------------
    def plan(self) -> Plan:
        """Decide, without acting."""
        picture = observe.observe(
            "uid-1",
            [(kind, obj) for (kind, _), obj in self.objects.items()],
            self.snapshots,
            obstacles=self.obstacles,
            refused=self.refused,
            blocked=self.blocked,
            nodes=self.nodes,
        )
        number = next(self._numbers)
        return plan(
            Situation(
                cr=self.cr,
                picture=picture,
                settings=SETTINGS,
                now=self.now,
                token=number.to_bytes(16, "big"),
                errors=self.errors,
                monitor_errors=self.monitor_errors,
                verdicts=self.verdicts,
            )
        )

    def reconcile(self) -> Plan:
        """Decide and act until nothing more is to be done at this moment."""
        for _ in range(20):
            decided = self.plan()
            read = [(wanted, self.engine_logs.get(wanted.pod, "")) for wanted in decided.logs]
            decided = msgspec.structs.replace(decided, status=with_logs(decided.status, read))
            if decided.status != self.cr.status:
                self.cr = msgspec.structs.replace(self.cr, status=decided.status)
                self.status_writes += 1
                self.log.append("status")
            self.log += [f"event {event.reason}: {event.note}" for event in decided.events]
            for action in decided.actions:
                self.act(action)
            due = decided.look_again_at is not None and decided.look_again_at <= self.now
            if not decided.sequences and not due:
                return decided
        raise AssertionError(f"no rest after 20 rounds: {self.log[-30:]}")

    def act(self, action: Create | Apply | Delete) -> None:
        match action:
            case Create(manifest):
                self.log.append(f"create {manifest['kind']} {manifest['metadata']['name']}")
                self._store(manifest)
            case Apply(manifest):
                self.log.append(f"apply {manifest['kind']} {manifest['metadata']['name']}")
                self._store(manifest)
            case Delete(kind, name, _):
                self.log.append(f"delete {kind} {name}")
                self._deleted(kind, name)

    # --- the cluster's turn --------------------------------------------------------------------------------------------
    def _store(self, manifest: dict[str, Any]) -> None:
        obj = copy.deepcopy(manifest)
        number = next(self._numbers)
        obj["metadata"].setdefault("uid", f"object-{number}")
        obj["metadata"] |= {"resourceVersion": str(number), "creationTimestamp": observe.timestamp(self.now)}
        kind, name = obj["kind"], obj["metadata"]["name"]
        if kind == "Service" and not obj["spec"].get("clusterIP"):
            obj["spec"]["clusterIP"] = f"198.19.0.{number}"
        if kind == "Pod":
            obj["spec"] = {}
            obj["status"] = {"phase": "Pending"}
        self.objects[kind, name] = obj
        if kind == "StatefulSet":
            start = obj["spec"]["ordinals"]["start"]
            for ordinal in range(start, start + obj["spec"]["replicas"]):
                pod = {
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{name}-{ordinal}",
                        "namespace": "ns",
                        "labels": obj["spec"]["template"]["metadata"]["labels"],
                        "ownerReferences": [
                            {"kind": "StatefulSet", "uid": obj["metadata"]["uid"], "name": name, "controller": True}
                        ],
                    },
                }
                self._store(pod)

    def _deleted(self, kind: str, name: str) -> None:
        if kind == "Pod":
            meta = self.objects[kind, name]["metadata"]
            meta["deletionTimestamp"] = observe.timestamp(self.now + 75)
            return
        obj = self.objects.pop((kind, name))
        if kind == "StatefulSet":
            for pod in self._owned_by(obj["metadata"]["uid"]):
                pod["metadata"]["deletionTimestamp"] = observe.timestamp(self.now + 75)

    def _owned_by(self, uid: str) -> list[dict[str, Any]]:
        return [
            obj
            for obj in self.objects.values()
            if any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences", []))
        ]

    def kubelets_finish_deleting(self) -> None:
        """Terminating pods end and vanish."""
        for key, obj in list(self.objects.items()):
            if key[0] == "Pod" and obj["metadata"].get("deletionTimestamp"):
                del self.objects[key]

    def pod(self, name: str) -> dict[str, Any]:
        return self.objects["Pod", name]

    def entry(self, index: int = 0) -> api.GroupStatus:
        """The ledger entry of a group that is not merely being taken away."""
        return next(e for e in self.cr.status.groups if e.index == index and e.state != "Stopping")

    def launch_plan(self, incarnation: str) -> LaunchPlan:
        name = next(n for (k, n), o in self.objects.items() if k == "ConfigMap" and incarnation in n and o)
        return msgspec.json.decode(self.objects["ConfigMap", name]["data"]["plan.json"], type=LaunchPlan)

    def pods_of(self, incarnation: str) -> list[dict[str, Any]]:
        return [
            obj
            for (kind, _), obj in self.objects.items()
            if kind == "Pod" and obj["metadata"]["labels"][naming.LABEL_INCARNATION] == incarnation
        ]

    def run_pods(self, incarnation: str) -> None:
        """Every pod of an incarnation gets a node and runs."""
        places = [n for n in ("n1", "n2", "n3") if n not in self.nodes or not self.nodes[n].unschedulable]
        for number, pod in enumerate(self.pods_of(incarnation)):
            pod["spec"] = {"nodeName": places[number % len(places)]}
            pod["status"] = {
                "phase": "Running",
                "podIP": f"198.18.101.{number + 1}",
                "containerStatuses": [{"name": "engine", "state": {"running": {}}}],
            }

    def ready_head(self, incarnation: str, *, ready: bool = True) -> None:
        head = next(p for p in self.pods_of(incarnation) if p["metadata"]["name"].endswith("-head"))
        head["status"]["conditions"] = [
            {
                "type": "Ready",
                "status": "True" if ready else "False",
                "lastTransitionTime": observe.timestamp(self.now),
            }
        ]

    def relay_says(self, incarnation: str, **changes: Any) -> None:
        """Change the incarnation's snapshot."""
        before = self.snapshots.get(incarnation) or Snapshot(
            incarnation=incarnation, time=self.now, size=self.cr.spec.data_parallel.size, expected_pods=0
        )
        self.snapshots[incarnation] = msgspec.structs.replace(before, time=self.now, **changes)

    def release(self, incarnation: str) -> None:
        size = self.launch_plan(incarnation).size
        self.relay_says(
            incarnation, released_at=self.now, listening_at=self.now, stages=Stages(arrived=format_ranks(range(size)))
        )

    def make_ready(self, index: int = 0) -> str:
        """Bring one group all the way up; returns its incarnation."""
        self.reconcile()
        return self.bring_up(self.entry(index).incarnation)

    def bring_up(self, incarnation: str) -> str:
        """Bring one incarnation whose objects exist all the way up."""
        self.run_pods(incarnation)
        self.release(incarnation)
        self.reconcile()
        everyone = format_ranks(range(self.launch_plan(incarnation).size))
        local = self.launch_plan(incarnation).head_ranks
        self.relay_says(
            incarnation,
            ready_at=self.now,
            api_ready=True,
            stages=Stages(arrived=everyone, connected=everyone, loaded=everyone, ready=everyone),
            local=Local(expected=local, connected=local, loaded=local, ready=local),
        )
        self.ready_head(incarnation)
        self.reconcile()
        return incarnation

    def engine_ends(
        self,
        pod: str,
        *,
        code: int,
        at: float | None = None,
        reason: str = "Error",
        message: str = "the last words",
    ) -> None:
        self.pod(pod)["status"]["containerStatuses"] = [
            {
                "name": "engine",
                "state": {
                    "terminated": {
                        "exitCode": code,
                        "reason": reason,
                        "finishedAt": observe.timestamp(at or self.now),
                        "message": message,
                    }
                },
            }
        ]

    def annotate(self, name: str, value: str) -> None:
        """A user sets an annotation of the custom resource."""
        meta = msgspec.structs.replace(self.cr.metadata, annotations={name: value})
        self.cr = msgspec.structs.replace(self.cr, metadata=meta)

    def take_log(self) -> list[str]:
        log, self.log = self.log, []
        return log

    def condition(self, kind: str) -> api.Condition:
        return next(c for c in self.cr.status.conditions if c.type == kind)

    def change_spec(self, **changes: Any) -> None:
        """A user applies another spec."""
        meta = msgspec.structs.replace(self.cr.metadata, generation=self.cr.metadata.generation + 1)
        self.cr = msgspec.structs.replace(resource(**changes), metadata=meta, status=self.cr.status)
