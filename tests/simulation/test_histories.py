"""Thousands of histories: whatever happens, a group lives and dies as one and comes back.

`SIMULATION_HISTORIES` says how many seeds are played (`make simulation`: 20,000), on all cores; how long it took is printed.
A seed that fails is shrunk and printed; replay it with `python -m tests.simulation.history SEED`. Histories that once found
a bug stay below, with the bug.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import time
from dataclasses import replace

import msgspec
import pytest

from dp_handshake.messages import PodRestarted, RankLost
from dp_operator import api, disruption, failure, plan, reconciler, rollout
from dp_operator.client import ApiError, Client
from dp_operator.failure import Verdict
from dp_operator.observe import timestamp
from tests.simulation import history as module
from tests.simulation.cluster import Relay
from tests.simulation.history import FAULTS, Fault, History, Outcome, run, shrunk
from tests.simulation.process import FakeClient, Process

COUNT = int(os.environ.get("SIMULATION_HISTORIES", "300"))
FIRST = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
PLAIN = History(seed=7, replicas=2, size=2, surge=0, unavailable=1, policy="Managed", faults=())


def quietly() -> None:
    """Nothing of a history outlives it, so collecting garbage now and then is enough."""
    gc.disable()


def wrong(seed: int) -> tuple[int, str]:
    if seed % 100 == 0:
        gc.collect()
    return seed, run(History.of(seed)).wrong


def _children_cpu_s() -> float:
    """CPU time of all processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(outcome: Outcome) -> str:
    return "\n".join([*outcome.trace, str(outcome.history), outcome.wrong])


def test_every_history_ends_with_all_groups_serving_or_a_named_failure(capsys):
    """Recovery has more corners than anybody lists: kthena#1661, #517, #372, #1267; PR#716/#738."""
    gc.freeze()  # what is imported by now is not looked at again by the forked processes
    begun, used = time.monotonic(), _children_cpu_s()
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0)), quietly) as pool:
        for seed, problem in pool.imap_unordered(wrong, range(FIRST, FIRST + COUNT), chunksize=20):
            if problem:
                pool.terminate()
                pytest.fail(f"seed {seed}: {problem}\n{report(shrunk(History.of(seed)))}", pytrace=False)
        pool.close()
        pool.join()
    took_s, each_ms = time.monotonic() - begun, (_children_cpu_s() - used) / COUNT * 1000
    with capsys.disabled():
        print(
            f"{COUNT:,} histories in {took_s:.0f} s: {COUNT / took_s:.0f} per second, {each_ms:.1f} ms of CPU time each"
        )


