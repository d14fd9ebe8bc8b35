"""Who of several engines that ended was the first, whatever the kubelets report first and whatever the exit codes are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dp_operator import observe
from dp_operator.failure import with_logs
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
(EngineCore_DP0 pid=71) ERROR 11-30 16:00:09 [core.py:700] RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [198.18.1.2]
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

    def node(self, role: str) -> str:
        return str(self.world.pod(self.pod(role))["spec"]["nodeName"])

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
        ({"code": 0, "log": ROOT}, "EngineExited"),
    ],
    ids=["out of memory", "signal", "exit code", "exit code 0"],
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
    assert group.cause().log_tail == how_it_reads(end)
    (entry,) = group.world.cr.status.groups
    assert entry.restarts == 1
    assert entry.node_failures == {group.node("w-1"): 1}
    assert entry.next_attempt_at == observe.timestamp(group.began + 2 + 10), "the back-off stays"
    assert group.cause().noticed_at == observe.timestamp(group.began + 2)


def how_it_reads(end: dict[str, Any]) -> str:
    return str(end.get("log", ""))


def test_memory_that_ran_out_in_the_second_of_the_notice_is_the_cause(group: Group):
    """Members fall within milliseconds of each other, and a deletion makes nobody run out of memory."""
    group.ends("head", code=1, log=VICTIM)
    group.reported(0.3)
    group.ends("w-1", at=0.1, code=137, reason="OOMKilled", log="the last words")
    group.reported(1.2)
    assert group.first() == ("w-1", 2)
    assert group.cause().log_tail == "the last words"
    (note,) = [line for line in group.world.log if "CauseCorrected" in line]
    assert "(rank 2): OutOfMemory" in note


@pytest.mark.parametrize("end", [{"code": 139}, {"code": 0, "log": ROOT}, {"code": 1, "log": ROOT}])
def test_what_can_only_have_ended_by_itself_counts_in_the_second_of_the_notice(group: Group, end: dict[str, Any]):
    """The operator writes within milliseconds of the first report."""
    group.ends("head", code=1, log=VICTIM)
    group.reported(0.1)
    group.ends("w-1", at=0.0, **end)
    group.reported(0.4)
    assert group.first() == ("w-1", 2)


def test_the_words_that_the_kubelet_kept_count_where_the_log_cannot_be_read(group: Group):
    group.ends("w-1", code=1, log="", message="ValueError: no such model")
    group.ends("head", at=1.0, code=1, log=ROOT)
    group.reported(2)
    assert group.first() == ("w-1", 2)


def test_a_rank_whose_container_ends_after_its_victims_is_found_by_its_log(group: Group):
    group.ends("w-1", code=0, log=VICTIM)
    group.reported(1.9)
    group.ends("w-0", at=1.0, code=0, log=ROOT)
    group.reported(2.3)
    assert group.first() == ("w-0", 1)


@pytest.mark.parametrize(
    "end",
    [
        *({"code": 137}, {"code": 143}, {"code": 134, "log": ROOT}, {"code": 1, "log": VICTIM}),
        *({"code": 1, "log": ROOT, "at": 1.0}, {"code": 137, "reason": "OOMKilled", "at": 1.0}),
    ],
)
def test_what_ends_once_the_group_is_being_deleted_is_not_taken_for_the_cause(group: Group, end: dict[str, Any]):
    group.ends("w-1", code=0, log=VICTIM)
    group.reported(0.1)
    for role in ("head", "w-0"):
        # Of the same second, too: it cannot be known which of the two came first.
        group.ends(role, **{"at": 0.4} | end)
    group.reported(1.4)
    assert group.first() == ("w-1", 2)


def test_a_termination_by_a_clock_that_is_behind_is_not_the_cause(group: Group):
    """Dated before the deletion that brought it, it would be an end by a signal, which explains more than an exit code."""
    group.ends("head", code=1, log=ROOT)
    group.reported(0.52)
    group.ends("w-1", at=0.48, code=143)
    group.reported(0.9)
    assert group.first() == ("head", 0)


def test_what_is_reported_much_later_is_not_believed_to_be_the_cause(group: Group):
    """A node whose clock is behind dates the ends that our deletion brings to before it."""
    group.ends("w-1", code=0)
    group.reported()
    group.ends("w-0", at=-5, code=137)
    group.ends("w-2", at=-5, code=0, log=ROOT)
    group.reported(30)
    assert group.first() == ("w-1", 2)


@pytest.mark.parametrize("text", ["", "ERROR 11-30 RuntimeError: something else\n", VICTIM])
def test_a_cause_whose_log_tells_of_its_own_trouble_stays(group: Group, text: str):
    """Whatever is reported later and dated earlier, by a clock that is behind."""
    group.ends("w-1", at=1.0, code=0, log=ROOT)
    group.reported(2)
    group.ends("head", at=0.0, code=1, log=text)
    group.reported(3)
    assert group.first() == ("w-1", 2)
    assert "illegal memory access" in group.cause().first_error_lines


@pytest.mark.parametrize("first", ["head", "w-1"])
def test_what_the_logs_have_told_once_holds_although_they_vanish_with_their_pods(group: Group, first: str):
    for role, code in (("head", 1), ("w-1", 0)):
        group.ends(role, code=code, log=ROOT if role == first else VICTIM)
    group.reported(1.2)
    group.world.engine_logs.clear()
    group.reported(1.5)
    assert group.first()[0] == first
    assert not [line for line in group.world.log if "CauseCorrected" in line]


def test_of_two_that_both_tell_of_their_own_trouble_the_exit_code_decides_and_no_more_logs_are_read(group: Group):
    group.ends("head", code=1, log=ROOT)
    group.ends("w-1", code=0, log=ROOT)
    group.reported(1.2)
    assert group.first()[0] == "head"
    assert not group.world.plan().logs


def test_an_image_that_is_too_old_stays_the_cause(group: Group):
    """It is not charged, and the next attempt knows the version."""
    group.ends("w-1", code=1, message="not started: the image has vLLM 0.11.0, and this takes 0.14")
    group.reported(1.2)
    group.ends("w-0", code=137, reason="OOMKilled")
    group.reported(1.5)
    assert group.cause().reason == "EngineTooOld"


def test_the_failure_of_an_earlier_attempt_is_not_explained_by_the_end_of_a_later_one(group: Group):
    group.ends("w-1", code=1)
    group.reported()
    world = group.world
    world.kubelets_finish_deleting()
    world.reconcile()
    (entry,) = world.cr.status.groups
    late = [msgspec.structs.replace(f, noticed_at=observe.timestamp(world.now + 60)) for f in entry.last_failures]
    world.cr = msgspec.structs.replace(
        world.cr,
        status=msgspec.structs.replace(world.cr.status, groups=[msgspec.structs.replace(entry, last_failures=late)]),
    )
    world.now += 30
    world.reconcile()
    again = world.bring_up(world.entry().incarnation)
    world.change_spec(suspend=True)
    world.reconcile()
    world.engine_ends(f"web-0-{again}-w-0", code=137, reason="OOMKilled")
    world.reconcile()
    assert world.cr.status.groups[0].last_failures[0].pod == group.pod("w-1")


def test_a_deletion_from_outside_is_no_end_of_an_engine_and_stays_the_cause(group: Group):
    nodes = {group.node("w-1"): 3}
    (entry,) = group.world.cr.status.groups
    group.world.cr = msgspec.structs.replace(
        group.world.cr,
        status=msgspec.structs.replace(
            group.world.cr.status, groups=[msgspec.structs.replace(entry, node_failures=nodes)]
        ),
    )
    group.world.pod(group.pod("w-1"))["metadata"]["deletionTimestamp"] = observe.timestamp(group.world.now + 75)
    group.reported(0.5)
    group.ends("w-0", at=-1, code=0, log=ROOT)
    group.reported(1)
    assert (group.cause().reason, group.cause().charged) == ("PodDeleted", False)
    assert group.world.cr.status.groups[0].node_failures == nodes


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


def test_a_launcher_that_was_refused_tells_less_than_any_end_of_an_engine(group: Group):
    """The operator was away, and the kubelet has started a container again twice: it remembers one end."""
    group.ends("w-0", code=0)
    again = f"not started: pod {group.pod('w-1')} started again 9 s after the group was released: its engine is gone"
    group.ends("w-1", at=3, code=1, message=again)
    group.reported(14)
    assert group.first() == ("w-0", 1)


@pytest.mark.parametrize("head_code", [0, 1, 134])
@pytest.mark.parametrize("first", ["head", "w-2"])
def test_of_ends_whose_exit_codes_say_nothing_the_one_whose_log_tells_of_no_other_is_the_cause(
    group: Group, first: str, head_code: int
):
    """A headless vLLM ends with 0, a head with several API servers with 1, a collective's watchdog aborts its process."""
    for role, code in (("head", head_code), ("w-0", 0), ("w-1", 0), ("w-2", 0)):
        group.ends(role, code=code, log=ROOT if role == first else VICTIM)
    group.reported()
    assert group.first()[0] == first
    assert "illegal memory access" in group.cause().first_error_lines
    assert group.world.cr.status.groups[0].node_failures == {group.node(first): 1}


