"""Which pods make up an incarnation, and which ranks each of them runs. Pure; read from the launch plan."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from dp_handshake.messages import LaunchPlan


class Place(Struct, frozen=True, kw_only=True):
    """One pod of the plan and its ranks: first_rank … first_rank + ranks - 1 (none on a Dedicated head)."""

    pod: str
    role: Literal["head", "worker"]
    first_rank: int
    ranks: int

    @property
    def rank_range(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)


def places(plan: LaunchPlan) -> list[Place]:
    """List every pod of the plan, the head first, then the workers by their ranks."""
    workers = [
        Place(
            pod=f"{workers.name}-{ordinal}",
            role="worker",
            first_rank=workers.first_rank + workers.rank_stride * ordinal,
            ranks=plan.size_local,
        )
        for workers in plan.workers
        for ordinal in range(workers.ordinal_start, workers.ordinal_start + workers.replicas)
    ]
    head = Place(pod=plan.head_pod, role="head", first_rank=0, ranks=plan.head_ranks)
    return [head, *sorted(workers, key=lambda place: place.first_rank)]
