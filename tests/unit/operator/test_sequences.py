"""Rollout, failure, scaling and draining as readable stories: golden/sequences/*.txt, written anew by `make golden`.

Each file is what the operator did and said, step by step. Incarnations are called #1, #2 … in order of appearance.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dp_operator.observe import Node, timestamp
from tests.unit.operator.world import World

Golden = Callable[[str, str], None]
NEWER = {"image": "vllm/vllm-openai:v0.33.0"}


class Story:
    """A world whose log is written down."""

    def __init__(self, title: str, **spec: object) -> None:
        self.world = World(**spec)
        self._spec = spec
        self._lines = [title, "=" * len(title)]
        self._names: dict[str, str] = {}

    def step(self, words: str, *conditions: str) -> None:
        """Let the operator act, then write down what it did and how its groups are."""
        self.world.reconcile()
        self._lines += ["", f"{words}:"]
        for group in self.world.cr.status.groups:
            self._names.setdefault(group.incarnation, f"#{len(self._names) + 1}")
        actions = [line for line in self.world.take_log() if line != "status"]
        self._lines += [f"    {line}" for line in actions] or ["    nothing to do"]
        for group in self.world.cr.status.groups:
            words = f"group {group.index} {group.incarnation} {group.state}"
            words += f", takes over from {group.replaces}" if group.replaces else ""
            words += f", next attempt at {group.next_attempt_at}" if group.next_attempt_at else ""
            words += f", {group.restarts} restarts" if group.restarts else ""
            self._lines.append(f"  = {words}")
        for kind in dict.fromkeys(("Ready", "Available", *conditions)):
            found = self.world.condition(kind)
            text = f"{kind}={found.status}/{found.reason}"
            self._lines.append(f"  = {text}: {found.message}" if kind in conditions else f"  = {text}")

    def change(self, **changes: object) -> None:
        self._spec = self._spec | changes
        self.world.change_spec(**self._spec)

    def gone(self) -> None:
        self.world.kubelets_finish_deleting()

    def newest(self, index: int) -> str:
        """The incarnation of a group that starts."""
        return next(g.incarnation for g in self.world.cr.status.groups if g.index == index and g.state == "Starting")

    def text(self) -> str:
        text = "\n".join(self._lines) + "\n"
        for name, number in self._names.items():
            text = re.sub(rf"\b{name}\b", number, text)
        return text


def serving(title: str, *, groups: int, **spec: object) -> Story:
    story = Story(title, replicas=groups, **spec)
    story.world.reconcile()
    for index in range(groups):
        story.world.make_ready(index)
    story.world.take_log()
    story.step("All groups serve")
    return story


def test_rollout(golden: Golden):
    story = serving("A new image, three groups, maxUnavailable 1", groups=3)
    story.change(engine=NEWER)
    story.step("The image is changed")
    for index in (2, 1, 0):
        story.gone()
        story.step(f"The pods of group {index} have ended")
        story.world.bring_up(story.newest(index))
        story.step(f"Group {index} is ready", "Progressing")
    story.gone()
    story.step("At the end")
    golden("sequences/rollout.txt", story.text())


def test_rollout_with_surge_of_a_changed_size(golden: Golden):
    story = serving(
        "Another size, one group, maxSurge 1, maxUnavailable 0", groups=1, rollout={"maxSurge": 1, "maxUnavailable": 0}
    )
    story.change(dataParallel={"size": 6})
    story.step("dataParallel.size is changed from 4 to 6")
    story.world.bring_up(story.newest(0))
    story.step("The successor is ready")
    story.gone()
    story.step("The old pods have ended")
    golden("sequences/size-change-with-surge.txt", story.text())


def test_broken_revision_and_rollback(golden: Golden):
    story = serving("A broken revision stops after one of three groups", groups=3)
    story.change(engine=NEWER)
    story.step("The image is changed")
    story.gone()
    story.step("The pods of group 2 have ended")
    broken = story.newest(2)
    story.world.run_pods(broken)
    story.world.engine_ends(f"web-2-{broken}-w-1", code=1)
    story.step("Its new engines end", "Progressing")
    story.gone()
    story.step("Their pods have ended", "Progressing")
    story.change(engine={"image": "vllm/vllm-openai:v0.32.0"})
    story.step("The image is rolled back", "Progressing")
    story.world.bring_up(story.newest(2))
    story.step("Group 2 is ready", "Progressing")
    golden("sequences/broken-revision.txt", story.text())


def test_failure(golden: Golden):
    story = serving("A worker is killed by a segmentation fault", groups=1)
    first = story.world.entry().incarnation
    story.world.engine_ends(f"web-0-{first}-w-1", code=139)
    story.step("The kubelet reports exit code 139 of rank 2")
    story.gone()
    story.step("All pods have ended")
    story.world.now += 11
    story.step("The back-off is over")
    story.world.bring_up(story.newest(0))
    story.step("All ranks are ready")
    golden("sequences/failure.txt", story.text())


def test_a_download_that_takes_too_long(golden: Golden):
    """What holds a start up and goes on is bounded too, and the user learns what to raise."""
    story = Story("An init container takes longer than scheduleTimeoutSeconds", startup={"scheduleTimeoutSeconds": 600})
    world = story.world
    story.step("The resource is created")
    first = world.entry().incarnation
    world.run_pods(first)
    fetches = {"name": "fetch", "state": {"running": {"startedAt": timestamp(world.now)}}}
    waits = {"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}
    world.pod(f"web-0-{first}-w-1")["status"] |= {"initContainerStatuses": [fetches], "containerStatuses": [waits]}
    story.step("All pods have a node, and one fetches the model before its engine")
    world.now += 301
    story.step("Five minutes later", "Ready")
    world.now += 300
    story.step("Ten minutes are over", "Ready")
    story.gone()
    story.step("All pods have ended")
    story.change(startup={"scheduleTimeoutSeconds": 3600})
    world.now += 11
    story.step("startup.scheduleTimeoutSeconds is 3600, and the back-off is over")
    golden("sequences/download-too-long.txt", story.text())


def test_scale(golden: Golden):
    story = serving("Scaling up, down in the middle of a rollout, to none and back", groups=1)
    story.change(replicas=3)
    story.step("replicas is 3")
    story.world.make_ready(1)
    story.world.make_ready(2)
    story.step("All are ready")
    story.change(engine=NEWER)
    story.step("The image is changed")
    story.change(replicas=2)
    story.step("replicas is 2 while group 2 is being replaced")
    story.gone()
    story.step("The pods of group 2 have ended")
    story.change(replicas=0)
    story.step("replicas is 0")
    story.gone()
    story.step("All pods have ended")
    story.change(replicas=1)
    story.step("replicas is 1")
    golden("sequences/scale.txt", story.text())


@pytest.mark.parametrize("policy", ["Managed", "Closed"])
def test_drain(golden: Golden, policy: str):
    story = serving(f"A node is emptied, disruption.policy {policy}", groups=2, disruption={"policy": policy})
    world = story.world
    world.nodes = {name: Node(name=name) for name in ("n1", "n2", "n3")}
    world.nodes["n2"] = Node(name="n2", unschedulable=True)
    story.step("n2, with pods of both groups, is made unschedulable", "DrainBlocked")
    if policy == "Managed":
        evicted = world.entry(1).incarnation
        world._deleted("Pod", f"web-1-{evicted}-w-0")
        story.step("A pod of group 1 is evicted", "DrainBlocked")
        story.gone()
        story.step("The pods of group 1 have ended", "DrainBlocked")
        world.bring_up(story.newest(1))
        story.step("Group 1 serves again, elsewhere", "DrainBlocked")
    golden(f"sequences/drain-{policy.lower()}.txt", story.text())


def test_drain_with_surge(golden: Golden):
    rollout = {"maxSurge": 1, "maxUnavailable": 0}
    story = serving("A node is emptied, one group, maxSurge 1, maxUnavailable 0", groups=1, rollout=rollout)
    world = story.world
    world.nodes = {"n1": Node(name="n1"), "n2": Node(name="n2", unschedulable=True), "n3": Node(name="n3")}
    story.step("n2 is made unschedulable", "DrainBlocked")
    successor = story.newest(0)
    world.bring_up(successor)
    story.step("The successor is ready", "DrainBlocked")
    story.gone()
    story.step("The old pods have ended", "DrainBlocked")
    golden("sequences/drain-with-surge.txt", story.text())