@pytest.mark.parametrize("text", ["", "INFO bye\n", VICTIM])
def test_a_log_that_tells_only_of_another_is_said_to(group: Group, text: str):
    """The engine that began it may still be busy with its own end, or its log may be lost."""
    group.ends("head", code=1, log=VICTIM)
    group.ends("w-1", code=0, log=text)
    group.reported()
    assert group.first()[0] == "head"
    assert "may not have been the first" in group.cause().message
    assert group.cause().uncertain
    assert group.world.cr.status.groups[0].node_failures == {}, "its node has done nothing that is known"


def taken_away(group: Group, role: str, *, at: float) -> None:
    """Somebody deletes a pod, whose grace period is not over yet."""
    gone_by = observe.timestamp(group.began + at + 75)
    group.world.pod(group.pod(role))["metadata"] |= {"deletionTimestamp": gone_by, "deletionGracePeriodSeconds": 75}


@pytest.mark.parametrize("seen", ["terminating", "made again", "gone"])
def test_a_pod_that_was_deleted_is_the_cause_of_the_end_of_one_that_only_tells_of_another(group: Group, seen: str):
    """The operator was away, and sees both at once."""
    if seen == "terminating":
        taken_away(group, "w-1", at=-5)
    elif seen == "made again":
        group.world.pod(group.pod("w-1"))["metadata"]["creationTimestamp"] = observe.timestamp(group.began)
    else:
        del group.world.objects["Pod", group.pod("w-1")]
    group.ends("head", code=1, log=VICTIM)
    group.reported(30)
    reason = "MemberDeleted" if seen == "gone" else "PodDeleted"
    assert (group.first(), group.cause().reason, group.cause().charged) == (("w-1", 2), reason, False)
    (entry,) = group.world.cr.status.groups
    assert (entry.restarts, entry.node_failures) == (0, {})
    assert entry.next_attempt_at == group.cause().noticed_at, "at once, as after any deletion"


