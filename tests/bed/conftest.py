"""What these tests need of the cluster: the same as the end-to-end tests, and its machines besides."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.bed.recovery import Table
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.conftest import _namespaces, audit, bed, cluster, pytest_runtest_makereport, shared_space, space
from tests.e2e.kube import Cluster, until

__all__ = ["_namespaces", "audit", "bed", "cluster", "pytest_runtest_makereport", "shared_space", "space"]


# From faults of one group to those of the whole cluster.
ORDER = ("fault_matrix", "drain", "operator_faults", "upgrade", "bed_survives")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.name, -1))


@pytest.fixture(scope="session")
def recoveries(pytestconfig: pytest.Config) -> Iterator[Table]:
    table = Table()
    yield table
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else sys.stdout:
        table.save()


@pytest.fixture
def healthy(bed: Bed | KindCluster, cluster: Cluster) -> Iterator[None]:
    """All nodes are Ready, without taints, and take pods, before and after."""
    until_healthy(cluster)
    yield
    until_healthy(cluster)


def until_healthy(cluster: Cluster) -> None:
    def sick() -> list[str]:
        return [
            item["metadata"]["name"]
            for item in cluster.call("GET", "/api/v1/nodes")["items"]
            if item["spec"].get("taints")
            or item["spec"].get("unschedulable")
            or not any(c["type"] == "Ready" and c["status"] == "True" for c in item["status"]["conditions"])
        ]

    until("no node is sick", sick, lambda nodes: not nodes, within_s=90)
