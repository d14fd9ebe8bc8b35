"""The operator killed after any single write of what it does: the same end as without the kill.

Every write of every undertaking is tried, one kill a run; the process comes back half a second later.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from dp_operator import api, naming, reconciler
from tests.simulation import history as module
from tests.simulation import process
from tests.simulation.history import World
from tests.simulation.test_robustness import play, ready

Act = Callable[[World], None]
SETTLED_S = 400.0  # a history without faults is at rest long before


class Run(NamedTuple):
    state: dict[str, Any]
    writes: int  # while it was done
    died: bool
    trace: list[str]


class Undertaking(NamedTuple):
    act: Act
    history: tuple[tuple[str, Any], ...] = ()
    prepare: Act = lambda world: None


def fail(world: World) -> None:
    worker = min((p["metadata"]["name"], p["metadata"]["uid"]) for p in world.pods() if "-w-" in p["metadata"]["name"])
    world.cluster._engine_ends(worker[1], 137, "OOMKilled", cascade=False)


def drain(world: World) -> None:
    """Empty the node of group 0's head. With policy Managed nobody has to be asked."""
    head = min(p["metadata"]["name"] for p in world.pods())
    node = world.cluster.get("Pod", head)["spec"]["nodeName"]
    world.cluster.nodes = {node: world.cluster.nodes[node]} | world.cluster.nodes
    first = random.Random(0)
    first.choice = lambda options: options[0]  # type: ignore[method-assign]
    module._drain(world, first)


def delete(world: World) -> None:
    """In the middle of a rollout, because there is nothing to write in an operator at rest."""
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.1"})
    world.cluster.loop.call_later(9, lambda: world.cluster._drop(world.cr()))


ROLLOUT: Act = lambda world: world.edit(engine={"image": "vllm/vllm-openai:v0.33.1"})  # noqa: E731
SURGE = (("surge", 1), ("unavailable", 0))
UNDERTAKINGS = {
    "a start": Undertaking(lambda world: world.edit(replicas=1), (("replicas", 0),)),
    "a rollout": Undertaking(ROLLOUT),
    "a rollout with surge": Undertaking(ROLLOUT, SURGE),
    "a failed group's replacement": Undertaking(fail),
    "a scale-down": Undertaking(lambda world: world.edit(replicas=1)),
    "a scale-up": Undertaking(lambda world: world.edit(replicas=3)),
    "a drain": Undertaking(drain),
    "a drain with surge": Undertaking(drain, SURGE),
    "a suspension": Undertaking(lambda world: world.edit(suspend=True)),
    "a resumption": Undertaking(
        lambda world: world.edit(suspend=False), prepare=lambda world: world.edit(suspend=True)
    ),
    "the resource's deletion": Undertaking(delete),
}


def state(world: World) -> dict[str, Any]:
    """What is there in the end, without the names that differ from run to run."""
    objects = world.cluster.objects
    raw = world.cr()
    status = api.decode(raw).status if raw else api.Status()
    labels = [(kind, obj["metadata"].get("labels") or {}) for (kind, _), obj in objects.items() if kind != "Node"]
    return {
        "objects": Counter(
            (kind, its.get(naming.LABEL_GROUP), its.get(naming.LABEL_ROLE), its.get(naming.LABEL_REVISION))
            for kind, its in labels
        ),
        "groups": [
            (g.index, g.revision, g.state, g.restarts, g.replaces, [(f.reason, f.charged) for f in g.last_failures])
            for g in status.groups
        ],
        "conditions": {c.type: (c.status, c.reason) for c in status.conditions},
        "open budgets": [
            b["metadata"]["name"] for b in world.ours("PodDisruptionBudget") if not b["spec"]["minAvailable"]
        ],
    }


def done(undertaking: Undertaking, *, kill_at: int | None) -> Run:
    seen: dict[str, Any] = {}

    async def script(world: World) -> None:
        await ready(world)
        undertaking.prepare(world)
        await asyncio.sleep(SETTLED_S)
        before = world.process.writes
        world.weather.kill_at_write = kill_at
        undertaking.act(world)
        await asyncio.sleep(SETTLED_S)
        assert not world.unrest(), "\n".join([*world.cluster.trace, world.unrest()])
        seen["state"], seen["writes"] = state(world), world.process.writes - before
        await asyncio.sleep(SETTLED_S)
        assert state(world) == seen["state"], "it goes on changing"
        assert world.process.writes - before == seen["writes"], world.cluster.trace[-3:]

    world = play(script, **{"replicas": 2, "seed": 7, **dict(undertaking.history)})
    return Run(
        seen["state"], seen["writes"], any("operator dies" in line for line in world.cluster.trace), world.cluster.trace
    )


def first_difference(undertaking: Undertaking) -> str:
    """What ends otherwise after a kill, and after which write; empty where nothing does."""
    undisturbed = done(undertaking, kill_at=None)
    assert undisturbed.writes > 5, undisturbed.trace
    for write in range(1, undisturbed.writes + 1):
        killed = done(undertaking, kill_at=write)
        assert killed.died
        if killed.state != undisturbed.state:
            what = [f"{key}: {undisturbed.state[key]}\n  -> {value}" for key, value in killed.state.items()]
            return "\n".join([*killed.trace, *what, f"killed after write {write}"])
    return ""


@pytest.mark.parametrize("undertaking", UNDERTAKINGS.values(), ids=UNDERTAKINGS)
def test_the_operator_killed_after_any_single_write_ends_in_the_same_state(undertaking):
    difference = first_difference(undertaking)
    assert not difference, difference


def test_a_failure_that_only_the_process_remembers_is_found_out(monkeypatch):
    """The ledger has it before anything is deleted. Here it does not."""
    decide, start = reconciler.plan, process.Process.start
    remembered: dict[str, api.GroupStatus] = {}

    def forgetful_start(mine):
        remembered.clear()
        start(mine)

    def forgetful(situation):
        groups = [remembered.get(g.incarnation, g) if g.state == "Stopping" else g for g in situation.cr.status.groups]
        status = replace(situation.cr.status, groups=groups)
        decided = decide(replace(situation, cr=replace(situation.cr, status=status)))
        remembered.update({g.incarnation: g for g in decided.status.groups if g.state == "Stopping"})
        written = [
            replace(g, restarts=0, last_failures=[], next_attempt_at=None) if g.state == "Stopping" else g
            for g in decided.status.groups
        ]
        return replace(decided, status=replace(decided.status, groups=written))

    monkeypatch.setattr(process.Process, "start", forgetful_start)
    monkeypatch.setattr(reconciler, "plan", forgetful)
    assert "OutOfMemory" in first_difference(UNDERTAKINGS["a failed group's replacement"])