# What the operator did wrong -> the shrunk history in which it was found.
FOUND = {
    "an image that cannot be pulled was waited for without end and without a name": replace(
        PLAIN, seed=160, replicas=1, size=3, faults=(Fault(10.46, "bad image", 754773324),)
    ),
    "nothing woke the operator after its own last write, so a deadline passed unnoticed": replace(
        PLAIN, seed=259, replicas=1, unavailable="34%", faults=(Fault(17.9, "bad image", 590833932),)
    ),
    "an apply was left out because the one before it had been the same object's, whatever it said": replace(
        PLAIN,
        seed=407,
        replicas=1,
        size=3,
        unavailable="34%",
        faults=(
            Fault(32.53, "child edited", 984313977),
            Fault(57.12, "drain", 462346397),
            Fault(109.72, "new image", 263626425),
        ),
    ),
    "a conflict on a deletion was taken for the object's end, and its ConfigMap stayed for ever": replace(
        PLAIN,
        seed=420,
        replicas=1,
        faults=(Fault(13.65, "engine ends", 1055510760), Fault(16.36, "api errors", 245345694)),
    ),
    "a head that had just become ready was deleted as one that does not serve": replace(
        PLAIN, seed=281, replicas=1, surge=1, unavailable=0, faults=(Fault(8.91, "new image", 534202139),)
    ),
    "a status write that was due in no time at all was waited for at the same moment again and again": replace(
        PLAIN,
        seed=4877,
        replicas=1,
        size=1,
        unavailable=2,
        faults=(Fault(15.11, "recreate", 861576815), Fault(19.06, "engine ends", 308038492)),
    ),
    "an operator whose clock was ahead when it started took pods that were ending for stuck ones": replace(
        PLAIN,
        seed=1210,
        replicas=1,
        size=1,
        unavailable=2,
        faults=(
            Fault(7.29, "clock step", 459443300),
            Fault(7.37, "kill operator", 922198075),
            Fault(68.27, "another new image", 585702538),
        ),
    ),
    "the same, where the clock had been right when they were told to end": replace(
        PLAIN,
        seed=7093,
        faults=(
            Fault(5.25, "bad image", 108706386),
            Fault(13.34, "kill operator", 738363546),
            Fault(54.32, "clock step", 228471256),
        ),
    ),
    "a clock that was set between the first answer of the API server and the first look at it stayed wrong": replace(
        PLAIN,
        seed=7373,
        replicas=1,
        unavailable="34%",
        faults=(Fault(0.24, "clock step", 233151222), Fault(50.99, "restart", 341157285)),
    ),
    "a group that became ready while the operator was away was ended for its deadline when it came back": replace(
        PLAIN, faults=(Fault(9.0, "operator away", 1043521778),)
    ),
    "the same, for the deadline of the check-in": replace(
        PLAIN, seed=77, surge=1, unavailable=0, faults=(Fault(3.86, "operator away", 627763166),)
    ),
    "a StatefulSet that lost our label kept making the pods of a group that was to go": replace(
        PLAIN, faults=(Fault(30.0, "child relabelled", 7),)
    ),
    "a Service that a quota had refused was not made when the quota took it again": replace(
        PLAIN, faults=(Fault(50.13, "quota", 540271020),)
    ),
    "pods were made that mounted a stranger's ConfigMap": replace(PLAIN, faults=(Fault(18.26, "stranger", 36250942),)),
    "a stranger was spoken of although its name was that of an attempt long gone": replace(
        PLAIN, faults=(Fault(1.0, "stranger", 23), Fault(20.0, "new image", 1))
    ),
}


@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_a_bug_that_was_found_stays_away(history):
    outcome = run(history)
    assert not outcome.wrong, report(outcome)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(("surge", "unavailable"), [(0, 1), (1, 0)])
def test_every_kind_of_fault_alone_is_overcome(kind, surge, unavailable):
    faults = (Fault(at=3.0, kind=kind, pick=1), Fault(at=40.0, kind=kind, pick=2))
    outcome = run(replace(PLAIN, surge=surge, unavailable=unavailable, faults=faults, report_lag_s=1.0))
    assert not outcome.wrong, report(outcome)


def test_the_table_of_troubles_names_every_kind_of_fault():
    named = set(re.findall(r"`([a-z_ ]+)`", module.__doc__.partition("| trouble |")[2]))
    assert named == {*FAULTS, "max_restarts", "slot_s"}


def test_news_that_is_due_in_the_same_slot_comes_to_the_operator_at_once(monkeypatch):
    deliver, came_at = Process._deliver, []

    def noted(mine, kind, to):
        came_at.append(mine.cluster.loop.time())
        deliver(mine, kind, to)

    monkeypatch.setattr(Process, "_deliver", noted)
    outcome = run(replace(PLAIN, slot_s=2.0, faults=(Fault(30.0, "engine ends", 0),)))
    assert not outcome.wrong, report(outcome)
    assert {at % 2.0 for at in came_at} == {0.0}
    assert len(set(came_at)) < len(came_at)


def test_what_a_relay_has_told_does_not_change_before_it_tells_more():
    relay = Relay(
        head_uid="u",
        incarnation="abcde",
        ip="198.18.0.1",
        plan={"size": 1, "sizeLocal": 1, "headPlacement": "Colocated", "headPod": "web-0-abcde-head", "workers": []},
    )
    told = relay.snapshot(0.0)
    relay.lost.append(RankLost(time=1.0, rank=0, pod="web-0-abcde-head", message="connection closed"))
    relay.restarted.append(PodRestarted(time=1.0, pod="web-0-abcde-head", message="again"))
    assert not told.lost
    assert not told.restarted


def test_a_fault_takes_no_stranger_away_for_whose_end_the_operator_would_be_blamed():
    faults = (Fault(4.48, "stranger", 121020484), Fault(17.94, "stranger", 820425941))
    outcome = run(replace(PLAIN, seed=51378, replicas=3, size=3, policy="Open", faults=faults))
    assert not outcome.wrong, report(outcome)


def test_a_history_replays_exactly():
    history = History.of(3)
    assert run(history).trace == run(history).trace


