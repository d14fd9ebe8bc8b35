"""The operator dies at random moments of a start, a rollout and a failure; the outcome is the same as without."""

from __future__ import annotations

import random
import signal
import threading
import time
import uuid

import pytest

from tests.bed import faults, operators
from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.e2e.kube import LABELS, Cluster, Film, Space, dpd, until

DEATHS = 4


@pytest.fixture(params=[uuid.uuid4().int % 10_000])
def seed(request: pytest.FixtureRequest) -> int:
    """Shown in the test's name: what failed can be tried again."""
    return int(request.param)


def test_start_rollout_and_failure_end_the_same_whenever_the_operator_dies(
    space: Space, cluster: Cluster, bed: Bed | KindCluster, healthy: None, seed: int
) -> None:
    chance = random.Random(seed)
    args = ["--load-seconds", "3"]
    policy = {"failurePolicy": {"backoffSeconds": 2}}
    space.create(dpd("rolled", size=1, replicas=2, args=args))
    space.create(dpd("failed", size=2, args=args, **policy))
    before = {name: space.until_ready(name)["groups"] for name in ("rolled", "failed")}
    (victim,) = space.pods("failed", role="worker")

    def kill() -> None:
        for number in range(DEATHS):
            time.sleep(chance.uniform(0.2, 5))
            # The kubelet lets a container wait that is killed again and again; a pod's successor begins at once.
            operators.delete_pod(cluster) if number else operators.kill_process(cluster, bed)

    killer = threading.Thread(target=kill)
    with Film(space, "pods") as film:
        killer.start()
        space.create(dpd("started", size=2, args=args))
        space.spec("rolled", engine={"args": [*args, "--seed", "1"]})
        faults.signal_rank(space, victim, signal.SIGKILL)
        killer.join()
        after = {
            "started": space.until_ready("started")["groups"],
            "rolled": space.until_ready("rolled", generation=2)["groups"],
            "failed": until(
                "the group that failed serves again",
                lambda: space.status("failed")["groups"],
                lambda groups: (
                    groups[0]["incarnation"] != before["failed"][0]["incarnation"] and groups[0]["state"] == "Serving"
                ),
                within_s=90,
            ),
        }
    made: dict[str, set[str]] = {}
    for pod in film.frames:
        labels = pod["metadata"]["labels"]
        made.setdefault(labels[f"{LABELS}/name"], set()).add(labels[f"{LABELS}/incarnation"])
    for name, groups in after.items():
        wanted = {group["incarnation"] for group in [*groups, *before.get(name, [])]}
        assert made[name] == wanted, f"{name}: no incarnation but those of before and after"
    assert [(g.get("restarts", 0), len(g.get("lastFailures", []))) for g in after["started"]] == [(0, 0)]
    assert [(g.get("restarts", 0), len(g.get("lastFailures", []))) for g in after["rolled"]] == [(0, 0)] * 2
    (group,) = after["failed"]
    (failure,) = group["lastFailures"]
    assert (failure["reason"], failure["rank"], failure["charged"]) == ("EngineExited", 1, True)
    assert group["restarts"] == 1
    space.complete_many("failed", 4)
