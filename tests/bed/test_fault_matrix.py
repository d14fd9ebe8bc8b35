"""Every fault on the real cluster: named, the group replaced as a whole, Ready again, nothing left over; and how fast.

A group here loads for some seconds, as real ones load for minutes, so that its cold start is not all scheduling.
Groups that have nothing to do with each other suffer side by side; each is compared with its own cold start.
"""

from __future__ import annotations

import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from tests.bed import faults, operators
from tests.bed.recovery import Recovery, Table
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.conftest import make_space
from tests.e2e.diary import Diary, Entry
from tests.e2e.kube import ENGINE_IMAGE, LABELS, Cluster, Space, dpd, identities, until

LOAD_S = 8
BACK_OFF_S = 2
NAMED_WITHIN_S = 15  # the goal is 5 s; here it is about behaviour, on a machine that may be busy
READY_WITHIN_S = 120


class Ground(NamedTuple):
    """Where it happens, and who looks on."""

    space: Space
    diary: Diary
    bed: Bed | KindCluster
    home: str  # the node of the operator and of all heads
    away: list[str]  # the others


@dataclass(frozen=True)
class Case:
    """One fault of one group."""

    name: str
    says: str  # as the table has it
    strike: Callable[[Ground, str], float]
    reason: str
    rank: int | None = None
    expect: dict[str, Any] = field(default_factory=dict)  # more of the failure
    charged: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Group(NamedTuple):
    """A group that serves and is about to suffer."""

    name: str
    uid: str
    entry: Any
    pods: Any
    cold_start_s: float


class Suffered(NamedTuple):
    row: Recovery
    failure: Any
    entry: Any


@pytest.fixture(scope="module")
def ground(cluster: Cluster, bed: Bed | KindCluster, _namespaces: None) -> Iterator[Ground]:
    operators = cluster.call("GET", "/api/v1/namespaces/dp-system/pods")["items"]
    home = operators[0]["spec"]["nodeName"]
    away = [node for node in cluster.nodes() if node != home]
    with make_space(cluster) as space, Diary(space) as diary:
        yield Ground(space, diary, bed, home, away)


def small(name: str, *, faults: list[str] | None = None, args: list[str] | None = None, **changes: Any) -> Any:
    policy = {"failurePolicy": {"backoffSeconds": BACK_OFF_S}} | changes
    return dpd(name, size=2, faults=faults, args=["--load-seconds", str(LOAD_S), *(args or [])], **policy)


def begin(ground: Ground, manifest: Any) -> Group:
    name = manifest["metadata"]["name"]
    at = time.time()
    uid = ground.space.create(manifest)["metadata"]["uid"]
    ready = ground.diary.first(name, "is Ready", Entry.is_ready, within_s=READY_WITHIN_S)
    return Group(name, uid, ready.groups[0], ground.space.pods(name), ready.at - at)


def replaced(ground: Ground, before: Group, *, since: float, generation: int = 1) -> Entry:
    """Wait until another incarnation serves, with no pod of the one before, but what a dead node keeps."""
    space, old = ground.space, before.entry["incarnation"]
    entry = ground.diary.first(
        before.name,
        "another incarnation serves",
        lambda entry: entry.is_ready(generation=generation) and old not in {g["incarnation"] for g in entry.groups},
        since=since,
        within_s=READY_WITHIN_S,
    )
    stays = [name for name, pod in space.pods(before.name).items() if not pod["metadata"].get("deletionTimestamp")]
    assert not set(stays) & set(before.pods), "a pod was kept"
    return entry


def gone(space: Space, incarnation: str) -> None:
    until(
        f"nothing of incarnation {incarnation} is left",
        lambda: [
            f"{plural}/{item['metadata']['name']}"
            for plural in ("pods", "statefulsets", "services", "configmaps", "poddisruptionbudgets")
            for item in space.find(plural, f"{LABELS}/incarnation={incarnation}")
        ],
        lambda left: not left,
        within_s=60,
    )


def suffer(ground: Ground, case: Case, before: Group, struck: float) -> Suffered:
    """From the fault to the end of everything it started."""
    old = before.entry["incarnation"]

    def named(entry: Entry) -> bool:
        causes = [failure for group in entry.groups for failure in group.get("lastFailures", [])]
        return (
            any(failure["incarnation"] == old for failure in causes) and entry.condition("Ready")["status"] == "False"
        )

    told = ground.diary.first(before.name, "its failure is named", named, since=struck, within_s=NAMED_WITHIN_S + 45)
    failure = told.groups[0]["lastFailures"][0]
    again = replaced(ground, before, since=told.at)
    after_s = told.at - struck
    waited_s = after_s if case.reason == "NodeLost" else float(BACK_OFF_S) if case.charged else 0.0
    row = Recovery(case.says, case.reason, after_s, again.at - struck, before.cold_start_s, waited_s)
    return Suffered(row, failure, again.groups[0])


