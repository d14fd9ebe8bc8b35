"""Single troubles between the operator and the API server, each with what a user would notice.

The rows of the problem list that they answer are named in the docstrings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dp_operator import api, naming
from dp_operator.api import KIND
from dp_operator.client import ApiError
from dp_operator.render import Settings
from tests.simulation import process as process_module
from tests.simulation.cluster import NAMESPACE, Object
from tests.simulation.history import History, World
from tests.simulation.virtual import Loop

Script = Callable[[World], Awaitable[None]]


def play(script: Script, **changes: Any) -> World:
    """Run a script beside an operator on a virtual clock."""
    shape = {"seed": 1, "replicas": 1, "size": 2, "surge": 0, "unavailable": 1, "policy": "Managed", "faults": ()}
    history = History(**{**shape, **changes})

    async def scene() -> World:
        world = World(history)
        world.make()
        world.process.start()
        await script(world)
        world.process.stop()
        return world

    loop = Loop()
    try:
        return loop.run_until_complete(scene())
    finally:
        loop.finish()


async def until(world: World, holds: Callable[[], Any], *, within_s: float = 600) -> None:
    for _ in range(int(within_s / 0.05)):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("\n".join([*world.cluster.trace, world.unrest()]))


async def ready(world: World) -> None:
    await until(world, lambda: not world.unrest())


def failed(world: World) -> bool:
    return any(group.last_failures for group in api.decode(world.cr()).status.groups)


def condition(world: World, kind: str) -> api.Condition:
    return next(c for c in api.decode(world.cr()).status.conditions if c.type == kind)


def test_an_api_server_that_is_away_for_a_minute_costs_a_minute_and_no_group():
    async def script(world: World) -> None:
        await ready(world)
        before = set(world.cluster.by_uid)
        world.weather.down_until = world.cluster.now + 60
        await asyncio.sleep(90)
        assert {uid for uid in before if uid.startswith("Pod")} <= set(world.cluster.by_uid)
        await ready(world)

    play(script)


def test_retry_after_is_waited_for():
    async def script(world: World) -> None:
        await ready(world)
        await asyncio.sleep(30)
        world.weather.errors = [429]
        writes = world.process.writes
        world.edit(replicas=2)
        await until(world, lambda: not world.weather.errors)
        refused = world.cluster.now
        await until(world, lambda: world.process.writes > writes)
        assert world.cluster.now - refused >= 1.9, "the server asked for two seconds"
        await ready(world)

    play(script)


def test_a_webhook_that_fails_while_the_spec_changes_holds_up_no_failed_group():
    async def script(world: World) -> None:
        await ready(world)
        await asyncio.sleep(30)
        world.weather.webhook_down_until = world.cluster.now + 600
        before = {uid for uid in world.cluster.by_uid if uid.startswith("Pod-")}
        world.edit(engine={"image": "vllm/vllm-openai:v0.33.1"})
        await until(world, lambda: condition(world, "Progressing").reason == "RevisionUnchecked", within_s=10)
        assert "failed calling webhook" in condition(world, "Progressing").message
        assert before <= set(world.cluster.by_uid), "nothing is deleted for a revision that nobody has looked at"
        worker = next(p for p in world.pods() if "-w-" in p["metadata"]["name"])
        world.cluster._engine_ends(worker["metadata"]["uid"], 137, "OOMKilled", cascade=False)
        await until(world, lambda: failed(world), within_s=5)
        head = f"{worker['metadata']['name'].partition('-w-')[0]}-head"
        await until(world, lambda: head not in {pod["metadata"]["name"] for pod in world.pods()}, within_s=5)
        world.weather.webhook_down_until = 0.0
        await ready(world)
        assert not before & set(world.cluster.by_uid)

    play(script, replicas=2)


def test_a_namespace_that_is_terminating_is_said_and_not_hammered():
    async def script(world: World) -> None:
        create = world.cluster.create

        def refuse(manifest: dict[str, Any]) -> dict[str, Any]:
            if manifest["kind"] == "ConfigMap":
                raise ApiError(403, "Forbidden", "unable to create: namespace ns is being terminated")
            return create(manifest)

        world.cluster.create = refuse
        world.edit(startup={"scheduleTimeoutSeconds": 900})
        await asyncio.sleep(600)
        tries = sum("create ConfigMap" in line for line in world.cluster.trace)
        assert "being terminated" in condition(world, "Ready").message
        assert tries <= 25, f"{tries} attempts in ten minutes"

    play(script)


def test_a_name_that_a_stranger_has_is_left_alone_and_said_and_taken_once_it_is_free():
    async def script(world: World) -> None:
        stranger = {"kind": "Service", "metadata": {"name": "web", "namespace": NAMESPACE, "labels": {}}, "spec": {}}
        stranger["spec"] = {"clusterIP": "198.19.9.9", "selector": {"app": "theirs"}}
        theirs = world.cluster._store("Service", stranger, "ADDED")
        await asyncio.sleep(60)
        assert world.cluster.objects["Service", "web"]["metadata"]["uid"] == theirs["metadata"]["uid"]
        assert world.cluster.objects["Service", "web"]["spec"]["selector"] == {"app": "theirs"}
        assert condition(world, "Stalled").reason == "NameTaken"
        world.cluster._drop(theirs)
        await asyncio.sleep(60)
        assert condition(world, "Stalled").status == "False"
        assert naming.LABEL_UID in world.cluster.objects["Service", "web"]["metadata"]["labels"]

    play(script)


def test_a_group_does_not_wait_for_a_stranger_who_has_the_name_of_its_first_object():
    async def script(world: World) -> None:
        await ready(world)
        world.cluster.squatters.add("Service")  # the next one is a group's own
        world.edit(replicas=2)
        await until(world, lambda: world.cluster.strangers, within_s=30)
        (theirs,) = world.cluster.strangers
        await ready(world)
        assert world.cluster.found(theirs["metadata"]["uid"]) is theirs, "never adopted"
        group = next(g for g in api.decode(world.cr()).status.groups if g.index == 1)
        (failure,) = group.last_failures
        assert (failure.reason, failure.charged, group.restarts) == ("NameTaken", False, 0)
        assert theirs["metadata"]["name"] in failure.message
        assert condition(world, "Stalled").status == "False", "nothing is in anybody's way any more"

    play(script)


def test_a_watch_that_goes_silent_is_made_up_for_by_comparing_lists():
    """A resource is not left for ever at what its controller did not hear: kserve#6043."""

    async def script(world: World) -> None:
        await ready(world)
        await asyncio.sleep(30)
        world.weather.deaf["Pod"] = world.cluster.now + 1e6
        pod = world.pods()[0]
        world.cluster.delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"])
        await until(world, lambda: failed(world), within_s=800)

    play(script)