def test_a_group_that_is_to_be_given_up_is_tried_again_where_a_deletion_was_the_cause():
    group = Group()
    group.world.change_spec(failurePolicy={"maxRestarts": 0})
    taken_away(group, "w-1", at=-5)
    group.ends("head", code=1, log=VICTIM)
    group.reported(30)
    group.world.kubelets_finish_deleting()
    group.world.reconcile()
    assert group.world.entry().state == "Starting"
    assert group.world.condition("Stalled").status == "False"


@pytest.mark.parametrize(("log", "at"), [(ROOT, -5), ("", -5), (VICTIM, 5)])
def test_a_pod_that_was_deleted_is_not_the_cause_where_another_tells_of_itself_or_ended_before(
    group: Group, log: str, at: float
):
    taken_away(group, "w-1", at=at)
    group.ends("head", code=1, log=log)
    group.reported(30)
    assert (group.first()[0], group.cause().charged) == ("head", True)


def test_a_head_that_is_gone_is_the_cause_of_its_workers_end_with_0(group: Group):
    """The operator was away. A headless vLLM ends with 0 whatever happens."""
    del group.world.objects["Pod", group.pod("head")]
    group.ends("w-1", code=0, log="INFO bye")
    group.reported(30)
    assert (group.first()[0], group.cause().reason, group.cause().charged) == ("head", "MemberDeleted", False)


