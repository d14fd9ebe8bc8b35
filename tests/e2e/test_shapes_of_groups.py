"""Groups of other shapes than one colocated rank per pod."""

from __future__ import annotations

import pytest

from tests.e2e.kube import LABELS, RefusedError, Space, condition, dpd, identities, until


def test_a_dedicated_head_serves_without_running_a_rank(space: Space) -> None:
    space.create(dpd("api", size=2, dataParallel={"headPlacement": "Dedicated"}))
    space.until_ready("api")
    assert len(space.pods("api", role="worker")) == 2
    head = space.head("api")["metadata"]["name"]
    processes = space.kubectl("exec", head, "-c", "engine", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "--data-parallel-size-local 0" in processes
    assert "EngineCore" not in processes
    space.complete_many("api", 8)
    served = space.served("api")
    assert sum(served.values()) == 8
    assert all(served[rank] for rank in (0, 1)), served


def test_a_pod_can_run_two_ranks_which_share_its_devices(space: Space) -> None:
    space.create(dpd("pairs", size=4, dataParallel={"sizeLocal": 2}, devices={"assignment": "Slots", "perNode": 2}))
    status = space.until_ready("pairs")
    assert status["ranks"]["summary"] == "4/4"
    pods = space.pods("pairs")
    assert len(pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 2
    for name in pods:
        assert space.kubectl("exec", name, "-c", "engine", "--", "printenv", "CUDA_VISIBLE_DEVICES").strip() == "0,1"
    space.complete_many("pairs", 16)
    served = space.served("pairs")
    assert all(served[rank] for rank in range(4)), served


def test_a_moe_group_with_a_colocated_head_serves(space: Space) -> None:
    space.create(dpd("moe", size=2, args=["--moe"], model={"architecture": "MoE"}))
    space.until_ready("moe")
    space.complete_many("moe", 8)
    served = space.served("moe")
    assert all(served[rank] for rank in (0, 1)), served


def test_a_moe_group_with_a_dedicated_head_is_refused_with_the_reason(space: Space) -> None:
    manifest = dpd("moe", size=2, model={"architecture": "MoE"}, dataParallel={"headPlacement": "Dedicated"})
    with pytest.raises(RefusedError) as refused:
        space.create(manifest)
    assert "rank 0 of an MoE group binds the group's store on the head's IP" in refused.value.message
    assert "write headPlacement: Colocated" in refused.value.message


def test_scaling_adds_and_removes_whole_groups_and_leaves_the_others_alone(space: Space) -> None:
    uid = space.create(dpd("scaled", size=2))["metadata"]["uid"]
    space.until_ready("scaled")
    first = identities(space.pods("scaled"))

    space.kubectl("scale", "dpd/scaled", "--replicas=2")
    status = space.until_ready("scaled", generation=2)
    assert status["readyReplicas"] == 2
    assert status["ranks"]["summary"] == "4/4"
    assert len(space.pods("scaled")) == 4
    assert identities(space.pods("scaled", group=0)) == first
    space.complete_many("scaled", 16)
    assert all(sum(space.served("scaled", group).values()) for group in (0, 1))

    space.kubectl("scale", "dpd/scaled", "--replicas=1")
    until("group 1 is gone", lambda: space.pods("scaled", group=1), lambda pods: not pods, within_s=30)
    status = space.until_ready("scaled", generation=3)
    assert status["readyReplicas"] == 1
    assert identities(space.pods("scaled")) == first

    space.kubectl("scale", "dpd/scaled", "--replicas=0")
    kept = ["services/scaled", "networkpolicies/scaled"]
    until("only what belongs to the resource is left", lambda: space.leftovers(uid), lambda x: x == kept, within_s=30)
    status = space.status("scaled")
    assert status["ranks"] == {"summary": "0/0"} or status["ranks"]["expected"] == 0
    scale = space.cluster.call("GET", space.path("dataparalleldeployments", "scaled") + "/scale")
    assert scale["status"]["replicas"] == 0
    assert scale["status"]["selector"] == f"{LABELS}/uid={uid},{LABELS}/role=head"


def test_what_the_spec_says_later_replaces_a_group_only_where_its_pods_must_change(space: Space) -> None:
    space.create(dpd("changed", size=2))
    space.until_ready("changed")
    before = identities(space.pods("changed"))

    space.spec("changed", startup={"timeoutSeconds": 1234}, failurePolicy={"backoffSeconds": 3})
    space.until_ready("changed", generation=2)
    assert identities(space.pods("changed")) == before

    space.spec("changed", engine={"args": ["--load-seconds", "0.2"]})
    space.until_ready("changed", generation=3)
    after = space.pods("changed")
    assert len(after) == 2
    assert not set(after) & set(before)
    group = space.group("changed")
    assert group["restarts"] == 0
    assert not group.get("lastFailures")


def test_a_suspended_deployment_has_no_pods_until_it_is_resumed(space: Space) -> None:
    space.create(dpd("paused", size=2))
    space.until_ready("paused")
    space.spec("paused", suspend=True)
    until("no pod is left", lambda: space.pods("paused"), lambda pods: not pods, within_s=30)
    said = until(
        "Ready says why it is not",
        lambda: condition(space.status("paused"), "Ready"),
        lambda ready: ready["reason"] == "Suspended",
        within_s=5,
    )
    assert said["status"] == "False"
    space.spec("paused", suspend=False)
    space.until_ready("paused", generation=3)
    assert len(space.pods("paused")) == 2