def ends_what_lost_its_service(monkeypatch):
    judge = plan.judge

    def strict(spec, entry, objects, picture, now, **more):
        if objects.rpc_service is None:
            failure = api.Failure(
                reason="MemberDeleted", time=timestamp(now), charged=False, incarnation=entry.incarnation, message=""
            )
            return Verdict(failure)
        return judge(spec, entry, objects, picture, now, **more)

    monkeypatch.setattr(plan, "judge", strict)


def takes_half_a_list_for_the_whole(monkeypatch):
    async def hasty(client, kind, *, selector="", namespace=""):
        try:
            return await Client.list(client, kind, selector=selector, namespace=namespace)
        except ApiError as error:
            if error.status != 410:
                raise
            return []

    monkeypatch.setattr(FakeClient, "list", hasty)


def goes_on_for_ever(monkeypatch):
    monkeypatch.setattr(rollout, "given_up", lambda entry, policy: False)


def takes_closed_for_managed(monkeypatch):
    emptied_nodes = disruption.emptied_nodes

    def careless(cr, picture):
        managed = msgspec.structs.replace(cr.spec.disruption, policy="Managed")
        spec = msgspec.structs.replace(cr.spec, disruption=managed)
        return emptied_nodes(msgspec.structs.replace(cr, spec=spec), picture)

    monkeypatch.setattr(disruption, "emptied_nodes", careless)


def tells_the_time(monkeypatch, *, of=("Starting", "Serving", "Stopping", "Waiting")):
    decide = reconciler.plan

    def talkative(situation):
        decided = decide(situation)
        if not any(group.state in of for group in decided.status.groups):
            return decided
        conditions = [msgspec.structs.replace(c, message=str(int(situation.now))) for c in decided.status.conditions]
        status = msgspec.structs.replace(decided.status, conditions=conditions)
        return msgspec.structs.replace(decided, status=status, look_again_at=situation.now + 1)

    monkeypatch.setattr(reconciler, "plan", talkative)


def adopts_strangers(monkeypatch):
    async def adopt(mine, uid, manifest):
        kind, wanted = manifest["kind"], manifest["metadata"]
        found = await mine._client.get(kind, wanted["namespace"], wanted["name"])
        mine.cache.revive(kind, found | {"metadata": wanted | found["metadata"] | {"labels": wanted["labels"]}})
        return True

    monkeypatch.setattr(reconciler.Reconciler, "_meet", adopt)


def mounts_what_a_stranger_made(monkeypatch):
    monkeypatch.setattr(reconciler, "holds_up", lambda step, obstacles: False)
    monkeypatch.setattr(plan, "holds_up", lambda step, obstacles: False)


def remembers_strangers_for_ever(monkeypatch):
    prune = reconciler.Reconciler._prune

    def keep(mine, uid, incarnations):
        known = dict(mine._obstacles.get(uid, {}))
        prune(mine, uid, incarnations)
        if known:
            mine._obstacles[uid] = known

    monkeypatch.setattr(reconciler.Reconciler, "_prune", keep)


def insists_on_a_name(monkeypatch):
    obstacle = plan._obstacle

    def hide(situation, entry):
        words = obstacle(situation, entry)
        return "" if words.partition(":")[0].endswith("-rpc") else words

    monkeypatch.setattr(plan, "_obstacle", hide)


def never_waits(monkeypatch):
    def at_once(queue, key, *, at_least_s=0.0):
        queue.add_after(key, 0.05)
        return 0.05

    monkeypatch.setattr(reconciler.Queue, "retry", at_once)


def takes_one_group_too_many(monkeypatch):
    limits = rollout.limits

    def generous(spec, wanted):
        surge, unavailable = limits(spec, wanted)
        return rollout.Limits(surge, unavailable + 1)

    monkeypatch.setattr(rollout, "limits", generous)


def opens_no_budget(monkeypatch):
    monkeypatch.setattr(disruption, "to_open", lambda *_, **__: None)


def waits_for_the_release_for_ever(monkeypatch):
    monkeypatch.setattr(failure, "_not_released", lambda *_: Verdict(None))


def tells_the_time_of_starts(monkeypatch):
    tells_the_time(monkeypatch, of=("Starting",))


