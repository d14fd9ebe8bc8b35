"""Changes of the spec reach the groups within the limits, and stop where they do harm."""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.diary import Diary, Entry
from tests.e2e.kube import LABELS, Cluster, RefusedError, Space, condition, dpd, identities, until

GOOD = ["--load-seconds", "0.1"]
BROKEN = [*GOOD, "--fault", "crash-before-hello:code=3"]
PATIENT = {"failurePolicy": {"backoffSeconds": 600, "maxBackoffSeconds": 600}}


def change(space: Space, name: str, **changes: Any) -> int:
    return int(space.spec(name, **changes)["metadata"]["generation"])


def serving(entries: list[Entry]) -> list[int]:
    """How many groups served, state by state."""
    return [entry.deployment["status"].get("readyReplicas", 0) for entry in entries]


def test_a_broken_revision_stops_at_its_first_group_and_a_corrected_one_goes_on_from_there(space: Space) -> None:
    """lws#820/PR#877: it neither restarts for ever nor takes the groups that serve."""
    with Diary(space) as diary:
        space.create(dpd("web", size=1, replicas=3, **PATIENT))
        space.until_ready("web")
        first = identities(space.pods("web"))
        change(space, "web", engine={"args": BROKEN})
        # As a pipeline waits: done, or stuck.
        space.kubectl("wait", "--for=condition=Progressing=false", "dpd/web", "--timeout=60s", timeout_s=70)
        progressing = condition(space.status("web"), "Progressing")
        assert progressing["reason"] == "RolloutStalled", progressing
        assert "group 2 failed once in the new revision" in progressing["message"]
        assert "EngineExited" in progressing["message"]
        kept = identities(space.pods("web"))
        assert {n: p for n, p in first.items() if "-2-" not in n} == {n: p for n, p in kept.items() if "-2-" not in n}
        space.complete_many("web", 8)

        corrected = time.time()
        generation = change(space, "web", engine={"args": [*GOOD, "--seed", "1"]})
        space.until_ready("web", generation=generation)
        entries = diary.entries("web", since=corrected)
    assert not set(first) & set(space.pods("web"))
    assert min(serving(entries)) >= 2, "maxUnavailable is 1"
    assert [group.get("restarts", 0) for group in space.status("web")["groups"]] == [0, 0, 0]


def test_a_group_of_another_size_takes_over_from_one_that_serves_until_then(space: Space) -> None:
    """llm-d-autoscaling#1568, llm-d-autoscaling#811: ranks cannot be added to a group that has started."""
    with Diary(space) as diary:
        rollout, drain = {"maxSurge": 1, "maxUnavailable": 0}, {"endpointSeconds": 2}
        space.create(dpd("grown", size=1, rollout=rollout, drain=drain))
        space.until_ready("grown")
        began = time.time()
        generation = change(space, "grown", dataParallel={"size": 2})
        status = space.until_ready("grown", generation=generation)
        entries = diary.entries("grown", since=began)
    assert status["ranks"]["summary"] == "2/2"
    assert min(serving(entries)) == 1
    assert {entry.condition("Available")["status"] for entry in entries} == {"True"}
    space.complete_many("grown", 8)
    served = until("one head is left", lambda: space.served("grown"), within_s=30)
    assert all(served[rank] for rank in (0, 1)), served


def test_a_paused_rollout_moves_nothing_and_kubectl_wait_returns_once_it_was_let_go(space: Space) -> None:
    space.create(dpd("held", size=1, replicas=2))
    space.until_ready("held")
    first = identities(space.pods("held"))
    generation = change(space, "held", rollout={"paused": True}, engine={"args": [*GOOD, "--seed", "1"]})
    until(
        "Progressing says that it is paused",
        lambda: condition(space.status("held"), "Progressing"),
        lambda found: found["reason"] == "RolloutPaused" and found["observedGeneration"] == generation,
        within_s=10,
    )
    assert condition(space.status("held"), "Ready")["status"] == "False", "not of the newest revision"
    time.sleep(3)
    assert identities(space.pods("held")) == first
    change(space, "held", rollout={"paused": False})
    # The condition is of the old generation at this moment, and kubectl knows.
    space.kubectl("wait", "--for=condition=Ready", "dpd/held", "--timeout=60s", timeout_s=70)
    assert not set(first) & set(space.pods("held"))


def test_groups_taken_away_in_the_middle_of_a_rollout_do_not_hold_it_up(space: Space) -> None:
    """lws#694."""
    with Diary(space) as diary:
        space.create(dpd("less", size=1, replicas=4))
        uid = space.get("dataparalleldeployments", "less")["metadata"]["uid"]
        space.until_ready("less")
        began = time.time()
        change(space, "less", engine={"args": [*GOOD, "--seed", "1"]})
        diary.first(
            "less",
            "group 3 is being replaced",
            lambda entry: any(group["state"] == "Stopping" for group in entry.groups),
            since=began,
            within_s=30,
        )
        space.kubectl("scale", "dpd/less", "--replicas=2")
        status = space.until_ready("less", generation=3)
        entries = diary.entries("less", since=began)
    assert status["replicas"] == status["updatedReplicas"] == status["readyReplicas"] == 2
    assert min(serving(entries)) >= 1
    assert sorted(group["index"] for group in status["groups"]) == [0, 1]
    heads = space.find("pods", f"{LABELS}/uid={uid}")
    assert len([pod for pod in heads if not pod["metadata"].get("deletionTimestamp")]) == 2


