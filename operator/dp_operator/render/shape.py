"""Which pods a group has and which ranks they run. Pure arithmetic over the spec.

Four ways to run data-parallel vLLM come out of one field (docs/modes.md):

| mode                     | pods that serve the API | ranks of other pods than the head say        |
|--------------------------|-------------------------|----------------------------------------------|
| Internal                 | the head                | headless, over the relay                     |
| Hybrid                   | every pod               | not headless, over the relay, and to their own front end |
| External, sizeLocal 1    | every pod               | the same                                     |
| External, sizeLocal >= 2 | every pod, a port a rank| the same; a supervisor starts one server per rank |
"""

from __future__ import annotations

from dp_handshake.messages import WorkerSet
from dp_operator import naming
from dp_operator.api import Spec
from dp_operator.observe import worker_first_ranks


def head_ranks(spec: Spec) -> int:
    """Ranks in the head pod."""
    return spec.data_parallel.size_local if spec.data_parallel.head_placement == "Colocated" else 0


def ranks_of(spec: Spec, role: str) -> int:
    """Ranks in one pod of that role."""
    return spec.data_parallel.size_local if role == naming.WORKER else head_ranks(spec)


def devices_per_rank(spec: Spec) -> int:
    """Accelerators of one rank; 0 where the engine uses none."""
    return 0 if spec.devices.assignment == "None" else spec.tensor_parallel_size * spec.pipeline_parallel_size


def devices_per_pod(spec: Spec) -> int:
    """Accelerators of one pod that runs size_local ranks."""
    return spec.data_parallel.size_local * spec.tensor_parallel_size * spec.pipeline_parallel_size


def supervised(spec: Spec) -> bool:
    """Whether a supervisor starts one API server per local rank, on ports engine.port, engine.port + 1 …."""
    return spec.data_parallel.load_balancing == "External" and spec.data_parallel.size_local >= 2


def serves(spec: Spec, role: str) -> bool:
    """Whether pods of that role have an API."""
    return role == naming.HEAD or spec.data_parallel.load_balancing != "Internal"


def port_name(index: int) -> str:
    """Name of the container port of one API server: one per pod, or one per local rank under a supervisor."""
    return f"api-{index}" if index else "api"


def api_ports(spec: Spec) -> range:
    """API ports of one serving pod: one, or one per local rank under a supervisor."""
    count = spec.data_parallel.size_local if supervised(spec) else 1
    return range(spec.engine.port, spec.engine.port + count)


def health(spec: Spec) -> tuple[int, str]:
    """Port and path that answer 200 once every rank of a serving pod is ready.

    The supervisor opens its port only when all its children are healthy (protocol notes §1.1), with the scheme of the
    engine.
    """
    if supervised(spec):
        return spec.data_parallel.supervisor_port, "/readyz"
    return spec.engine.port, "/health"


def api_server_count(spec: Spec) -> int:
    """API server processes of a serving pod. Always rendered: vLLM 0.15 and newer would start one per rank."""
    dp = spec.data_parallel
    managed = {"Internal": dp.size, "Hybrid": dp.size_local, "External": 1}[dp.load_balancing]
    return dp.api_server_count or max(1, min(4, managed // 4))


def worker_sets(spec: Spec, base: str) -> list[WorkerSet]:
    """StatefulSets of the workers and the ranks of their pods.

    Pods that hold ranks are numbered 0, 1, 2 … in rank order; a Colocated head is pod 0. With Slots, pod p uses
    slot p modulo the slots of a node and is ordinal p // slots of that slot's set, so rank = first + stride x ordinal
    holds for every set, and slot 0 begins at ordinal 1 where the head is Colocated.
    """
    dp = spec.data_parallel
    pods = dp.size // dp.size_local
    first_pod = 1 if head_ranks(spec) else 0
    if spec.devices.assignment != "Slots":
        count = pods - first_pod
        first_rank = first_pod * dp.size_local
        return (
            [
                WorkerSet(
                    name=naming.worker_set_name(base, None),
                    replicas=count,
                    first_rank=first_rank,
                    rank_stride=dp.size_local,
                )
            ]
            if count
            else []
        )
    slots = spec.devices.per_node // devices_per_pod(spec)
    sets = []
    for slot in range(slots):
        start = 1 if slot < first_pod else 0
        count = len(range(slot + start * slots, pods, slots))
        if count:
            sets.append(
                WorkerSet(
                    name=naming.worker_set_name(base, slot),
                    replicas=count,
                    first_rank=slot * dp.size_local,
                    rank_stride=slots * dp.size_local,
                    ordinal_start=start,
                )
            )
    return sets


def worker_pods(spec: Spec, base: str) -> dict[str, int]:
    """Worker pod name -> its first rank, in rank order."""
    return worker_first_ranks(worker_sets(spec, base))


def pods(spec: Spec) -> int:
    """Pods of one group, the head included."""
    return 1 + sum(workers.replicas for workers in worker_sets(spec, "x"))
