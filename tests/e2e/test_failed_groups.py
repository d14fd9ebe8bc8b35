"""A group that lost a member is replaced as a whole, once, and says why."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any

import urllib3

from tests.e2e.kube import LABELS, Film, RefusedError, Space, condition, dpd, engine_state, until


def seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def test_deleting_a_worker_while_the_group_starts_replaces_it_once_and_crashes_no_head(space: Space) -> None:
    with Film(space, "pods") as film:
        space.create(dpd("start", size=3, faults=["slow-load:ranks=1,seconds=5"]))
        until(
            "rank 1 loads",
            lambda: space.snapshot("start")["stages"],
            lambda seen: seen.get("connected") == "0-2" and seen.get("loaded") != "0-2",
            within_s=60,
        )
        first = space.group("start")
        (victim,) = [name for name in space.pods("start", role="worker") if name.endswith("-w-1")]
        space.kubectl("delete", "pod", victim, "--wait=false")
        group = space.until_replaced("start", first)
    (failure,) = group["lastFailures"]
    assert failure["reason"] == "PodDeleted"
    assert failure["pod"] == victim
    assert failure["rank"] == 2
    assert failure["charged"] is False
    assert group["restarts"] == 0
    incarnations = {pod["metadata"]["labels"][f"{LABELS}/incarnation"] for pod in film.frames}
    assert incarnations == {first["incarnation"], group["incarnation"]}
    heads = [pod for pod in film.frames if pod["metadata"]["name"] == first["headPod"]]
    assert any(pod["metadata"].get("deletionTimestamp") for pod in heads)
    alive = [pod for pod in heads if not pod["metadata"].get("deletionTimestamp")]
    assert not [state for pod in alive if (state := engine_state(pod).get("terminated"))]
    space.until_ready("start")
    space.complete_many("start", 6)


def test_a_rank_that_crashes_while_serving_is_named_and_its_group_replaced_after_the_back_off(space: Space) -> None:
    policy = {"backoffSeconds": 15}
    drain = {"timeoutSeconds": 1}  # the request that nobody answers must not outlast the back-off
    faults = ["crash-on-request:ranks=1,code=77"]
    space.create(dpd("served", size=2, faults=faults, failurePolicy=policy, drain=drain))
    space.until_ready("served")
    first = space.group("served")
    with Film(space, "dataparalleldeployments") as film:
        with contextlib.suppress(RefusedError, urllib3.exceptions.HTTPError):  # nobody is left to answer it
            space.complete("served", rank=1, timeout_s=2)
        group = space.until_replaced("served", first)
    (failure,) = group["lastFailures"]
    assert (failure["rank"], failure["reason"], failure["charged"]) == (1, "EngineExited", True)
    assert failure["incarnation"] == first["incarnation"]
    # As with vLLM: a headless node whose rank dies ends with exit code 0.
    assert failure["exitCode"] == 0
    assert "exited with code 0" in failure["message"]
    assert group["restarts"] == 1
    assert not [entry for entry in space.status("served")["groups"] if entry["incarnation"] == first["incarnation"]]

    waits = [entry for frame in film.frames for entry in _groups(frame) if entry.get("nextAttemptAt")]
    (next_attempt,) = {entry["nextAttemptAt"] for entry in waits if entry["state"] in ("Stopping", "Waiting")}
    assert seconds(next_attempt) >= seconds(failure["time"]) + 5  # whole seconds
    assert seconds(group["createdAt"]) >= seconds(next_attempt)
    said = [condition(frame["status"], "Ready")["message"] for frame in film.frames if _groups(frame)]
    assert any(f"next attempt at {next_attempt}" in text and "rank 1" in text for text in said)
    space.until_ready("served")


def test_in_a_moe_group_the_rank_that_failed_is_named_and_not_those_that_fell_with_it(space: Space) -> None:
    """All of it ends within two seconds: the head with 1, as with several API servers, the headless ranks with 0."""
    space.create(
        dpd(
            "felled",
            size=3,
            args=["--moe"],
            faults=["fatal-on-request:ranks=1"],
            model={"architecture": "MoE"},
            dataParallel={"apiServerCount": 2},
            failurePolicy={"backoffSeconds": 5},
            drain={"timeoutSeconds": 1},
        )
    )
    space.until_ready("felled")
    first = space.group("felled")
    with contextlib.suppress(RefusedError, urllib3.exceptions.HTTPError):
        space.complete("felled", rank=1, timeout_s=5)
    group = space.until_replaced("felled", first)
    (failure,) = group["lastFailures"]
    assert (failure["rank"], failure["charged"]) == (1, True), failure
    assert "fault fatal-on-request" in failure["firstErrorLines"], failure
    assert group["nodeFailures"] == {failure["node"]: 1}


# As vLLM's launcher ends: the traceback of the worker comes first, then so much that the last lines, which the kubelet
# keeps for a container that fails, are not about the cause any more. All of it goes to one stream, since a container
# runtime reads two streams each for itself, and keeps no order between them.
EXPLAINED = """
import subprocess, sys, traceback
if "--headless" not in sys.argv:
    sys.exit(subprocess.call(["vllm", "serve", *sys.argv[1:]]))
sys.stdout = sys.stderr
print("INFO loading", flush=True)
try:
    raise RuntimeError("CUDA " + "out of memory. Tried to allocate 2.00 GiB")  # the launcher logs this program, too
except RuntimeError:
    traceback.print_exc()
for number in range(60): print(f"INFO cleaning up {number} of the parts that are left of this engine", flush=True)
sys.exit("Engine core initialization failed. See root cause above.")
"""


def test_the_traceback_far_up_in_a_crashed_engines_log_is_in_the_status_and_gives_the_reason(space: Space) -> None:
    """gpustack#6019, vllm#53157."""
    policy = {"backoffSeconds": 600, "maxBackoffSeconds": 600}
    space.create(dpd("told", size=2, engine={"command": ["python3", "-c", EXPLAINED]}, failurePolicy=policy))
    group = until(
        "the group has failed",
        lambda: space.group("told"),
        lambda group: group.get("lastFailures") and group["state"] == "Waiting",
        within_s=60,
    )
    (failure,) = group["lastFailures"]
    assert (failure["reason"], failure["rank"], failure["exitCode"]) == ("GPUOutOfMemory", 1, 1)
    assert failure["firstErrorLines"].startswith("Traceback (most recent call last):")
    assert "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB" in failure["firstErrorLines"]
    assert failure["logTail"].rstrip().endswith("Engine core initialization failed. See root cause above.")
    assert len(failure["logTail"]) > 1000
    (event,) = [item for item in space.find("events") if item["reason"] == "GroupFailed"]
    assert "GPUOutOfMemory" in event["message"]


def _groups(frame: Any) -> list[Any]:
    groups: list[Any] = frame.get("status", {}).get("groups", [])
    return groups
