"""The acting side against an API server that is a dictionary here: what is tried is what real ones do rarely.

Deleting, refusing, stealing and relabelling at the right moment is what the fake is for; the real server is asked by
the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from dp_operator import api, handlers, naming, observe
from dp_operator.client import ApiError
from dp_operator.plan import Plan, Situation, plan
from dp_operator.reconciler import Reconciler
from tests.unit.operator.world import SETTINGS, spec

pytestmark = pytest.mark.looptime

KEY = ("ns", "web")


class Server:
    """Objects by kind and name, a log of writes, and refusals on demand."""

    server_ahead_s = 0.0

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[str] = []
        self.refuse: dict[tuple[str, str], ApiError] = {}  # (verb, kind) -> error
        self.finalizers: set[str] = set()
        self._numbers = itertools.count(10)

    def _stamped(self, obj: dict[str, Any]) -> dict[str, Any]:
        obj["metadata"]["resourceVersion"] = str(next(self._numbers))
        return copy.deepcopy(obj)

    def _may(self, verb: str, kind: str, name: str) -> None:
        self.calls.append(f"{verb} {kind} {name}")
        if (verb, kind) in self.refuse:
            raise self.refuse[verb, kind]

    def resource(self, *, uid: str = "uid-1", generation: int = 1, **changes: Any) -> dict[str, Any]:
        obj = {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "metadata": {"name": "web", "namespace": "ns", "uid": uid, "generation": generation},
            "spec": spec(**changes),
        }
        old = self.objects.get((api.KIND, "web"))
        if old and old["metadata"]["uid"] == uid:
            obj["status"] = old.get("status", {})
        self.objects[api.KIND, "web"] = obj
        return self._stamped(obj)

    async def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "Event":
            return manifest
        if dry_run:
            if ("create", kind) in self.refuse:
                raise self.refuse["create", kind]
            if (kind, name) in self.objects:
                raise ApiError(409, "AlreadyExists", "exists")
            return manifest
        self._may("create", kind, name)
        if (kind, name) in self.objects:
            raise ApiError(409, "AlreadyExists", "exists")
        obj = copy.deepcopy(manifest)
        obj["metadata"]["uid"] = f"object-{next(self._numbers)}"
        if kind == "Service":
            obj["spec"].setdefault("clusterIP", "198.19.0.7")
        self.objects[kind, name] = obj
        return self._stamped(obj)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self.calls.append(f"get {kind} {name}")
        if (kind, name) not in self.objects:
            raise ApiError(404, "NotFound", name)
        return copy.deepcopy(self.objects[kind, name])

    async def take_over(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self.calls.append(f"take over {kind} {name}")

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._may("apply", kind, name)
        obj = self.objects[kind, name]
        obj["spec"] = copy.deepcopy(manifest["spec"])
        obj["metadata"]["labels"] = dict(manifest["metadata"]["labels"])
        return self._stamped(obj)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, grace_s: int | None = None
    ) -> dict[str, Any]:
        self._may("delete", kind, name)
        if kind == "Pod" or name in self.finalizers:
            self.objects[kind, name]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
            return self._stamped(self.objects[kind, name])
        del self.objects[kind, name]
        return {"kind": "Status"}

    async def put_status(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("status")
        stored = self.objects[api.KIND, "web"]
        stored["status"] = copy.deepcopy(obj["status"])
        return self._stamped(stored)

    async def log(self, *_: Any, **__: Any) -> str:
        return ""

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.objects[api.KIND, "web"]["status"]
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status()["conditions"] if c["type"] == kind)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def made(server: Server) -> AsyncIterator[Reconciler]:
    """An operator at work."""
    reconciler = Reconciler(server, SETTINGS, namespaces=[])  # type: ignore[arg-type]
    task = asyncio.create_task(reconciler.work())
    yield reconciler
    task.cancel()
    reconciler.close()


def show(made: Reconciler, resource: dict[str, Any]) -> None:
    made.seen(api.KIND, {"type": "MODIFIED", "object": resource})


async def test_what_only_values_of_arguments_tell_is_not_accepted_and_makes_no_pods(server: Server, made: Reconciler):
    """The API server lets it through: CEL cannot tell. The words are those of `plan`."""
    show(made, server.resource(engine={"image": "i", "args": ["--device-ids", "0"]}, tensorParallelSize=2))
    await asyncio.sleep(5)
    assert server.condition("Accepted")["status"] == "False"
    assert "--device-ids=0: local rank 0 needs the devices 0 to 1" in server.condition("Accepted")["message"]
    assert not [kind for kind, _ in server.objects if kind in {"Pod", "StatefulSet"}]


async def test_a_second_change_of_a_policy_is_applied_like_the_first(server: Server, made: Reconciler):
    show(made, server.resource(replicas=0))
    await asyncio.sleep(5)
    for generation, api_from in ((2, [{"podSelector": {"matchLabels": {"a": "1"}}}]), (3, [])):
        show(made, server.resource(replicas=0, generation=generation, networkPolicy={"apiFrom": api_from}))
        await asyncio.sleep(5)
    assert len(server.objects["NetworkPolicy", "web"]["spec"]["ingress"]) == 2, "nobody may reach the API now"


async def test_one_groups_refused_object_does_not_keep_another_groups_dead_head_alive(server: Server, made: Reconciler):
    create = server.create

    async def but_not_group_1(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["labels"][naming.LABEL_GROUP] == "1":
            raise ApiError(403, "Forbidden", "exceeded quota")
        return await create(manifest, dry_run=dry_run)

    server.create = but_not_group_1  # type: ignore[method-assign]
    show(made, server.resource(replicas=2))
    await asyncio.sleep(5)
    head = next(o for (kind, name), o in server.objects.items() if kind == "Pod" and "-0-" in name)
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2027-01-01T00:00:00Z", "message": "x"}
    head["status"] = {"containerStatuses": [{"name": "engine", "state": {"terminated": ended}}]}
    made.seen("Pod", {"type": "MODIFIED", "object": server._stamped(head)})
    await asyncio.sleep(10)
    assert f"delete Pod {head['metadata']['name']}" in server.calls


def end_heads(server: Server, made: Reconciler) -> list[str]:
    """The engines of all heads end; returns the deletions that this must bring."""
    heads = [obj for (kind, _), obj in server.objects.items() if kind == "Pod"]
    for head in heads:
        ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2027-01-01T00:00:00Z", "message": "x"}
        head["status"] = {"containerStatuses": [{"name": "engine", "state": {"terminated": ended}}]}
        made.seen("Pod", {"type": "MODIFIED", "object": server._stamped(head)})
    return [f"delete Pod {head['metadata']['name']}" for head in heads]


@pytest.mark.parametrize("slow", ["logs", "events", "dry run"])
async def test_a_dead_head_loses_its_traffic_however_slow_logs_events_and_webhooks_are(
    server: Server, made: Reconciler, slow: str
):
    create, posted = server.create, list[str]()

    async def slowly(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if (slow == "events" and manifest["kind"] == "Event") or (slow == "dry run" and dry_run):
            await asyncio.sleep(30)
        if manifest["kind"] == "Event":
            posted.append(manifest["reason"])
        return await create(manifest, dry_run=dry_run)

    async def log(*_: Any, **__: Any) -> str:
        await asyncio.sleep(30 if slow == "logs" else 0)
        return ""

    server.create = slowly  # type: ignore[method-assign]
    server.log = log  # type: ignore[method-assign]
    show(made, server.resource(replicas=4))
    await asyncio.sleep(5)
    if slow == "dry run":
        show(made, server.resource(replicas=4, generation=2, engine={"image": "vllm/vllm-openai:v0.33.1"}))
        await asyncio.sleep(5)
    due = end_heads(server, made)
    assert len(due) == 4
    await asyncio.sleep(4.5)
    assert set(due) <= set(server.calls)
    await asyncio.sleep(200)
    assert posted.count("GroupFailed") == 4, "late is not lost"


async def test_a_failure_is_written_at_once_although_the_status_has_just_been_written(server: Server, made: Reconciler):
    """A container that is started again in its place takes the cause with it within a second."""
    show(made, server.resource())
    await asyncio.sleep(5)
    server.calls.clear()
    show(made, server.resource(replicas=2, generation=2))
    await asyncio.sleep(0.1)
    assert "status" in server.calls
    due = end_heads(server, made)
    await asyncio.sleep(0.1)
    assert set(due) & set(server.calls)


@pytest.mark.parametrize("away_s", [10, 50, 200])
async def test_a_failure_that_could_not_be_written_down_is_seconds_after_the_api_server_is_back(
    server: Server, made: Reconciler, away_s: float
):
    show(made, server.resource())
    await asyncio.sleep(5)
    put_status, away = server.put_status, True

    async def not_while_away(obj: dict[str, Any]) -> dict[str, Any]:
        if away:
            raise aiohttp.ClientConnectionError("connection refused")
        return await put_status(obj)

    server.put_status = not_while_away  # type: ignore[method-assign]
    due = end_heads(server, made)
    await asyncio.sleep(away_s)
    away = False
    await asyncio.sleep(5)
    assert set(due) <= set(server.calls)


async def test_watches_begin_again_seconds_after_the_api_server_is_back_and_are_as_patient_as_kopfs():
    tries = handlers.settings().networking.error_backoffs
    assert isinstance(tries, tuple)
    assert max(tries) <= 3
    assert sum(tries) >= 54


async def test_an_event_is_posted_although_what_follows_it_is_refused(server: Server, made: Reconciler):
    posted: list[str] = []
    create = server.create

    async def noted(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        posted.extend([manifest["reason"]] if manifest["kind"] == "Event" else [])
        return await create(manifest, dry_run=dry_run)

    server.create = noted  # type: ignore[method-assign]
    show(made, server.resource())
    await asyncio.sleep(5)
    server.refuse["delete", "Pod"] = ApiError(403, "Forbidden", "may not delete")
    end_heads(server, made)
    await asyncio.sleep(5)
    assert posted.count("GroupFailed") == 1


async def test_an_object_that_lost_our_label_is_found_again_without_a_storm(server: Server, made: Reconciler):
    show(made, server.resource(replicas=0))
    await asyncio.sleep(5)
    before = copy.deepcopy(server.objects["Service", "web"])
    server.objects["Service", "web"]["metadata"]["labels"][naming.LABEL_MANAGED_BY] = "Helm"
    server._stamped(server.objects["Service", "web"])
    server.calls.clear()
    made.seen("Service", {"type": "DELETED", "object": before})
    await asyncio.sleep(60)
    assert server.objects["Service", "web"]["metadata"]["labels"][naming.LABEL_MANAGED_BY] == naming.MANAGER
    assert len(server.calls) < 20, Counter(server.calls)


async def test_a_pod_that_lost_our_label_is_deleted_rather_than_left_with_traffic(server: Server, made: Reconciler):
    show(made, server.resource())
    await asyncio.sleep(5)
    name = next(name for kind, name in server.objects if kind == "Pod")
    made.seen("Pod", {"type": "DELETED", "object": copy.deepcopy(server.objects["Pod", name])})
    await asyncio.sleep(5)
    assert f"delete Pod {name}" in server.calls


@pytest.mark.parametrize("kind", ["Pod", "Service", "ConfigMap", "StatefulSet"])
async def test_a_copy_of_a_groups_object_without_our_label_is_its_makers(server: Server, made: Reconciler, kind: str):
    """As `kubectl debug --copy-to` makes one, or somebody who looks into a failure."""
    show(made, server.resource(dataParallel={"size": 2}))
    await asyncio.sleep(5)
    name = next(name for found, name in server.objects if found == kind and name != "web")
    copied = copy.deepcopy(server.objects[kind, name])
    copied["metadata"] |= {"name": "my-copy", "uid": "copy"}
    copied["metadata"].pop("ownerReferences", None)
    server.objects[kind, "my-copy"] = copied
    made.seen(kind, {"type": "ADDED", "object": server._stamped(copied)})
    made.seen(kind, {"type": "DELETED", "object": server._stamped(copied)})  # somebody took our label from it
    await asyncio.sleep(5)
    assert f"delete {kind} my-copy" not in server.calls


async def test_a_taken_name_is_said_once_and_asked_about_without_writing(server: Server, made: Reconciler):
    strange = {"kind": "Service", "metadata": {"name": "web", "namespace": "ns", "uid": "x", "labels": {}}, "spec": {}}
    server.objects["Service", "web"] = strange
    show(made, server.resource(replicas=0))
    await asyncio.sleep(10)
    assert server.condition("Stalled")["reason"] == "NameTaken"
    server.calls.clear()
    await asyncio.sleep(600)
    assert not [line for line in server.calls if not line.startswith("get ")], "only questions"
    del server.objects["Service", "web"]
    await asyncio.sleep(60)
    assert server.condition("Stalled")["status"] == "False"
    assert server.objects["Service", "web"]["metadata"]["labels"][naming.LABEL_UID] == "uid-1"


async def test_what_is_left_of_a_resource_of_the_same_name_is_waited_for_and_no_stranger(
    server: Server, made: Reconciler
):
    show(made, server.resource(replicas=0))
    await asyncio.sleep(5)
    old = copy.deepcopy(server.objects["Service", "web"])
    made.seen(api.KIND, {"type": "DELETED", "object": copy.deepcopy(server.objects[api.KIND, "web"])})
    show(made, server.resource(uid="uid-2", replicas=0))
    await asyncio.sleep(3)
    assert server.condition("Stalled")["status"] == "False"
    for kind in ("Service", "NetworkPolicy"):
        del server.objects[kind, "web"]
    made.seen("Service", {"type": "DELETED", "object": old})
    await asyncio.sleep(5)
    assert server.objects["Service", "web"]["metadata"]["labels"][naming.LABEL_UID] == "uid-2"
    assert server.objects["NetworkPolicy", "web"]["metadata"]["labels"][naming.LABEL_UID] == "uid-2"


async def test_a_finalizer_on_one_of_our_objects_makes_no_storm_of_deletes(server: Server, made: Reconciler):
    show(made, server.resource())
    await asyncio.sleep(5)
    server.finalizers = {name for kind, name in server.objects if kind == "PodDisruptionBudget"}
    server.calls.clear()
    show(made, server.resource(generation=2, replicas=0))
    await asyncio.sleep(120)
    assert len([line for line in server.calls if line.startswith("delete PodDisruptionBudget")]) <= 2


async def test_a_refused_policy_is_tried_again_when_the_spec_changes_and_not_before(server: Server, made: Reconciler):
    server.refuse["create", "NetworkPolicy"] = ApiError(422, "Invalid", "apiFrom is nonsense")
    show(made, server.resource(replicas=0))
    await asyncio.sleep(300)
    assert server.calls.count("create NetworkPolicy web") == 1
    assert "nonsense" in server.condition("Stalled")["message"]
    assert server.condition("Stalled")["reason"] == "ObjectRefused"
    server.refuse.clear()
    show(made, server.resource(replicas=0, generation=2))
    await asyncio.sleep(5)
    assert ("NetworkPolicy", "web") in server.objects
    assert server.condition("Stalled")["status"] == "False"


async def test_a_service_that_a_quota_refused_is_made_once_the_quota_takes_it(server: Server, made: Reconciler):
    server.refuse["create", "Service"] = ApiError(403, "Forbidden", "exceeded quota: services")
    show(made, server.resource(replicas=0))
    await asyncio.sleep(300)
    assert "exceeded quota" in server.condition("Stalled")["message"]
    server.refuse.clear()
    await asyncio.sleep(60)
    assert ("Service", "web") in server.objects
    assert server.condition("Stalled")["status"] == "False"


async def test_pods_are_not_made_while_a_stranger_has_the_name_of_their_config_map(server: Server, made: Reconciler):
    """They would mount what somebody else wrote."""
    create = server.create
    strangers: list[str] = []

    async def squatted(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ConfigMap" and not strangers:
            strangers.append(name)
            meta = {"name": name, "namespace": "ns", "uid": "x", "labels": {}}
            server.objects["ConfigMap", name] = {"kind": "ConfigMap", "metadata": meta}
        return await create(manifest, dry_run=dry_run)

    server.create = squatted  # type: ignore[method-assign]
    show(made, server.resource())
    await asyncio.sleep(30)
    (taken,) = strangers
    assert server.condition("Stalled")["reason"] == "NameTaken"
    assert taken in server.condition("Stalled")["message"]
    assert not [name for kind, name in server.objects if kind in ("Pod", "StatefulSet")]
    del server.objects["ConfigMap", taken]
    await asyncio.sleep(60)
    assert server.condition("Stalled")["status"] == "False"
    assert [name for kind, name in server.objects if kind == "Pod"]


async def lose_the_rpc_service(server: Server, made: Reconciler) -> tuple[str, str]:
    """Delete that of a released group, whose address the API server does not give again. Its kind and name."""
    show(made, server.resource())
    await asyncio.sleep(5)
    server.status()["groups"][0]["releasedAt"] = observe.timestamp(time.time())
    show(made, server.resource())
    place = next(place for place in server.objects if place[0] == "Service" and place[1].endswith("-rpc"))
    old = server.objects.pop(place)
    server.refuse["create", "Service"] = ApiError(422, "Invalid", "provided IP is already allocated")
    made.seen("Service", {"type": "DELETED", "object": old})
    return place


async def test_a_rpc_service_that_cannot_be_made_again_ends_no_group_that_was_released(
    server: Server, made: Reconciler
):
    await lose_the_rpc_service(server, made)
    await asyncio.sleep(60)
    assert [g.get("state") for g in server.status()["groups"]] in ([None], ["Starting"])
    assert "lastFailures" not in server.status()["groups"][0]


async def test_a_rpc_service_whose_address_is_freed_a_moment_later_is_back_within_seconds(
    server: Server, made: Reconciler
):
    place = await lose_the_rpc_service(server, made)
    await asyncio.sleep(2)
    assert place not in server.objects
    server.refuse.clear()
    await asyncio.sleep(5)
    assert place in server.objects


FORBIDDEN = 'pods "web" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
QUOTA = 'pods "web" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2'


async def changed(server: Server, made: Reconciler, refusal: ApiError) -> None:
    """A group that exists, and a change of its spec of which the API server says something when asked beforehand."""
    create = server.create

    async def asked(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        if dry_run and ("dry run", "Pod") in server.refuse:
            raise server.refuse["dry run", "Pod"]
        return await create(manifest, dry_run=dry_run)

    server.create = asked  # type: ignore[method-assign]
    show(made, server.resource())
    await asyncio.sleep(5)
    server.refuse["dry run", "Pod"] = refusal
    show(made, server.resource(generation=2, engine={"image": "vllm/vllm-openai:v0.33.1"}))
    await asyncio.sleep(5)


@pytest.mark.parametrize(
    ("refusal", "refused"),
    [
        (ApiError(422, "Invalid", "spec.containers[0].image: denied"), True),
        (ApiError(403, "Forbidden", FORBIDDEN), True),
        (ApiError(403, "Forbidden", QUOTA), False),
    ],
)
async def test_nothing_is_deleted_for_pods_that_an_admission_policy_forbids(
    server: Server, made: Reconciler, refusal: ApiError, refused: bool
):
    """A quota is another matter: it counts the pods that go first."""
    await changed(server, made, refusal)
    assert (server.condition("Progressing")["reason"] == "RevisionRefused") is refused
    assert any(call.startswith("delete Pod") for call in server.calls) is not refused


async def test_a_refused_revision_is_taken_up_once_the_policy_that_was_in_its_way_is_gone(
    server: Server, made: Reconciler
):
    await changed(server, made, ApiError(422, "Invalid", "spec.containers[0].image: denied"))
    statuses = server.calls.count("status")
    await asyncio.sleep(100)
    assert server.calls.count("status") == statuses, "asking again is no reason to write"
    del server.refuse["dry run", "Pod"]
    await asyncio.sleep(40)
    assert any(call.startswith("delete Pod") for call in server.calls)


async def test_the_event_about_a_failure_gives_the_reason_that_was_found_in_the_log(server: Server, made: Reconciler):
    posted: list[dict[str, Any]] = []
    create = server.create

    async def noted(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        posted.extend([manifest] if manifest["kind"] == "Event" else [])
        return await create(manifest, dry_run=dry_run)

    async def log(*_: Any, **__: Any) -> str:
        return "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"

    server.create, server.log = noted, log  # type: ignore[method-assign]
    show(made, server.resource())
    await asyncio.sleep(5)
    head = next(obj for (kind, _), obj in server.objects.items() if kind == "Pod")
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2027-01-01T00:00:00Z", "message": "x"}
    head["status"] = {"containerStatuses": [{"name": "engine", "state": {"terminated": ended}}]}
    made.seen("Pod", {"type": "MODIFIED", "object": server._stamped(head)})
    await asyncio.sleep(5)
    assert server.status()["groups"][0]["lastFailures"][0]["reason"] == "GPUOutOfMemory"
    (event,) = [event for event in posted if event["reason"] == "GroupFailed"]
    assert event["note"].startswith("group 0 (rank 0): GPUOutOfMemory: ")


async def test_a_plan_that_fails_is_said_in_the_status_once_and_taken_back_when_it_works_again(
    server: Server, made: Reconciler, monkeypatch: pytest.MonkeyPatch
):
    """The traceback is in the operator's log, where whoever looks at the resource does not look."""
    show(made, server.resource())
    await asyncio.sleep(5)
    pods = [name for kind, name in server.objects if kind == "Pod"]

    def fails(_: object) -> None:
        raise KeyError(secrets.token_hex(4))

    with monkeypatch.context() as patch:
        patch.setattr("dp_operator.reconciler.plan", fails)
        server.calls.clear()
        show(made, server.resource(generation=2))
        await asyncio.sleep(900)
        stalled = server.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "InternalError")
        assert "KeyError in test_reconciler.py:" in stalled["message"]
        assert "Please report it" in stalled["message"]
        assert server.calls == ["status"]
        assert pods == [name for kind, name in server.objects if kind == "Pod"]
        assert server.status()["groups"], "the ledger is kept"
    show(made, server.resource(generation=3))
    await asyncio.sleep(5)
    assert server.condition("Stalled")["status"] == "False"


