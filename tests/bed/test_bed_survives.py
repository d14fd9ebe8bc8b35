"""The cluster of `make up` outlives what happens to machines, on the real cluster. Run last: it restarts parts of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import processes
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster, choose

ROOT = Path(__file__).parents[2]
MARKER = "bed-survives"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed | KindCluster]:
    found = choose()
    assert found.is_up(), "these tests need the cluster: run `make up`"
    yield found
    assert found.is_up(), f"the cluster is left unusable: {found.status()}"
    installed = kubectl(found, "get", "deployment", "-n", "dp-system", "-o", "name")
    if installed:
        kubectl(found, "wait", "-n", "dp-system", "--for=condition=Available", installed.strip(), "--timeout=55s")
    for node in found.nodes:
        until(f"{node} is Ready at the end", lambda node=node: ready(found, node), lambda word: word == "True")


@pytest.fixture(scope="module")
def marker(bed: Bed | KindCluster) -> Iterator[str]:
    """Uid of an object that must still be there after everything."""
    kubectl(bed, "delete", "configmap", MARKER, "--ignore-not-found")
    kubectl(bed, "create", "configmap", MARKER)
    yield uid(bed)
    kubectl(bed, "delete", "configmap", MARKER)


def kubectl(bed: Bed | KindCluster, *words: str) -> str:
    argv = [bed.kubectl, "--kubeconfig", bed.kubeconfig, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def uid(bed: Bed | KindCluster) -> str:
    return kubectl(bed, "get", "configmap", MARKER, "-o", "jsonpath={.metadata.uid}")


def ready(bed: Bed | KindCluster, node: str) -> str:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return kubectl(bed, "get", "node", node, "-o", f"jsonpath={path}")


def until(what: str, look: Callable[[], Any], good: Callable[[Any], bool], *, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not good(last := look()):
        assert time.monotonic() < end, f"{what}: not within {within_s} s, last seen: {last!r}"
        time.sleep(0.2)


def up() -> None:
    """`make up`, as a person runs it."""
    argv = [sys.executable, "-m", "tests.cluster", "up"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def recorded() -> dict[str, processes.Started]:
    owner = processes.read_owner()
    assert owner is not None
    return dict(owner.processes)


def embedded(bed: Bed | KindCluster) -> Bed:
    if not isinstance(bed, Bed):
        pytest.skip("the processes of a kind cluster are the container engine's")
    return bed


def test_a_second_up_changes_nothing(bed: Bed | KindCluster, marker: str) -> None:
    def seen() -> list[object]:
        nodes = kubectl(bed, "get", "nodes", "-o", "jsonpath={.items[*].metadata.uid}")
        return [nodes, recorded() if isinstance(bed, Bed) else bed.status(), bed.kubeconfig.read_text()]

    before = seen()
    up()
    assert seen() == before
    assert uid(bed) == marker


def test_up_after_every_process_was_killed_goes_on_with_the_same_cluster(bed: Bed | KindCluster, marker: str) -> None:
    own = embedded(bed)
    killed = recorded()
    processes.stop_started(killed.values(), grace_s=0)
    assert not own.is_up()
    up()
    assert own.is_up()
    after = recorded()
    assert after.keys() == killed.keys()
    assert [name for name in killed if after[name] == killed[name]] == []
    assert uid(bed) == marker
    assert [ready(bed, node) for node in bed.nodes] == ["True"] * len(bed.nodes)


def test_api_calls_are_in_the_audit_log(bed: Bed | KindCluster, marker: str) -> None:
    """Also after the kill: the log goes on, and nothing in it is cut off."""
    assert marker
    size = bed.audit_log.stat().st_size
    name = f"bed-audit-{time.time_ns()}"
    kubectl(bed, "create", "configmap", name)
    kubectl(bed, "delete", "configmap", name)

    def calls() -> list[str]:
        with bed.audit_log.open("rb") as log:
            log.seek(size)
            events = [json.loads(line) for line in log.read().splitlines(keepends=True) if line.endswith(b"\n")]
        return [event["verb"] for event in events if (event.get("objectRef") or {}).get("name") == name]

    until("create and delete are logged", calls, lambda verbs: "create" in verbs and "delete" in verbs, within_s=10)


def test_a_partitioned_node_and_one_without_power_are_noticed_and_come_back(
    bed: Bed | KindCluster, marker: str
) -> None:
    """Both at once, to save half of the time that Kubernetes takes to notice."""
    _, dark, cut = bed.nodes
    try:
        bed.partition(cut)
        bed.stop_node(dark)
        for node in (cut, dark):
            until(f"{node} is noticed", lambda node=node: ready(bed, node), lambda word: word == "Unknown")
    finally:
        bed.heal(cut)
        bed.start_node(dark)
    for node in (cut, dark):
        until(f"{node} is back", lambda node=node: ready(bed, node), lambda word: word == "True")
    assert uid(bed) == marker
