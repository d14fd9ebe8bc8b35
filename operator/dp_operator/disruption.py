"""Which group's budget is open for evictions. Pure.

A budget protects a whole group: it asks for all of its pods, so that no eviction takes a rank out of a group that
serves. For a node that is being emptied it is opened, for one group at a time and only while enough others serve; the
first eviction then ends the group, and it starts anew elsewhere before the next group's turn comes. Where no group may
be unavailable, a successor is started first (surge), and the old incarnation goes once that one is ready.
"""

from __future__ import annotations

from dp_operator import naming, rollout
from dp_operator.api import DataParallelDeployment, GroupStatus
from dp_operator.observe import Picture


def emptied_nodes(cr: DataParallelDeployment, picture: Picture) -> set[str]:
    """Nodes that pods should be able to leave: the unschedulable ones and those an annotation names.

    The annotation is how an administrator says it where the operator may not read nodes, and with policy Closed. A node
    that is known to take any pod is not being emptied, whatever the annotation says: what leaves it could come back.
    """
    policy = cr.spec.disruption.policy
    if policy == "Open":
        return set()
    named = cr.metadata.annotations.get(naming.ANNOTATION_DRAIN_NODES, "")
    cordoned = unschedulable(picture)
    welcoming = {name for name, node in picture.nodes.items() if not (node.unschedulable or node.tainted)}
    nodes = {name.strip() for name in named.split(",") if name.strip()} - welcoming
    return nodes if policy == "Closed" else nodes | cordoned


def unschedulable(picture: Picture) -> set[str]:
    return {name for name, node in picture.nodes.items() if node.unschedulable}


def on_nodes(entry: GroupStatus, picture: Picture, nodes: set[str]) -> list[str]:
    """Which of the nodes hold pods of an incarnation."""
    objects = picture.incarnations.get(entry.incarnation)
    return sorted({pod.spec.node_name for pod in objects.pods} & nodes) if objects else []


def is_open(entry: GroupStatus, picture: Picture) -> bool:
    """Whether an incarnation's budget lets evictions through now, as far as is known."""
    objects = picture.incarnations.get(entry.incarnation)
    budget = objects.budget if objects else None
    if budget is None:
        return False
    raw = picture.kept.get(("PodDisruptionBudget", budget.metadata.name), {})
    return bool((raw.get("spec") or {}).get("minAvailable") == 0)


def to_open(
    cr: DataParallelDeployment, picture: Picture, entries: list[GroupStatus], *, wanted: int
) -> GroupStatus | None:
    """The one incarnation whose budget is to be open, if any. An open one stays so while it may."""
    nodes = emptied_nodes(cr, picture)
    if not nodes:
        return None
    candidates = [e for e in entries if rollout.alive(e) and e.created_at and on_nodes(e, picture, nodes)]
    serving = {e.index for e in entries if rollout.available(e, picture)}
    free = rollout.limits(cr.spec.rollout, wanted).unavailable - (wanted - len(serving & set(range(wanted))))
    # A group that does not serve may go at any time, and goes first.
    allowed = [e for e in candidates if e.index not in serving or free > 0]
    allowed.sort(key=lambda e: (e.index in serving, not is_open(e, picture), -e.index))
    return allowed[0] if allowed else None


def blocked(
    cr: DataParallelDeployment, picture: Picture, entries: list[GroupStatus], *, wanted: int
) -> tuple[str, str] | None:
    """(reason, what to do) where a node cannot be emptied now; None where nothing is in the way."""
    if cr.spec.disruption.policy == "Open":
        return None
    asked = emptied_nodes(cr, picture)
    all_nodes = asked | unschedulable(picture)
    if not all_nodes:
        return None
    waiting = [e for e in entries if rollout.alive(e) and on_nodes(e, picture, all_nodes)]
    if not waiting:
        return None
    where = "; ".join(f"group {e.index} has pods on {', '.join(on_nodes(e, picture, all_nodes))}" for e in waiting[:4])
    closed = [e for e in waiting if on_nodes(e, picture, all_nodes - asked)]
    if closed:
        names = ",".join(sorted(all_nodes - asked))
        return (
            "PolicyClosed",
            (
                f"{where}. disruption.policy is Closed, so no eviction is let through: to move the groups, one at a time, "
                f"set annotation {naming.ANNOTATION_DRAIN_NODES} to {names}"
            ),
        )
    if to_open(cr, picture, entries, wanted=wanted) or any(e.replaces for e in waiting):
        return None
    ours = {e.incarnation for e in waiting}
    if any(e.replaces in ours and e.state != "Stopping" for e in entries):
        return "SuccessorStarting", f"{where}. Their successors have to be ready first (rollout.maxUnavailable is 0)"
    return (
        "NoBudget",
        (
            f"{where}. Too few groups serve to let one go (rollout.maxUnavailable {cr.spec.rollout.max_unavailable}): "
            "it goes on by itself once more groups are ready"
        ),
    )