async def test_a_resource_of_another_versions_crd_is_told_which_field_does_not_fit(server: Server, made: Reconciler):
    show(made, server.resource(replicas="many"))
    await asyncio.sleep(300)
    assert "`$.spec.replicas`" in server.condition("Stalled")["message"]
    assert server.calls == ["status"]


async def test_what_happens_before_the_ledger_may_be_written_again_costs_no_planning(
    server: Server, made: Reconciler, monkeypatch: pytest.MonkeyPatch
):
    """A start of thousands of pods is thousands of events, and looking at such a group takes a while."""
    show(made, server.resource())
    await asyncio.sleep(5)
    planned: list[int] = []

    def count(situation: Situation) -> Plan:
        planned.append(situation.cr.metadata.generation)
        return plan(situation)

    monkeypatch.setattr("dp_operator.reconciler.plan", count)
    for generation in range(2, 42):
        show(made, server.resource(generation=generation))
        await asyncio.sleep(0.02)
    assert len(planned) <= 5, planned
    await asyncio.sleep(2)
    assert planned[-1] == 41
    assert server.status()["observedGeneration"] == 41


async def test_the_log_of_an_engine_is_not_that_of_the_launcher_which_the_kubelet_started_after_it(
    server: Server, made: Reconciler
):
    async def log(*_: Any, previous: bool) -> str:
        return "RuntimeError: CUDA out of memory." if previous else "launch: not started: started again"

    server.log = log  # type: ignore[method-assign]
    show(made, server.resource())
    await asyncio.sleep(5)
    head = next(obj for (kind, _), obj in server.objects.items() if kind == "Pod")
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": "2027-01-01T00:00:00Z"}}
    told = copy.deepcopy(head) | {"status": {"containerStatuses": [{"name": "engine", "state": ended}]}}
    head["status"] = {"containerStatuses": [{"name": "engine", "state": {"running": {}}, "lastState": ended}]}
    made.seen("Pod", {"type": "MODIFIED", "object": server._stamped(told)})
    await asyncio.sleep(5)
    assert server.status()["groups"][0]["lastFailures"][0]["reason"] == "GPUOutOfMemory"


