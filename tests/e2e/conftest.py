"""End-to-end tests: the operator as Helm installed it, on a real cluster, with its own rights and nothing more."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster, choose
from tests.e2e.kube import ENGINE_IMAGE, LABELS, Audit, Cluster, Space, dpd, until

# These take minutes in which nothing may happen. They begin before all other tests and end after them.
SLOW = ("idle_group", "late_group")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: any(name in getattr(item, "fixturenames", ()) for name in SLOW))


@pytest.fixture(scope="session", autouse=True)
def _slow_ones_begin(request: pytest.FixtureRequest) -> None:
    for name in SLOW:
        if any(name in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            space = value if isinstance(value, Space) else getattr(value, "space", None)
            if isinstance(space, Space):
                with contextlib.suppress(Exception):
                    report.sections.append((f"namespace {space.name}", space.report()))
    return report


@pytest.fixture(scope="session")
def bed() -> Bed | KindCluster:
    return choose()


@pytest.fixture(scope="session")
def cluster(bed: Bed | KindCluster) -> Cluster:
    kubeconfig = Path(os.environ.get("KUBECONFIG") or bed.kubeconfig)
    if not kubeconfig.exists():
        pytest.fail(f"these tests need a cluster, and {kubeconfig} does not exist: run `make up images install`")
    found = Cluster(kubeconfig=kubeconfig, kubectl=bed.kubectl)
    until("the operator runs (make images install)", lambda: _operator(found), within_s=60)
    return found


def _operator(cluster: Cluster) -> bool:
    deployment = cluster.call("GET", "/apis/apps/v1/namespaces/dp-system/deployments/dp-operator")
    return bool(deployment["status"].get("availableReplicas"))


@pytest.fixture(scope="session")
def audit(bed: Bed | KindCluster) -> Audit:
    return Audit(bed.audit_log)


@pytest.fixture(scope="session")
def _namespaces(cluster: Cluster) -> Iterator[None]:
    """No namespace stays: one that cannot be deleted is a failure too."""
    yield
    until(
        "all namespaces of this run are gone",
        lambda: [
            item["metadata"]["name"]
            for item in cluster.call("GET", f"/api/v1/namespaces?labelSelector={LABELS}/run={RUN}")["items"]
        ],
        lambda names: not names,
        within_s=180,  # the controller waits for half of a pod's grace period before it looks again
    )


RUN = uuid.uuid4().hex[:8]


@contextlib.contextmanager
def make_space(cluster: Cluster) -> Iterator[Space]:
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    meta = {"name": name, "labels": {f"{LABELS}/run": RUN}}
    cluster.call("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    try:
        yield Space(cluster, name)
    finally:
        cluster.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def space(cluster: Cluster, _namespaces: None) -> Iterator[Space]:
    with make_space(cluster) as made:
        yield made


@pytest.fixture(scope="module")
def shared_space(cluster: Cluster, _namespaces: None) -> Iterator[Space]:
    """One namespace for all tests of a module that look at the same group."""
    with make_space(cluster) as made:
        yield made


@pytest.fixture(scope="session")
def session_space(cluster: Cluster, _namespaces: None) -> Iterator[Callable[[], Space]]:
    """Makes namespaces that live as long as the run."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(make_space(cluster))


class IdleGroup(NamedTuple):
    space: Space
    mark: int  # in the audit log
    since: float  # monotonic time


@pytest.fixture(scope="session")
def idle_group(session_space: Callable[[], Space], audit: Audit) -> IdleGroup:
    """A Ready group that nobody touches from now on."""
    space = session_space()
    space.create(dpd("idle", size=2))
    space.until_ready("idle")
    time.sleep(3)
    return IdleGroup(space, audit.mark(), time.monotonic())


class LateGroup(NamedTuple):
    space: Space
    image: str
    head_node: str
    since: float  # monotonic time


@pytest.fixture(scope="session")
def late_group(session_space: Callable[[], Space], bed: Bed | KindCluster) -> Iterator[LateGroup]:
    """A group whose image every node has but the head's."""
    space = session_space()
    image = f"localhost/dp-engine:late-{uuid.uuid4().hex[:6]}"
    space.create(dpd("late", size=4, engine={"image": image}))
    pods = until(
        "all pods have a node",
        lambda: space.pods("late"),
        lambda pods: len(pods) == 4 and all(pod["spec"].get("nodeName") for pod in pods.values()),
        within_s=60,
    )
    places = {name: pod["spec"]["nodeName"] for name, pod in pods.items()}
    (head_node,) = {node for name, node in places.items() if name.endswith("-head")}
    others = set(places.values()) - {head_node}
    assert others, "the scheduler put all four pods on one node"
    for node in others:
        bed.tag_image(ENGINE_IMAGE, image, node_name=node)
    yield LateGroup(space, image, head_node, time.monotonic())
    for node in others | {head_node}:
        bed.remove_image(image, node_name=node)