def test_a_deployment_at_zero_is_ready_with_nothing_and_comes_back(space: Space) -> None:
    space.create(dpd("none", size=1, replicas=0))
    space.until_ready("none")
    assert not space.pods("none")
    space.kubectl("scale", "dpd/none", "--replicas=1")
    assert space.until_ready("none", generation=2)["readyReplicas"] == 1
    space.kubectl("scale", "dpd/none", "--replicas=0")
    until("no pod is left", lambda: space.pods("none"), lambda pods: not pods, within_s=30)
    assert space.until_ready("none", generation=3)["ranks"]["summary"] == "0/0"


@pytest.fixture
def forbid(space: Space, cluster: Cluster) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Forbid pods with an environment variable of that name, in this namespace, as an administrator's policy does."""
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    bindings = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    name = f"e2e-{uuid.uuid4().hex[:8]}"

    def remove() -> None:
        for path in (bindings, policies):
            with contextlib.suppress(RefusedError):  # it may be gone already
                cluster.call("DELETE", f"{path}/{name}")

    def make(variable: str) -> Callable[[], None]:
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        expression = f"object.spec.containers.all(c, !has(c.env) || c.env.all(e, e.name != '{variable}'))"
        validation = {"expression": expression, "message": f"{variable} is not allowed here", "reason": "Forbidden"}
        spec = {"matchConstraints": {"resourceRules": [rule]}, "validations": [validation], "failurePolicy": "Fail"}
        here = {"matchLabels": {"kubernetes.io/metadata.name": space.name}}
        binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}}
        common = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
        cluster.call("POST", policies, common | {"kind": "ValidatingAdmissionPolicy", "spec": spec})
        cluster.call("POST", bindings, common | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding})
        until("the policy is in force", refused, within_s=30)
        return remove

    def refused() -> bool:
        container = {"name": "a", "image": "b", "env": [{"name": "FORBIDDEN", "value": "x"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}}
        try:
            cluster.call("POST", f"{space.path('pods')}?dryRun=All", pod)
        except RefusedError as error:
            return "is not allowed here" in error.message
        return False

    yield make
    remove()


def test_a_revision_that_a_policy_forbids_takes_nothing_down_and_is_taken_up_once_it_is_allowed(
    space: Space, forbid: Callable[[str], Callable[[], None]]
) -> None:
    space.create(dpd("policed", size=2))
    space.until_ready("policed")
    first = identities(space.pods("policed"))
    allow = forbid("FORBIDDEN")
    generation = change(space, "policed", engine={"env": [{"name": "FORBIDDEN", "value": "x"}]})
    progressing = until(
        "Progressing says that the revision is refused",
        lambda: condition(space.status("policed"), "Progressing"),
        lambda found: found["reason"] == "RevisionRefused",
        within_s=15,
    )
    assert progressing["status"] == "False"
    assert "FORBIDDEN is not allowed here" in progressing["message"]
    assert condition(space.status("policed"), "Stalled")["reason"] == "RevisionRefused"
    time.sleep(3)
    assert identities(space.pods("policed")) == first
    space.complete_many("policed", 4)
    allow()
    space.until_ready("policed", generation=generation, within_s=120)
    assert not set(first) & set(space.pods("policed"))


def test_a_quota_that_has_no_room_for_a_second_group_does_not_stop_a_rollout_in_place(space: Space) -> None:
    """lws#776, kueue#8769: the successor waits in words, and maxUnavailable has to do."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}, "spec": {"hard": {"pods": "2"}}}
    space.cluster.call("POST", f"/api/v1/namespaces/{space.name}/resourcequotas", quota)
    startup = {"scheduleTimeoutSeconds": 10}
    space.create(dpd("tight", size=2, startup=startup, rollout={"maxSurge": 1, "maxUnavailable": 1}))
    space.until_ready("tight")
    with Diary(space) as diary:
        began = time.time()
        generation = change(space, "tight", engine={"args": [*GOOD, "--seed", "1"]})
        said = diary.first(
            "tight",
            "it says that the quota is in the way",
            lambda entry: "exceeded quota" in entry.condition("Ready").get("message", ""),
            since=began,
            within_s=30,
        )
        assert said.deployment["status"]["readyReplicas"] == 1
        space.until_ready("tight", generation=generation, within_s=120)


def test_kubectl_wait_for_ready_does_not_return_for_the_spec_of_before(space: Space) -> None:
    space.create(dpd("waited", size=1))
    space.until_ready("waited")
    change(space, "waited", engine={"args": BROKEN}, **PATIENT)
    command = space.cluster.command(
        "--namespace", space.name, "wait", "--for=condition=Ready", "dpd/waited", "--timeout=8s"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1, done.stdout
    assert "timed out" in done.stderr