def test_why_a_member_goes_says_more_than_that_another_one_is_gone(group: Group):
    del group.world.objects["Pod", group.pod("head")]
    taken_away(group, "w-1", at=-5)
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction"}
    group.world.pod(group.pod("w-1"))["status"]["conditions"] = [evicted]
    group.reported(29.5)  # a whole second, as all of these signs have it
    assert (group.first()[0], group.cause().reason) == ("w-1", "EvictionByEvictionAPI")


def test_a_node_is_not_said_to_fail_first_by_logs_that_only_tell_of_another():
    """A person would cordon it."""
    world = World()
    for _ in range(3):
        incarnation = world.make_ready()
        world.engine_logs[f"web-0-{incarnation}-head"] = VICTIM
        world.engine_ends(f"web-0-{incarnation}-head", code=1, message="")
        world.reconcile()
        world.kubelets_finish_deleting()
        world.reconcile()
        world.now += 400
    assert "failed 3 times in a row" in world.condition("Degraded").message
    assert "failed first" not in world.condition("Degraded").message


def test_a_node_counts_once_a_log_that_comes_late_tells_that_its_engine_was_the_first(group: Group):
    group.ends("head", code=1, log=VICTIM)
    group.reported(0.5)
    assert group.world.cr.status.groups[0].node_failures == {}
    group.ends("w-1", code=0, log=ROOT)
    group.reported(2)
    assert (group.first(), group.cause().uncertain) == (("w-1", 2), False)
    assert group.world.cr.status.groups[0].node_failures == {group.node("w-1"): 1}


def test_what_is_found_out_after_the_spec_was_changed_is_not_held_against_a_node(group: Group):
    group.ends("head", code=1, log=VICTIM)
    group.reported(0.5)
    (entry,) = group.world.cr.status.groups
    anew = msgspec.structs.replace(entry, restarts=0)
    status = msgspec.structs.replace(group.world.cr.status, groups=[anew])
    group.world.cr = msgspec.structs.replace(group.world.cr, status=status)
    group.ends("w-1", code=0, log=ROOT)
    group.reported(2)
    assert group.first() == ("w-1", 2)
    assert group.world.cr.status.groups[0].node_failures == {}


def test_the_logs_of_others_are_not_read_where_the_kernel_has_killed(group: Group):
    """The deletion of the head waits for them."""
    group.ends("w-1", code=137, reason="OOMKilled")
    group.ends("head", code=1, log=VICTIM)
    assert [wanted.pod for wanted in group.world.plan().logs] == [group.pod("w-1")]


def test_a_failure_that_moves_to_a_ninth_node_still_fits_into_the_status(group: Group):
    (entry,) = group.world.cr.status.groups
    tally = {group.node("head"): 2} | {f"x{n}": 1 for n in range(7)}
    ledger = [msgspec.structs.replace(entry, node_failures=tally)]
    group.world.cr = msgspec.structs.replace(
        group.world.cr, status=msgspec.structs.replace(group.world.cr.status, groups=ledger)
    )
    first = next(role for role in ("w-0", "w-1") if group.node(role) != group.node("head"))
    group.ends("head", code=1, log=VICTIM)
    group.ends(first, code=0, log=ROOT)
    decided = group.world.plan()
    status = with_logs(decided.status, [(wanted, group.world.engine_logs[wanted.pod]) for wanted in decided.logs])
    counted = status.groups[0].node_failures
    assert len(counted) == 8
    assert counted[group.node(first)] == 1
    assert counted[group.node("head")] == 2