def test_an_idle_operator_writes_nothing_for_an_hour():
    async def script(world: World) -> None:
        await ready(world)
        await asyncio.sleep(10)
        writes = world.process.writes
        await asyncio.sleep(3600)
        assert world.process.writes == writes

    play(script, replicas=2)


def test_a_new_operator_that_renders_differently_touches_no_running_pod(monkeypatch):
    """kubernetes-notes 29 (lws#798): a new operator version must not restart everything."""

    async def script(world: World) -> None:
        await ready(world)
        pods = {uid for uid in world.cluster.by_uid if uid.startswith("Pod-")}
        monkeypatch.setattr(process_module, "SETTINGS", Settings(relay_image="relay:2"))
        world.process.die(restart_after_s=1)
        await asyncio.sleep(120)
        assert pods == {uid for uid in world.cluster.by_uid if uid.startswith("Pod-")}
        assert not world.unrest()

    play(script, replicas=2)


def test_a_resource_made_anew_under_the_same_name_takes_nothing_over_and_starts_beside_what_ends():
    """kubernetes-notes 31 (lws#983): children of an earlier resource of the same name are none of ours."""

    async def script(world: World) -> None:
        await ready(world)
        old = world.cr()["metadata"]["uid"]
        world.cluster._drop(world.cr())
        await asyncio.sleep(0.2)
        world.make()
        await ready(world)
        assert not [
            obj
            for (kind, _), obj in world.cluster.objects.items()
            if kind != KIND and obj["metadata"].get("labels", {}).get(naming.LABEL_UID) == old
        ]

    play(script)