# What is wrong with the operator -> who breaks it so, the fault that shows it, more about the history, and the
# words in which it is found.
BREAKAGES = {
    "a group that serves is ended because its Service was deleted": (
        ends_what_lost_its_service,
        Fault(30.0, "child deleted", 0),
        {},
        "nothing happened to it, and it is ended",
    ),
    "what was read of a list whose continue token expired is taken for all there is": (
        takes_half_a_list_for_the_whole,
        Fault(30.0, "lists expire", 0),
        {},
        "incarnations of group",
    ),
    "an init container that never ends is waited for without end": (
        waits_for_the_release_for_ever,
        Fault(0.0, "long preparation", 0),
        {},
        "no rest after",
    ),
    "a group is tried again although it is to be given up": (
        goes_on_for_ever,
        Fault(30.0, "give up", 0),
        {},
        "is tried again, maxRestarts is",
    ),
    "a node is emptied although nobody has allowed it": (
        takes_closed_for_managed,
        Fault(30.0, "drain", 0),
        {"policy": "Closed"},
        "no node is to be emptied",
    ),
    "a rollout takes one group more than it may": (
        takes_one_group_too_many,
        Fault(30.0, "new image", 0),
        {},
        "other of 2 groups serve, maxUnavailable is 1",
    ),
    "a node is never let go": (
        opens_no_budget,
        Fault(30.0, "drain", 0),
        {},
        "is drained and not empty",
    ),
    "the status tells the time between two attempts": (
        tells_the_time,
        Fault(30.0, "bad image", 79190),
        {"replicas": 1},
        "writes between two attempts",
    ),
    "the status tells how long an attempt takes": (
        tells_the_time_of_starts,
        Fault(30.0, "bad image", 100),
        {"replicas": 1},
        "writes for",
    ),
    "an object of a stranger is taken for one of ours": (
        adopts_strangers,
        Fault(30.0, "stranger", 0),
        {},
        "a stranger",
    ),
    "pods are made that mount a stranger's ConfigMap": (
        mounts_what_a_stranger_made,
        Fault(0.0, "stranger", 0),
        {},
        "mounts what a stranger has made",
    ),
    "a stranger is spoken of when nobody wants its name any more": (
        remembers_strangers_for_ever,
        Fault(0.0, "stranger", 23),
        {},
        "what is said is",
    ),
    "a group waits for ever for the name that a stranger has of its first object": (
        insists_on_a_name,
        Fault(30.0, "stranger", 75931),
        {},
        "although it could have another",
    ),
    "a namespace that is going away is written to without a pause": (
        never_waits,
        Fault(30.0, "namespace goes", 0),
        {},
        "in a namespace that goes",
    ),
}


@pytest.mark.parametrize(("breaks", "fault", "more", "words"), BREAKAGES.values(), ids=BREAKAGES)
def test_an_operator_that_is_broken_is_found_out(monkeypatch, breaks, fault, more, words):
    """The invariants are worth something only if they fail: some fault of the kind must show each breakage."""
    breaks(monkeypatch)
    found = []
    for more_pick in range(20):  # whatever the next change of the model makes of the first one
        faults = (fault._replace(pick=fault.pick + 7919 * more_pick),)
        found.append(run(replace(PLAIN, seed=PLAIN.seed + more_pick, faults=faults, **more)).wrong)
        if words in found[-1]:
            return
    raise AssertionError(found)


def test_an_invariant_that_is_broken_is_found_and_shrunk_to_the_fault_that_breaks_it(monkeypatch):
    def leave_behind(world, chance):
        world.cluster._store("ConfigMap", module_manifest(), "ADDED")

    def module_manifest():
        labels = {
            "app.kubernetes.io/managed-by": "x",
            "dataparallel.io/incarnation": "zzzzz",
            "dataparallel.io/uid": "u",
        }
        return {"kind": "ConfigMap", "metadata": {"name": "left", "namespace": "ns", "labels": labels}}

    monkeypatch.setitem(module.FAULTS, "leave behind", leave_behind)
    monkeypatch.setattr(module, "PATIENCE_S", 50.0)
    faults = (Fault(1.0, "new image", 1), Fault(20.0, "leave behind", 2), Fault(30.0, "restart", 3))
    outcome = shrunk(replace(PLAIN, faults=faults))
    assert [fault.kind for fault in outcome.history.faults] == ["leave behind"]
    assert "left belongs to nobody" in outcome.wrong