async def test_an_end_that_was_reported_late_takes_the_place_of_what_it_had_caused_and_is_posted(
    server: Server, made: Reconciler
):
    posted: list[str] = []
    create = server.create

    async def noted(manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        posted.extend([f"{manifest['reason']}: {manifest['note']}"] if manifest["kind"] == "Event" else [])
        return await create(manifest, dry_run=dry_run)

    read: list[str] = []

    async def log(_: str, pod: str, **__: Any) -> str:
        read.append(pod)
        return (
            "RuntimeError: [gloo] Connection closed by peer" if pod.endswith("-head") else "RuntimeError: device lost"
        )

    def ends(pod: dict[str, Any], at: str) -> None:
        ended = {"exitCode": 1, "reason": "Error", "finishedAt": at}
        pod["status"] = {"containerStatuses": [{"name": "engine", "state": {"terminated": ended}}]}
        made.seen("Pod", {"type": "MODIFIED", "object": server._stamped(pod)})

    server.create, server.log = noted, log  # type: ignore[method-assign]
    show(made, server.resource(dataParallel={"size": 2}))
    await asyncio.sleep(5)
    head = next(obj for (kind, _), obj in server.objects.items() if kind == "Pod")
    workers = next(obj for (kind, _), obj in server.objects.items() if kind == "StatefulSet")
    meta = {
        "name": f"{workers['metadata']['name']}-0",
        "namespace": "ns",
        "uid": "worker",
        "labels": workers["spec"]["template"]["metadata"]["labels"],
        "ownerReferences": [
            {"kind": "StatefulSet", "uid": workers["metadata"]["uid"], "name": "w", "controller": True}
        ],
    }
    worker = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "n2"}}
    head["spec"] = {"nodeName": "n1"}
    ends(head, "2026-01-01T00:00:05Z")
    await asyncio.sleep(0.3)
    assert server.status()["groups"][0]["lastFailures"][0]["rank"] == 0
    ends(worker, "2026-01-01T00:00:04Z")
    await asyncio.sleep(2)
    (failure,) = server.status()["groups"][0]["lastFailures"]
    assert (failure["rank"], failure["firstErrorLines"]) == (1, "RuntimeError: device lost")
    assert server.status()["groups"][0]["nodeFailures"] == {"n2": 1}
    told = [note.partition(": ")[0] for note in posted if "group 0" in note]
    assert told == ["GroupFailed", "CauseCorrected"]
    assert read == [head["metadata"]["name"], meta["name"]], "once is enough, though the status has to wait its turn"
