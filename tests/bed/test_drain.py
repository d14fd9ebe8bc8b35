"""One node is emptied by `kubectl drain` while deployments with every kind of limit have groups on it."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.conftest import make_space
from tests.e2e.diary import Diary, Entry
from tests.e2e.kube import LABELS, Cluster, Object, Space, dpd, until

DRAIN_NODES = "dataparallel.io/drain-nodes"


class Drained(NamedTuple):
    """What happened from the first eviction until the node was empty."""

    space: Space
    node: str
    entries: dict[str, list[Entry]]  # of each deployment
    budgets: dict[str, Object]  # open ones, as they were seen
    closed_said: Any  # condition DrainBlocked of the closed deployment, while it blocked
    held_back: str  # what kubectl said about it


@contextlib.contextmanager
def only(cluster: Cluster, node: str) -> Iterator[None]:
    """Pods that are made meanwhile go to that node, and may leave it later."""
    others = [name for name in cluster.nodes() if name != node]
    cluster.kubectl("cordon", *others)
    try:
        yield
    finally:
        cluster.kubectl("uncordon", *others)


def on_node(space: Space, node: str) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in space.find("pods", f"{LABELS}/role")
        if pod["spec"].get("nodeName") == node and not pod["metadata"].get("deletionTimestamp")
    ]


@pytest.fixture(scope="module")
def drained(cluster: Cluster, bed: Bed | KindCluster, _namespaces: None) -> Iterator[Drained]:
    """Three groups with maxUnavailable 1, one with a successor first, one closed, and one that is starting."""
    home = cluster.call("GET", "/api/v1/namespaces/dp-system/pods")["items"][0]["spec"]["nodeName"]
    node = next(name for name in cluster.nodes() if name != home)
    with make_space(cluster) as space, Diary(space) as diary:
        with only(cluster, node):
            space.create(dpd("several", size=1, replicas=3))
            space.create(dpd("first", size=2, rollout={"maxSurge": 1, "maxUnavailable": 0}))
            space.create(dpd("closed", size=1, disruption={"policy": "Closed"}))
            space.create(dpd("starting", size=1, faults=["slow-load:seconds=600"]))
            until("all pods are on one node", lambda: on_node(space, node), lambda names: len(names) == 7, within_s=30)
        for name in ("several", "first", "closed"):
            space.until_ready(name)
        argv = ["drain", node, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=120s"]
        began = time.time()
        process = subprocess.Popen(
            cluster.command(*argv, f"--pod-selector={LABELS}/role"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        budgets: dict[str, Object] = {}
        try:

            def all_but_the_closed_one_gone() -> list[str]:
                for budget in space.find("poddisruptionbudgets"):
                    if budget["spec"]["minAvailable"] == 0:
                        budgets[budget["metadata"]["name"]] = budget
                return [name for name in on_node(space, node) if not name.startswith("closed-")]

            until("others have left", all_but_the_closed_one_gone, lambda names: not names, within_s=100)
            assert process.poll() is None, process.communicate()[0]
            said = diary.entries("closed")[-1].condition("DrainBlocked")
            annotation = {"metadata": {"annotations": {DRAIN_NODES: node}}}
            space.merge("dataparalleldeployments", "closed", annotation)
            text, _ = process.communicate(timeout=120)
            assert process.returncode == 0, text
            assert not on_node(space, node)
            for name in ("several", "first", "closed"):
                space.until_ready(name)
            entries = {name: diary.entries(name, since=began) for name in ("several", "first", "closed", "starting")}
        finally:
            process.kill()
            process.communicate()
            cluster.kubectl("uncordon", node)
        yield Drained(space, node, entries, budgets, said, text)


def test_a_drain_moves_several_groups_one_after_the_other(drained: Drained) -> None:
    """pdb-operator/pdb-operator#81."""
    entries = drained.entries["several"]
    assert min(entry.deployment["status"]["readyReplicas"] for entry in entries) == 2
    failures = [group["lastFailures"][0] for group in drained.space.status("several")["groups"]]
    assert [(f["reason"], f["charged"], f["node"]) for f in failures] == [
        ("EvictionByEvictionAPI", False, drained.node)
    ] * 3


def test_a_group_that_may_not_be_missing_is_evicted_only_once_its_successor_is_ready(drained: Drained) -> None:
    entries = drained.entries["first"]
    assert min(entry.deployment["status"]["readyReplicas"] for entry in entries) == 1
    assert {entry.condition("Available")["status"] for entry in entries} == {"True"}
    reasons = [entry.condition("DrainBlocked")["reason"] for entry in entries]
    assert "SuccessorStarting" in reasons
    assert reasons[-1] == "AsExpected"
    (group,) = drained.space.status("first")["groups"]
    assert not group.get("lastFailures")


def test_a_closed_group_blocks_a_drain_and_says_what_lets_it_go(drained: Drained) -> None:
    said = drained.closed_said
    assert (said["status"], said["reason"]) == ("True", "PolicyClosed")
    assert f"set annotation {DRAIN_NODES} to {drained.node}" in said["message"]
    assert "Cannot evict pod as it would violate the pod's disruption budget" in drained.held_back
    assert drained.entries["closed"][-1].condition("DrainBlocked")["status"] == "False"


def test_a_group_that_does_not_serve_is_let_go_at_once(drained: Drained) -> None:
    first = drained.entries["starting"][0].groups[0]
    (group,) = drained.space.status("starting")["groups"]
    assert group["incarnation"] != first["incarnation"]
    assert group["lastFailures"][0]["reason"] == "EvictionByEvictionAPI"


def test_an_open_budget_lets_pods_go_that_are_not_ready_either(drained: Drained) -> None:
    assert drained.budgets
    for budget in drained.budgets.values():
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for budget in drained.space.find("poddisruptionbudgets"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"
        assert budget["spec"]["minAvailable"] > 0