def check(ground: Ground, case: Case, seen: Suffered, table: Table) -> None:
    failure = seen.failure
    gone(ground.space, failure["incarnation"])
    assert failure["reason"] == case.reason, failure
    assert failure.get("rank") == case.rank, failure
    assert failure.get("charged", True) is case.charged, failure
    assert {key: failure.get(key) for key in case.expect} == case.expect, failure
    assert seen.entry["lastFailures"] == [failure], "one fault, one failure"
    assert seen.entry.get("restarts", 0) == int(case.charged)
    table.add(seen.row)


def worker(ground: Ground, name: str) -> str:
    (pod,) = ground.space.pods(name, role="worker")
    return str(pod)


def head(ground: Ground, name: str) -> str:
    return str(ground.space.head(name)["metadata"]["name"])


COMMANDED = {"engine": {"command": faults.COMMAND}}
LIMITED = {"engine": {"resources": {"limits": {"memory": "300Mi"}}}}

CASES = [
    Case(
        "rank",
        "`kill -9` of a rank's process in a headless pod",
        lambda g, n: faults.signal_rank(g.space, worker(g, n), signal.SIGKILL),
        "EngineExited",
        rank=1,
        expect={"exitCode": 0},
    ),
    Case(
        "engine",
        "`kill -9` of the head's engine",
        lambda g, n: faults.kill_engine(g.space, g.bed, head(g, n)),
        "EngineKilled",
        rank=0,
        expect={"exitCode": 137, "signal": "SIGKILL"},
    ),
    Case(
        "zero",
        "engine ends with exit code 0",
        lambda g, n: faults.end(g.space, worker(g, n), 0),
        "EngineExited",
        rank=1,
        expect={"exitCode": 0},
        changes=COMMANDED,
    ),
    Case(
        "segfault",
        "engine ends with exit code 139",
        lambda g, n: faults.end(g.space, worker(g, n), 139),
        "EngineKilled",
        rank=1,
        expect={"exitCode": 139, "signal": "SIGSEGV"},
        changes=COMMANDED,
    ),
    Case(
        "memory",
        "memory limit reached",
        lambda g, n: faults.signal_rank(g.space, worker(g, n), signal.SIGUSR1),
        "OutOfMemory",
        rank=1,
        changes=LIMITED,
        faults=["grow-memory:ranks=1,mib=1000,on=signal"],
    ),
    Case(
        "worker",
        "worker pod deleted",
        lambda g, n: faults.delete_pod(g.space, worker(g, n)),
        "PodDeleted",
        rank=1,
        charged=False,
    ),
    Case(
        "head",
        "head pod deleted",
        lambda g, n: faults.delete_pod(g.space, head(g, n)),
        "PodDeleted",
        rank=0,
        charged=False,
    ),
]


