"""A HorizontalPodAutoscaler moves the number of groups through the scale subresource."""

from __future__ import annotations

from typing import Any

from tests.e2e.kube import Space, dpd, identities, until

AUTOSCALERS = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers"


def autoscaler(*, least: int, most: int) -> Any:
    """Its bounds move the target whatever the metric says, which nobody serves here."""
    target = {"apiVersion": "dataparallel.io/v1alpha1", "kind": "DataParallelDeployment", "name": "scaled"}
    metric = {"type": "External", "external": {"metric": {"name": "queue"}, "target": {"type": "Value", "value": "1"}}}
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "scaled"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [metric],
            "behavior": behavior,
        },
    }


def test_a_horizontal_pod_autoscaler_adds_groups_and_takes_away_the_last_ones(space: Space) -> None:
    """llm-d-autoscaling#1568, aibrix#2288."""
    path = AUTOSCALERS.format(space.name)
    space.create(dpd("scaled", size=1))
    space.until_ready("scaled")
    first = identities(space.pods("scaled"))
    space.cluster.call("POST", path, autoscaler(least=3, most=4))
    status = until(
        "three groups serve",
        lambda: space.status("scaled"),
        lambda found: found["readyReplicas"] == 3,
        within_s=90,
    )
    assert sorted(group["index"] for group in status["groups"]) == [0, 1, 2]
    able = until(
        "the autoscaler could read and write the scale",
        lambda: {c["type"]: c["status"] for c in space.cluster.call("GET", f"{path}/scaled")["status"]["conditions"]},
        lambda found: found.get("AbleToScale") == "True",
        within_s=30,
    )
    assert able
    patch = {"spec": {"minReplicas": 1, "maxReplicas": 1}}
    space.cluster.call("PATCH", f"{path}/scaled", patch, content_type="application/merge-patch+json")
    until(
        "one group is left",
        lambda: space.status("scaled"),
        lambda found: found["replicas"] == found["readyReplicas"] == 1,
        within_s=90,
    )
    assert identities(space.pods("scaled")) == first
