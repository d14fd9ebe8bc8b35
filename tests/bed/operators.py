"""Ends of the operator itself."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tests.cluster.bed import Bed
from tests.cluster.errors import BedError
from tests.cluster.kind import KindCluster
from tests.e2e.kube import Cluster, RefusedError

PODS = "/api/v1/namespaces/dp-system/pods"


def kill_process(cluster: Cluster, bed: Bed | KindCluster) -> float:
    """SIGKILL for the operator's process, which the kubelet starts again. Returns when, in seconds since the epoch."""
    at = time.time()
    for pod in _pods(cluster):
        for container in pod["status"].get("containerStatuses", []):
            if "running" in container["state"]:
                with contextlib.suppress(BedError):  # it may have ended by itself meanwhile
                    bed.signal_container(
                        pod["spec"]["nodeName"], container["containerID"].partition("://")[2], "SIGKILL"
                    )
    return at


def restarts(cluster: Cluster) -> int:
    """How often the kubelet has started what runs of the operator again."""
    containers = [one for pod in _pods(cluster) for one in pod["status"].get("containerStatuses", [])]
    return sum(int(one["restartCount"]) for one in containers if "running" in one["state"])


def delete_pod(cluster: Cluster) -> float:
    """Take the operator's pod away without any grace; its Deployment makes another."""
    at = time.time()
    for pod in _pods(cluster):
        with contextlib.suppress(RefusedError):
            cluster.call("DELETE", f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
    return at


def _pods(cluster: Cluster) -> list[Any]:
    found: list[Any] = cluster.call("GET", PODS)["items"]
    return found
