"""Who of several engines that ended was the first, whatever the kubelets report first and whatever the exit codes are."""

from __future__ import annotations

from typing import Any

import pytest

from dp_operator import observe
from tests.unit.operator.world import World

ROOT = """\
INFO 11-30 16:00:01 [api_server.py:1] starting
(EngineCore_DP2 pid=71) ERROR 11-30 16:00:09 [core.py:700] EngineCore encountered a fatal error.
(EngineCore_DP2 pid=71) ERROR 11-30 16:00:09 [core.py:700] Traceback (most recent call last):
(EngineCore_DP2 pid=71) ERROR 11-30 16:00:09 [core.py:700]   File "worker.py", line 1, in execute_model
(EngineCore_DP2 pid=71) ERROR 11-30 16:00:09 [core.py:700] RuntimeError: CUDA error: an illegal memory access
"""
VICTIM = """\
(EngineCore_DP0 pid=71) ERROR 11-30 16:00:09 [core.py:700] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=71) ERROR 11-30 16:00:09 [core.py:700] Traceback (most recent call last):
(EngineCore_DP0 pid=71) ERROR 11-30 16:00:09 [core.py:700] RuntimeError: [pair.cc:547] Connection closed by peer [198.18.1.2]
(APIServer pid=1) ERROR 11-30 16:00:10 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


class Group:
    """A group that serves, with a head (rank 0) and three workers."""

    def __init__(self) -> None:
        self.world = World()
        self.incarnation = self.world.make_ready()
        self.world.now += 10.5
        self.began = self.world.now

    def pod(self, role: str) -> str:
        return f"web-0-{self.incarnation}-{role}"

    def ends(self, role: str, *, at: float = 0.0, log: str = "", **how: Any) -> None:
        self.world.engine_logs[self.pod(role)] = log
        self.world.engine_ends(self.pod(role), at=self.began + at, **{"message": ""} | how)

    def reported(self, after_s: float = 0.0) -> None:
        self.world.now = self.began + after_s
        self.world.reconcile()

    def cause(self) -> Any:
        return self.world.cr.status.groups[0].last_failures[0]

    def first(self) -> tuple[str, int | None]:
        (failure,) = self.world.cr.status.groups[0].last_failures
        return failure.pod.removeprefix(self.pod("")), failure.rank


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.mark.parametrize("reported_first", ["cause", "consequence"])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"code": 137, "reason": "OOMKilled"}, "OutOfMemory"),
        ({"code": 139}, "EngineKilled"),
        ({"code": 1, "log": ROOT}, "EngineExited"),
        ({"code": 1}, "EngineExited"),
    ],
    ids=["out of memory", "signal", "exit code", "exit code without a log"],
)
def test_the_first_to_end_is_named_in_whatever_order_the_kubelets_report(
    group: Group, reported_first: str, end: dict[str, Any], reason: str
):
    """A worker ends, the head a second later for want of it, and the kubelet of the head's node may be the faster."""
    reports = [("w-1", {"at": 0.0, **end}), ("head", {"at": 1.0, "code": 1, "log": VICTIM})]
    for number, (role, how) in enumerate(reports if reported_first == "cause" else reversed(reports)):
        group.ends(role, **how)
        group.reported(2 + number)
    assert group.first() == ("w-1", 2)
    assert group.cause().reason == reason
    (entry,) = group.world.cr.status.groups
    assert entry.restarts == 1
    assert entry.node_failures == {group.world.pod(group.pod("w-1"))["spec"]["nodeName"]: 1}
    assert entry.next_attempt_at == observe.timestamp(group.began + 2 + 10), "the back-off stays"
    assert group.cause().noticed_at == observe.timestamp(group.began + 2)


def test_a_certain_cause_that_was_reported_late_is_told_by_an_event(group: Group):
    group.ends("head", code=1)
    group.reported(1.4)
    group.ends("w-1", code=137, reason="OOMKilled")
    group.reported(2.4)
    (note,) = [line for line in group.world.log if "CauseCorrected" in line]
    assert "(rank 2): OutOfMemory" in note


@pytest.mark.parametrize("end", [{"code": 137, "reason": "OOMKilled"}, {"code": 137}, {"code": 1, "log": ROOT}])
def test_what_ends_once_the_group_is_being_deleted_is_not_taken_for_the_cause(group: Group, end: dict[str, Any]):
    group.ends("w-1", code=0)
    group.reported()
    for role in ("head", "w-0"):
        # Of the same second, too: it cannot be known which of the two came first.
        group.ends(role, at=0.4, **end)
    group.reported(1.4)
    assert group.first() == ("w-1", 2)


def test_what_is_reported_much_later_is_not_believed_to_be_the_cause(group: Group):
    """A node whose clock is behind dates the ends that our deletion brings to before it."""
    group.ends("w-1", code=0)
    group.reported()
    group.ends("w-0", at=-5, code=137)
    group.reported(30)
    assert group.first() == ("w-1", 2)


def test_an_engine_that_was_started_again_is_judged_by_its_first_end(group: Group):
    """The launcher does not let it into the group a second time, and ends in its turn."""
    statuses = group.world.pod(group.pod("w-1"))["status"]["containerStatuses"]
    statuses[0]["lastState"] = {"terminated": {"exitCode": 139, "finishedAt": observe.timestamp(group.began)}}
    statuses[0]["state"] = {
        "terminated": {
            "exitCode": 1,
            "finishedAt": observe.timestamp(group.began + 1),
            "message": "not started: started again",
        }
    }
    decided = group.world.plan()
    failure = decided.status.groups[0].last_failures[0]
    assert (failure.signal, failure.rank) == ("SIGSEGV", 2)
    assert [wanted.previous for wanted in decided.logs] == [True]


@pytest.mark.parametrize("head_code", [0, 1])
@pytest.mark.parametrize("first", ["head", "w-1"])
def test_of_ends_whose_exit_codes_say_nothing_the_one_whose_log_tells_of_no_other_is_the_cause(
    group: Group, first: str, head_code: int
):
    """A headless vLLM ends with 0 and a head with several API servers with 1, whoever of them began it."""
    for role, code in (("head", head_code), ("w-1", 0), ("w-2", 0)):
        group.ends(role, code=code, log=ROOT if role == first else VICTIM)
    group.reported()
    assert group.first()[0] == first
    assert "illegal memory access" in group.cause().first_error_lines
    assert group.world.cr.status.groups[0].node_failures == {group.world.pod(group.pod(first))["spec"]["nodeName"]: 1}


def test_a_log_that_tells_only_of_another_is_said_to(group: Group):
    """The engine that began it may still be busy with its own end."""
    group.ends("w-1", code=0, log=VICTIM)
    group.reported()
    assert "may not have been the first" in group.cause().message


def test_a_consequence_that_ended_earlier_does_not_displace_a_cause_whose_log_is_its_own(group: Group):
    group.ends("w-1", at=1.0, code=1, log=ROOT)
    group.reported(2)
    group.ends("head", at=0.0, code=1, log=VICTIM)
    group.reported(3)
    assert group.first() == ("w-1", 2)