def test_one_dead_rank_ends_the_whole_group_and_names_itself():
    """The others hang or cannot rejoin, so all of them go: vllm#32136, vllm#30112."""

    async def script(world: World) -> None:
        await ready(world)
        pods = {uid for uid in world.cluster.by_uid if uid.startswith("Pod-")}
        worker = next(p for p in world.pods() if "-w-" in p["metadata"]["name"])
        struck = world.cluster.now
        world.cluster._engine_ends(worker["metadata"]["uid"], 137, "OOMKilled", cascade=False)
        await until(world, lambda: failed(world))
        assert world.cluster.now - struck <= 5
        failure = next(g.last_failures[0] for g in api.decode(world.cr()).status.groups if g.last_failures)
        assert (failure.reason, failure.pod) == ("OutOfMemory", worker["metadata"]["name"])
        await ready(world)
        assert not pods & set(world.cluster.by_uid)

    play(script)


def test_an_engine_that_always_fails_is_tried_ever_more_rarely_and_is_given_up_where_asked():
    """No endless restart loop: lws#820/PR#877."""

    async def script(world: World) -> None:
        world.edit(engine={"image": "vllm/vllm-openai:broken"}, failurePolicy={"maxRestarts": 3})
        await asyncio.sleep(3600)
        assert condition(world, "Stalled").reason == "TooManyRestarts"
        assert sum("create Pod " in line for line in world.cluster.trace) <= 5

    play(script)


def test_a_conflict_on_a_deletion_is_not_taken_for_the_objects_end():
    async def script(world: World) -> None:
        await ready(world)
        delete, conflicts = world.cluster.delete, []

        def conflict_once(kind: str, name: str, uid: str, **how: Any) -> dict[str, Any]:
            if kind == "ConfigMap" and not conflicts:
                conflicts.append(name)
                raise ApiError(409, "Conflict", "the object has been modified")
            return delete(kind, name, uid, **how)

        world.cluster.delete = conflict_once
        world.edit(replicas=0)
        await ready(world)
        assert conflicts
        assert not world.cluster.all("ConfigMap")

    play(script)


def test_a_deadline_that_begins_with_the_operators_own_last_write_is_kept():
    async def script(world: World) -> None:
        world.edit(engine={"image": "vllm/vllm-openai:unpullable"})
        await until(world, lambda: failed(world), within_s=120)
        assert "ImagePullFailed" in condition(world, "Ready").message

    for seed in range(5):
        play(script, seed=seed)


def test_an_init_container_that_never_ends_is_named_beside_a_sidecar_and_its_group_does_not_hold_devices_for_ever():
    async def script(world: World) -> None:
        world.cluster.preparation_s = 1e6
        await until(world, lambda: failed(world), within_s=120)
        world.cluster.preparation_s = 0.0
        (group,) = api.decode(world.cr()).status.groups
        assert group.last_failures[0].reason == "ContainersNotStarted"
        assert "does not run its engine (nor do 1 more): init container fetch is" in group.last_failures[0].message
        await ready(world)

    play(script)


def test_a_start_without_its_config_map_begins_anew():
    async def script(world: World) -> None:
        await until(world, lambda: any("createdAt" in g for g in world.cr()["status"].get("groups", [])))
        found = world.cluster.all("ConfigMap")[0]
        world.cluster.delete("ConfigMap", found["metadata"]["name"], found["metadata"]["uid"])
        await ready(world)

    play(script)


def test_a_second_change_of_a_kept_object_is_applied_although_nobody_touched_it_after_the_first():
    async def script(world: World) -> None:
        await ready(world)

        def note() -> str:
            return world.cluster.objects["Service", "web"]["metadata"].get("annotations", {}).get("note", "")

        world.edit(service={"annotations": {"note": "a"}})
        await until(world, lambda: note() == "a", within_s=30)
        world.edit(service={"annotations": {"note": "b"}})
        await until(world, lambda: note() == "b", within_s=30)

    play(script)


