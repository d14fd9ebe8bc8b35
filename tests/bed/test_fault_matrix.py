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
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from tests.bed import faults, operators
from tests.bed.recovery import ColdStart, Recovery, Table
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.conftest import make_space
from tests.e2e.diary import Diary, Entry
from tests.e2e.kube import ENGINE_IMAGE, LABELS, Cluster, Space, dpd, identities, until

LOAD_S = 8
BACK_OFF_S = 2
NAMED_WITHIN_S = 10  # once it can be known. The goal is 5 s; here it is about behaviour, on a machine that may be busy
PROBE_S = 3 * 5  # the readiness probe of a head: three times without an answer for five seconds
UNHEALTHY_S = 5
READY_WITHIN_S = 120


class Ground(NamedTuple):
    """Where it happens, and who looks on."""

    space: Space
    diary: Diary
    bed: Bed | KindCluster
    home: str  # the node of the operator and of all heads
    away: list[str]  # the others


@dataclass(frozen=True, eq=False)
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
    cold: ColdStart


class Suffered(NamedTuple):
    """What a fault did. Times are seconds since the epoch."""

    before: Group
    failure: Any
    entry: Any
    struck_at: float
    named_at: float
    begun_at: float  # the next incarnation
    released_at: float
    ready_at: float


@pytest.fixture(scope="module")
def ground(cluster: Cluster, bed: Bed | KindCluster, _namespaces: None) -> Iterator[Ground]:
    operators = cluster.call("GET", "/api/v1/namespaces/dp-system/pods")["items"]
    home = operators[0]["spec"]["nodeName"]
    away = [node for node in cluster.nodes() if node != home]
    with make_space(cluster) as space, Diary(space) as diary:
        yield Ground(space, diary, bed, home, away)


@pytest.fixture
def alone(ground: Ground) -> None:
    """No group of an earlier test is left, which what strikes a node would strike, too, and which would start anew."""
    space = ground.space
    for item in space.find("dataparalleldeployments"):
        space.delete("dataparalleldeployments", item["metadata"]["name"])
    until("no pod is left", lambda: list(space.find("pods", f"{LABELS}/role")), lambda pods: not pods, within_s=60)


def small(name: str, *, faults: list[str] | None = None, args: list[str] | None = None, **changes: Any) -> Any:
    policy = {"failurePolicy": {"backoffSeconds": BACK_OFF_S}} | changes
    return dpd(name, size=2, faults=faults, args=["--load-seconds", str(LOAD_S), *(args or [])], **policy)


def begin(ground: Ground, manifest: Any) -> Group:
    name = manifest["metadata"]["name"]
    at = time.time()
    uid = ground.space.create(manifest)["metadata"]["uid"]
    ready = ground.diary.first(name, "is Ready", Entry.is_ready, within_s=READY_WITHIN_S)
    _, released_at = begun(ground, name, since=at)
    return Group(name, uid, ready.groups[0], ground.space.pods(name), ColdStart(released_at - at, ready.at - at))


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

    told = ground.diary.first(before.name, "its failure is named", named, since=struck, within_s=60)
    again = replaced(ground, before, since=told.at)
    return Suffered(
        before,
        told.groups[0]["lastFailures"][0],
        again.groups[0],
        struck,
        told.at,
        *begun(ground, before.name, since=struck, old={old}),
        again.at,
    )


def begun(ground: Ground, name: str, *, since: float, old: Container[str] = ()) -> tuple[float, float]:
    """When another incarnation than the old ones was entered into the ledger, and when it was released."""

    def first(what: str, holds: Callable[[Any], object]) -> float:
        def found(entry: Entry) -> bool:
            return any(holds(group) for group in entry.groups if group["incarnation"] not in old)

        return ground.diary.first(name, what, found, since=since, within_s=READY_WITHIN_S).at

    return first("another incarnation begins", bool), first("it is released", lambda group: group.get("releasedAt"))