@pytest.fixture(scope="module")
def side_by_side(ground: Ground) -> Iterator[dict[str, Future[Suffered]]]:
    """All of CASES at the same time."""

    def run(case: Case) -> Suffered:
        before = begin(ground, small(case.name, faults=case.faults, **case.changes))
        all_ready.wait(timeout=READY_WITHIN_S)  # the cold starts disturb each other, and so do the recoveries
        return suffer(ground, case, before, case.strike(ground, case.name))

    all_ready = threading.Barrier(len(CASES))
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {case.name: pool.submit(run, case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_group_that_loses_a_member_is_replaced_as_a_whole_and_says_which_and_why(
    ground: Ground, side_by_side: dict[str, Future[Suffered]], case: Case, recoveries: Table
) -> None:
    """vllm#32136, vllm#30112, kserve#3845."""
    check(ground, case, side_by_side[case.name].result(), recoveries)


def on_two_nodes(ground: Ground, pool: ThreadPoolExecutor, *cases: Case) -> dict[str, Group]:
    """Groups that serve, the worker of each on a node of its own away from home."""
    started = [
        pool.submit(begin, ground, small(case.name, **faults.preferring(node, head_on=ground.home)))
        for case, node in zip(cases, ground.away, strict=True)
    ]
    groups = {future.result().name: future.result() for future in started}
    for case, node in zip(cases, ground.away, strict=True):
        assert ground.space.get("pods", worker(ground, case.name))["spec"]["nodeName"] == node
    return groups


def unmoved(*_: object) -> float:
    """The fault is not the group's own: it strikes nodes, and the test strikes it."""
    raise NotImplementedError


SILENT = Case("silent", "kubelet stopped", unmoved, "NodeLost", rank=1, charged=False)
PULLED = Case("pulled", "node cut off from the network", unmoved, "NodeLost", rank=1, charged=False)
TAINTED = Case("tainted", "node tainted `NoExecute`", unmoved, "DeletionByTaintManager", rank=1, charged=False)
DRAINED = Case("drained", "`kubectl drain`", unmoved, "EvictionByEvictionAPI", rank=1, charged=False)


def test_a_group_whose_node_falls_silent_starts_elsewhere_and_is_left_alone_when_the_node_comes_back(
    ground: Ground, healthy: None, recoveries: Table
) -> None:
    """A kubelet that stopped and a cable that was pulled, both at once: believed lost after the node's grace period."""
    if not isinstance(ground.bed, Bed):
        pytest.skip("the kubelet of a kind node is not ours to stop")
    own, (dark, cut) = ground.bed, ground.away
    with ThreadPoolExecutor(2) as pool:
        before = on_two_nodes(ground, pool, SILENT, PULLED)
        try:
            struck = time.time()
            own.stop(f"{dark}-kubelet")
            own.partition(cut)
            suffering = [(c, pool.submit(suffer, ground, c, before[c.name], struck)) for c in (SILENT, PULLED)]
            seen = [(case, future.result()) for case, future in suffering]
            after = {case.name: identities(ground.space.pods(case.name)) for case, _ in seen}
        finally:
            own.heal(cut)
            own.start(f"{dark}-kubelet")
    for (case, suffered), node in zip(seen, (dark, cut), strict=True):
        assert suffered.failure["node"] == node
        check(ground, case, suffered, recoveries)
        new = suffered.entry["incarnation"]
        pods = ground.space.find("pods", f"{LABELS}/incarnation={new}")
        assert identities({pod["metadata"]["name"]: pod for pod in pods}).items() <= after[case.name].items()
        assert len(pods) == 2


def test_a_group_whose_node_is_tainted_or_drained_starts_elsewhere(
    ground: Ground, healthy: None, recoveries: Table
) -> None:
    """pdb-operator/pdb-operator#81."""
    cluster, (tainted, drained) = ground.space.cluster, ground.away
    with ThreadPoolExecutor(2) as pool:
        before = on_two_nodes(ground, pool, TAINTED, DRAINED)
        try:
            struck = time.time()
            cluster.kubectl("taint", "node", tainted, "e2e=fault:NoExecute")
            suffering = pool.submit(suffer, ground, TAINTED, before[TAINTED.name], struck)
            struck = time.time()
            selector = f"--pod-selector={LABELS}/name={DRAINED.name}"
            cluster.kubectl(
                "drain",
                drained,
                "--ignore-daemonsets",
                "--delete-emptydir-data",
                "--timeout=60s",
                selector,
                timeout_s=90,
            )
            seen = [(TAINTED, suffering.result()), (DRAINED, suffer(ground, DRAINED, before[DRAINED.name], struck))]
        finally:
            cluster.kubectl("uncordon", drained)
            cluster.kubectl("taint", "node", tainted, "e2e=fault:NoExecute-")
    for (case, suffered), node in zip(seen, (tainted, drained), strict=True):
        assert suffered.failure["node"] == node
        check(ground, case, suffered, recoveries)


def changed(ground: Ground, name: str, **changes: Any) -> tuple[float, int]:
    """Change a spec. When, and the generation that it made."""
    at = time.time()
    return at, int(ground.space.spec(name, **changes)["metadata"]["generation"])


def corrected(
    ground: Ground, before: Group, says: str, wrong: dict[str, Any], right: dict[str, Any], why: str
) -> Recovery:
    """A spec with something wrong in it, which is said; and back, which needs no patience."""
    struck, generation = changed(ground, before.name, **wrong)

    def named(entry: Entry) -> bool:
        return (
            entry.generation >= generation
            and entry.condition("Ready")["status"] == "False"
            and why in entry.condition("Ready")["message"]
        )

    told = ground.diary.first(before.name, f"Ready says {why}", named, since=struck, within_s=60)
    at, generation = changed(ground, before.name, **right)
    again = replaced(ground, before, since=at, generation=generation)
    assert again.groups[0].get("restarts", 0) == 0
    for group in told.groups:
        gone(ground.space, group["incarnation"])
    return Recovery(
        says,
        re.findall(rf"\w*{why}\w*", told.condition("Ready")["message"])[0],
        told.at - struck,
        again.at - at,
        before.cold_start_s,
    )


@pytest.fixture(scope="module")
def specs_side_by_side(ground: Ground) -> Iterator[dict[str, Future[Recovery]]]:
    long = {"failurePolicy": {"backoffSeconds": 600, "maxBackoffSeconds": 600}}
    args = ["--load-seconds", str(LOAD_S)]

    def typo() -> Recovery:
        wrong = {"engine": {"image": f"localhost/dp-engine:typo-{uuid.uuid4().hex[:6]}"}}
        right = {"engine": {"image": ENGINE_IMAGE}}
        before = begin(ground, small("typo", **long))
        return corrected(ground, before, "image with a typo; Ready counts from the fix", wrong, right, "ImagePull")

    def rollback() -> Recovery:
        wrong = {"engine": {"args": [*args, "--fault", "crash-before-hello:ranks=1,code=3"]}}
        right = {"engine": {"args": args}}
        before = begin(ground, small("rollback", **long))
        says = "revision that crashes; Ready counts from the rollback"
        return corrected(ground, before, says, wrong, right, "EngineExited")

    def again() -> Recovery:
        manifest = small("again", drain={"endpointSeconds": 5})
        before = begin(ground, manifest)
        struck = time.time()
        ground.space.delete("dataparalleldeployments", "again")
        uid = ground.space.create(manifest)["metadata"]["uid"]
        assert ground.space.pods("again"), "the old pods take their time"
        entry = replaced(ground, before, since=struck)
        assert entry.deployment["metadata"]["uid"] == uid != before.uid
        until(
            "nothing of the old one is left", lambda: ground.space.leftovers(before.uid), lambda x: not x, within_s=60
        )
        says = "resource deleted and made again under its name, while old pods end"
        return Recovery(says, "", None, entry.at - struck, before.cold_start_s)

    with ThreadPoolExecutor(3) as pool:
        yield {run.__name__: pool.submit(run) for run in (typo, rollback, again)}


def test_a_wrong_image_is_named_and_the_right_one_taken_up_at_once(
    specs_side_by_side: dict[str, Future[Recovery]], recoveries: Table
) -> None:
    recoveries.add(specs_side_by_side["typo"].result())


def test_a_rollback_goes_on_at_once_whatever_the_back_off_of_the_broken_revision(
    specs_side_by_side: dict[str, Future[Recovery]], recoveries: Table
) -> None:
    """lws#567."""
    recoveries.add(specs_side_by_side["rollback"].result())


def test_a_deployment_made_again_under_its_name_does_not_touch_or_await_what_is_left_of_the_first(
    specs_side_by_side: dict[str, Future[Recovery]], recoveries: Table
) -> None:
    recoveries.add(specs_side_by_side["again"].result())


def test_a_rollout_and_a_start_end_as_if_operator_and_api_server_had_not_died_in_the_middle(
    ground: Ground, healthy: None, recoveries: Table
) -> None:
    """The operator is killed while a group is being taken away, the API server while others load."""
    space, diary = ground.space, ground.diary
    before = begin(ground, small("rolled"))
    at, generation = changed(ground, "rolled", engine={"env": [{"name": "A", "value": "b"}]})
    diary.first(
        "rolled", "is on its way", lambda e: any(g["state"] == "Stopping" for g in e.groups), since=at, within_s=30
    )
    struck = operators.kill_process(space.cluster, ground.bed)
    rolled = replaced(ground, before, since=struck, generation=generation)
    (entry,) = rolled.groups
    assert (entry.get("restarts", 0), entry.get("lastFailures", [])) == (0, [])
    gone(space, before.entry["incarnation"])
    recoveries.add(
        Recovery(
            "operator killed in mid-rollout; Ready counts from the change",
            "",
            None,
            rolled.at - at,
            before.cold_start_s,
        )
    )

    if not isinstance(ground.bed, Bed):
        return
    created = time.time()
    space.create(small("restarted"))
    loads = diary.first("restarted", "loads", lambda e: any(g.get("releasedAt") for g in e.groups), within_s=60)
    ground.bed.stop("apiserver")
    ground.bed.start("apiserver")
    ready = diary.first("restarted", "is Ready", Entry.is_ready, within_s=READY_WITHIN_S)
    (entry,) = ready.groups
    assert entry["incarnation"] == loads.groups[0]["incarnation"]
    assert (entry.get("restarts", 0), entry.get("lastFailures", [])) == (0, [])
    says = "API server restarted in mid-start; Ready counts from the creation"
    recoveries.add(Recovery(says, "", None, ready.at - created, before.cold_start_s))
