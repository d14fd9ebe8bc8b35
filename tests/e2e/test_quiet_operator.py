"""An operator that has nothing to do does nothing, and its own restart is nothing to do."""

from __future__ import annotations

import time

from tests.e2e.conftest import IdleGroup
from tests.e2e.kube import Audit, Cluster, Space, dpd, identities, until

IDLE_S = 120


def operators(cluster: Cluster) -> dict[str, bool]:
    """Operator pods -> Ready."""
    selector = "labelSelector=app.kubernetes.io/name=dp-operator"
    pods = cluster.call("GET", f"/api/v1/namespaces/dp-system/pods?{selector}")["items"]
    return {
        pod["metadata"]["name"]: any(
            found["type"] == "Ready" and found["status"] == "True" for found in pod["status"].get("conditions", [])
        )
        for pod in pods
    }


def test_restarting_the_operator_touches_no_pod_of_a_serving_or_a_starting_group(space: Space, audit: Audit) -> None:
    space.create(dpd("serving", size=2))
    space.until_ready("serving")
    space.create(dpd("starting", size=2, faults=["slow-load:ranks=1,seconds=12"]))
    until(
        "the second group loads",
        lambda: space.group("starting")["stages"],
        lambda stages: stages["connected"] == "0-1",
        within_s=60,
    )
    pods = identities(space.pods("serving") | space.pods("starting"))
    incarnations = [space.group(name)["incarnation"] for name in ("serving", "starting")]
    before = set(operators(space.cluster))
    mark = audit.mark()
    space.cluster.kubectl("--namespace", "dp-system", "rollout", "restart", "deployment/dp-operator")
    until(
        "another operator is ready",
        lambda: operators(space.cluster),
        lambda pods: all(pods.values()) and pods and not set(pods) & before,
        within_s=60,
    )
    space.until_ready("starting")
    assert identities(space.pods("serving") | space.pods("starting")) == pods
    assert [space.group(name)["incarnation"] for name in ("serving", "starting")] == incarnations
    writes = [call for call in audit.writes(mark) if call.namespace == space.name]
    assert {call.resource for call in writes} <= {"dataparalleldeployments/status", "events"}, writes
    assert not [call for call in writes if call.name == "serving"], writes


def test_an_idle_group_costs_the_operator_no_write_in_two_minutes(idle_group: IdleGroup, audit: Audit) -> None:
    space, mark, since = idle_group
    until("two minutes are over", lambda: time.monotonic() - since, lambda passed: passed > IDLE_S, within_s=IDLE_S + 5)
    # Other tests give the operator work meanwhile, each in a namespace of its own.
    own = (space.name, "dp-system", "")
    assert [call for call in audit.writes(mark) if call.namespace in own] == []
    assert space.group("idle")["state"] == "Serving"