def check(ground: Ground, case: Case, seen: Suffered, table: Table, *, since: float | None = None) -> None:
    """since: when the fault could be known, where that is not when it struck."""
    failure, struck = seen.failure, seen.struck_at
    since = min(since or struck, seen.named_at)
    gone(ground.space, failure["incarnation"])
    assert failure["reason"] == case.reason, failure
    assert failure.get("rank") == case.rank, failure
    assert failure.get("charged", True) is case.charged, failure
    assert {key: failure.get(key) for key in case.expect} == case.expect, failure
    assert seen.entry["lastFailures"] == [failure], "one fault, one failure"
    assert seen.entry.get("restarts", 0) == int(case.charged)
    assert seen.named_at - since <= NAMED_WITHIN_S
    table.add(
        Recovery(
            case.says,
            case.reason,
            seen.named_at - struck,
            seen.begun_at - struck,
            seen.released_at - struck,
            seen.ready_at - struck,
            seen.before.cold,
            waited_s=since - struck + (BACK_OFF_S if case.charged else 0),
        )
    )


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


def placed(ground: Ground, pool: ThreadPoolExecutor, places: dict[Case, str]) -> dict[Case, Group]:
    """Groups that serve, the member of each that its fault is about on a node away from home, the other at home."""
    started = {
        case: pool.submit(begin, ground, small(case.name, **faults.on_node(node, ground.home, head=case.rank == 0)))
        for case, node in places.items()
    }
    groups = {case: future.result() for case, future in started.items()}
    for case, node in places.items():
        assert ground.space.get("pods", victim(ground, case))["spec"]["nodeName"] == node
    return groups


def victim(ground: Ground, case: Case) -> str:
    return (worker if case.rank else head)(ground, case.name)


def time_of(what: str, look: Callable[[], object]) -> float:
    """When something came to be, by looking often."""
    until(what, look, within_s=READY_WITHIN_S)
    return time.time()