async def fall(world: World, first: Object, second: Object, *, gap_s: float, lags_s: tuple[float, float]) -> None:
    """A pod runs out of memory and another ends after it; each node's kubelet reports with its own lag."""
    for pod, lag_s in zip((first, second), lags_s, strict=True):
        world.cluster.nodes[pod["spec"]["nodeName"]].report_lag_s = lag_s
    world.cluster._engine_ends(first["metadata"]["uid"], 137, "OOMKilled", cascade=False)
    await asyncio.sleep(gap_s)
    world.cluster._engine_ends(second["metadata"]["uid"], 1, "Error", cascade=False)


def test_an_end_is_reported_when_its_node_gets_to_it_and_not_in_the_order_of_the_ends():
    """What the choice of the cause is tried with: the first that is heard of may be the last that happened."""

    async def script(world: World) -> None:
        for node in world.cluster.nodes.values():
            node.capacity = 1
        await ready(world)
        reported: list[str] = []

        def saw(kind: str, event: str, obj: dict[str, Any]) -> None:
            statuses = obj.get("status", {}).get("containerStatuses") or [{}]
            ended = "terminated" in statuses[0].get("state", {}) or "lastState" in statuses[0]
            if kind == "Pod" and ended and obj["metadata"]["name"] not in reported:
                reported.append(obj["metadata"]["name"])

        world.cluster.watchers.append(saw)
        first, second = sorted(world.pods(), key=lambda pod: pod["metadata"]["name"])
        await fall(world, first, second, gap_s=0.3, lags_s=(0.9, 0.1))
        await asyncio.sleep(2)
        names = [first["metadata"]["name"], second["metadata"]["name"]]
        (ends,) = world.cluster.ends.values()
        assert [end.pod for end in ends] == names
        assert reported == names[::-1]
        await ready(world)

    play(script)


def test_a_rank_that_was_killed_first_is_the_cause_though_its_kubelet_reports_last():
    async def script(world: World) -> None:
        for node in world.cluster.nodes.values():
            node.capacity = 1
        await ready(world)
        first, second = sorted(world.pods(), key=lambda pod: pod["metadata"]["name"], reverse=True)
        await fall(world, first, second, gap_s=1.1, lags_s=(3.0, 0.05))
        await until(world, lambda: failed(world) and not world.unrest())
        (group,) = api.decode(world.cr()).status.groups
        (failure,) = group.last_failures
        assert (failure.pod, failure.reason) == (first["metadata"]["name"], "OutOfMemory")
        assert group.restarts == 1

    play(script)


@pytest.mark.parametrize("kind", ["Pod", "StatefulSet", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy"])
@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("after_s", [2, 60])
def test_an_object_that_lost_our_label_is_not_left_behind(kind, heard, after_s):
    """Nobody would take it away before the resource goes: a StatefulSet would even make its pods again and again."""

    async def script(world: World) -> None:
        await until(world, lambda: world.ours(kind))
        await asyncio.sleep(after_s)
        for name in [o["metadata"]["name"] for o in world.ours(kind)]:
            if not heard:
                world.process.break_watch(kind, until=world.cluster.now + 5)
            obj = world.cluster.objects.get((kind, name))
            if obj is None:
                continue  # it went with the one before
            kept = {key: value for key, value in obj["metadata"]["labels"].items() if key != naming.LABEL_MANAGED_BY}
            world.cluster.relabel(obj, kept)
            if kind in ("Pod", "StatefulSet", "ConfigMap"):
                world.cluster.injured.add(kept.get(naming.LABEL_INCARNATION, ""))
            await asyncio.sleep(400)
            await ready(world)
        unlabelled = [o["metadata"] for o in world.ours(kind) if naming.LABEL_MANAGED_BY not in o["metadata"]["labels"]]
        assert not unlabelled, unlabelled

    play(script)