def silent(ground: Ground, node: str) -> bool:
    """Whether the cluster has noticed that a node's kubelet says nothing any more."""
    conditions = ground.space.cluster.call("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] != "True" for c in conditions)


def leaving(ground: Ground, pod: str) -> bool:
    return bool(ground.space.get("pods", pod)["metadata"].get("deletionTimestamp"))


def endpoints(ground: Ground, name: str) -> list[str]:
    """Pods that the client Service of a deployment sends requests to."""
    return [
        endpoint["targetRef"]["name"]
        for found in ground.space.find("endpointslices", f"kubernetes.io/service-name={name}")
        for endpoint in found["endpoints"] or []
        if endpoint["conditions"]["ready"]
    ]


def unmoved(*_: object) -> float:
    """The fault is not the group's own: it strikes nodes, and the test strikes it."""
    raise NotImplementedError


def of_node(name: str, says: str, reason: str, *, rank: int) -> Case:
    return Case(name, says, unmoved, reason, rank=rank, charged=False)


SILENT = of_node("silent", "kubelet stopped", "NodeLost", rank=1)
SILENT_HEAD = of_node("silent-head", "kubelet stopped, head's node", "NodeLost", rank=0)
PULLED = of_node("pulled", "node cut off from the network", "NodeLost", rank=1)
PULLED_HEAD = of_node("pulled-head", "node cut off from the network, head's node", "NodeLost", rank=0)
TAINTED = of_node("tainted", "node tainted `NoExecute`", "DeletionByTaintManager", rank=1)
TAINTED_HEAD = of_node("tainted-head", "node tainted `NoExecute`, head's node", "DeletionByTaintManager", rank=0)
DRAINED = of_node("drained", "`kubectl drain`", "EvictionByEvictionAPI", rank=1)


@pytest.mark.parametrize("cases", [(SILENT, SILENT_HEAD), (PULLED, PULLED_HEAD)], ids=["kubelet", "cable"])
def test_a_group_whose_node_falls_silent_starts_elsewhere_and_is_left_alone_when_the_node_comes_back(
    ground: Ground, healthy: None, alone: None, recoveries: Table, cases: tuple[Case, ...]
) -> None:
    """A kubelet that stopped, and a cable that was pulled: believed lost after the node's grace period.

    Nobody confirms the end of pods there, so they stay until the node is back, and are in nobody's way. A head that is
    among them gets no requests any more.
    """
    if not isinstance(ground.bed, Bed):
        pytest.skip("the kubelet of a kind node is not ours to stop")
    own, node = ground.bed, ground.away[0]
    with ThreadPoolExecutor(2 * len(cases) + 1) as pool:
        before = placed(ground, pool, dict.fromkeys(cases, node))
        victims = {case: victim(ground, case) for case in cases}
        for case in cases:
            assert endpoints(ground, case.name) == [before[case].entry["headPod"]]
        try:
            struck = time.time()
            own.stop(f"{node}-kubelet") if SILENT in cases else own.partition(node)
            silent_since = pool.submit(time_of, f"{node} is not Ready", lambda: silent(ground, node))
            left = {
                case: pool.submit(time_of, f"no endpoint of {case.name}", lambda n=case.name: not endpoints(ground, n))
                for case in cases
            }
            suffering = {case: pool.submit(suffer, ground, case, before[case], struck) for case in cases}
            seen = {case: future.result() for case, future in suffering.items()}
            after = {case: identities(ground.space.pods(case.name)) for case in cases}
        finally:
            own.start(f"{node}-kubelet") if SILENT in cases else own.heal(node)
    since = silent_since.result()
    for case, suffered in seen.items():
        assert suffered.failure["node"] == node
        assert victims[case] in after[case], "there is nobody who could say that it has ended"
        assert left[case].result() - since <= NAMED_WITHIN_S
        check(ground, case, suffered, recoveries, since=since)
        new = suffered.entry["incarnation"]
        pods = ground.space.find("pods", f"{LABELS}/incarnation={new}")
        assert identities({pod["metadata"]["name"]: pod for pod in pods}).items() <= after[case].items()
        assert len(pods) == 2
        assert endpoints(ground, case.name) == [suffered.entry["headPod"]]


def test_a_group_whose_node_is_tainted_or_drained_starts_elsewhere(
    ground: Ground, healthy: None, alone: None, recoveries: Table
) -> None:
    """pdb-operator/pdb-operator#81."""
    cluster, (tainted, drained) = ground.space.cluster, ground.away
    places = {TAINTED: tainted, TAINTED_HEAD: tainted, DRAINED: drained}
    with ThreadPoolExecutor(6) as pool:
        before = placed(ground, pool, places)
        victims = {case: victim(ground, case) for case in places}
        try:
            struck = {TAINTED: time.time(), TAINTED_HEAD: time.time()}
            cluster.kubectl("taint", "node", tainted, "e2e=fault:NoExecute")
            struck[DRAINED] = time.time()
            since = {
                case: pool.submit(time_of, f"{pod} is leaving", lambda pod=pod: leaving(ground, pod))
                for case, pod in victims.items()
            }
            suffering = {case: pool.submit(suffer, ground, case, before[case], struck[case]) for case in places}
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
            seen = {case: future.result() for case, future in suffering.items()}
        finally:
            cluster.kubectl("uncordon", drained)
            cluster.kubectl("taint", "node", tainted, "e2e=fault:NoExecute-")
    for case, node in places.items():
        assert seen[case].failure["node"] == node
        check(ground, case, seen[case], recoveries, since=since[case].result())


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
    wrong_ones = {group["incarnation"] for group in told.groups}
    for incarnation in wrong_ones:
        gone(ground.space, incarnation)
    return Recovery(
        says,
        re.findall(rf"\w*{why}\w*", told.condition("Ready")["message"])[0],
        told.at - struck,
        *(moment - at for moment in begun(ground, before.name, since=at, old=wrong_ones)),
        again.at - at,
        before.cold,
    )


HUNG = Case(
    "hung",
    "head's engine hangs (`kill -STOP`)",
    lambda g, n: faults.freeze_engine(g.space, g.bed, head(g, n)),
    "HeadUnhealthy",
    rank=0,
    changes={"failurePolicy": {"backoffSeconds": BACK_OFF_S, "unhealthySeconds": UNHEALTHY_S}},
)


@pytest.fixture(scope="module")
def slow_ones(ground: Ground) -> Iterator[dict[str, Future[Any]]]:
    """Faults that take long for other reasons than work, all at the same time."""
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
        moments = begun(ground, "again", since=struck, old={before.entry["incarnation"]})
        return Recovery(says, "", None, *(at - struck for at in moments), entry.at - struck, before.cold)

    def hung() -> tuple[Suffered, float]:
        before = begin(ground, small(HUNG.name, **HUNG.changes))
        struck = HUNG.strike(ground, HUNG.name)
        left = time_of("the hung head is no endpoint", lambda: not endpoints(ground, HUNG.name))
        return suffer(ground, HUNG, before, struck), left

    with ThreadPoolExecutor(4) as pool:
        yield {run.__name__: pool.submit(run) for run in (typo, rollback, again, hung)}


def test_a_wrong_image_is_named_and_the_right_one_taken_up_at_once(
    slow_ones: dict[str, Future[Any]], recoveries: Table
) -> None:
    recoveries.add(slow_ones["typo"].result())


def test_a_rollback_goes_on_at_once_whatever_the_back_off_of_the_broken_revision(
    slow_ones: dict[str, Future[Any]], recoveries: Table
) -> None:
    """lws#567."""
    recoveries.add(slow_ones["rollback"].result())


def test_a_deployment_made_again_under_its_name_does_not_touch_or_await_what_is_left_of_the_first(
    slow_ones: dict[str, Future[Any]], recoveries: Table
) -> None:
    recoveries.add(slow_ones["again"].result())


def test_a_head_that_hangs_gets_no_requests_and_is_replaced_after_unhealthy_seconds(
    ground: Ground, slow_ones: dict[str, Future[Any]], recoveries: Table
) -> None:
    seen, left_at = slow_ones["hung"].result()
    assert left_at - seen.struck_at <= PROBE_S + NAMED_WITHIN_S
    assert seen.named_at - left_at >= UNHEALTHY_S - 4, "endpoints are told of late, and times are whole seconds"
    check(ground, HUNG, seen, recoveries, since=left_at + UNHEALTHY_S)
    own_s = seen.before.pods[seen.before.entry["headPod"]]["spec"]["terminationGracePeriodSeconds"]
    assert seen.begun_at - seen.named_at < own_s, "it heeds no SIGTERM and is not waited for any longer"
    assert endpoints(ground, HUNG.name) == [seen.entry["headPod"]]


def test_a_rollout_and_a_start_end_as_if_operator_and_api_server_had_not_died_in_the_middle(
    ground: Ground, healthy: None, alone: None, recoveries: Table
) -> None:
    """The operator is killed while a group is being taken away, the API server while others load."""
    space, diary = ground.space, ground.diary
    before = begin(ground, small("rolled"))
    at, generation = changed(ground, "rolled", engine={"env": [{"name": "A", "value": "b"}]})
    diary.first(
        "rolled", "is on its way", lambda e: any(g["state"] == "Stopping" for g in e.groups), since=at, within_s=30
    )
    already = operators.restarts(space.cluster)
    struck = operators.kill_process(space.cluster, ground.bed)
    away_s = time_of("the operator runs again", lambda: operators.restarts(space.cluster) > already) - struck
    rolled = replaced(ground, before, since=struck, generation=generation)
    (entry,) = rolled.groups
    assert (entry.get("restarts", 0), entry.get("lastFailures", [])) == (0, [])
    gone(space, before.entry["incarnation"])
    says = "operator killed in mid-rollout; Ready counts from the change"
    moments = begun(ground, "rolled", since=at, old={before.entry["incarnation"]})
    after = (moment - at for moment in moments)
    recoveries.add(Recovery(says, "", None, *after, rolled.at - at, before.cold, waited_s=away_s))

    if not isinstance(ground.bed, Bed):
        return
    created = time.time()
    space.create(small("restarted"))
    loads = diary.first("restarted", "loads", lambda e: any(g.get("releasedAt") for g in e.groups), within_s=60)
    stopped = time.time()
    ground.bed.stop("apiserver")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(time_of, "the API server is ready", lambda: space.cluster.raw("GET", "/readyz"))
        ground.bed.start("apiserver")
    away_s = answers.result() - stopped
    ready = diary.first("restarted", "is Ready", Entry.is_ready, within_s=READY_WITHIN_S)
    (entry,) = ready.groups
    assert entry["incarnation"] == loads.groups[0]["incarnation"]
    assert (entry.get("restarts", 0), entry.get("lastFailures", [])) == (0, [])
    says = "API server restarted in mid-start; Ready counts from the creation"
    moments = begun(ground, "restarted", since=created)
    after = (moment - created for moment in moments)
    recoveries.add(Recovery(says, "", None, *after, ready.at - created, before.cold, waited_s=away_s))
