"""Every object of a DataParallelDeployment as a pure function of its spec. No clock, no API call.

Two families (see docs/architecture.md):

* objects of one incarnation: created once by POST, never edited, deleted together;
* objects that live as long as the custom resource: applied by server-side apply and repaired.

No object depends on the version of vLLM; command lines do, and their items carry the range of versions they are for.
"""

from __future__ import annotations

from dp_operator.render.argv import ArgvItem, engine_argv, resolve
from dp_operator.render.base import Incarnation, Manifest, Settings, owner_reference
from dp_operator.render.devices import slot_devices
from dp_operator.render.gang import pod_group
from dp_operator.render.launchplan import config_map, launch_plan
from dp_operator.render.objects import group_objects, kept_objects
from dp_operator.render.pods import GRACE_MARGIN_S, head_pod, stateful_sets
from dp_operator.render.quantity import in_bytes, multiply
from dp_operator.render.services import (
    client_service,
    disruption_budget,
    network_policy,
    ranks_without_port,
    rpc_service,
)
from dp_operator.render.shape import (
    api_ports,
    api_server_count,
    devices_per_pod,
    devices_per_rank,
    head_ranks,
    health,
    pods,
    ranks_of,
    serves,
    supervised,
    worker_pods,
    worker_sets,
)

__all__ = [
    "GRACE_MARGIN_S",
    "ArgvItem",
    "Incarnation",
    "Manifest",
    "Settings",
    "api_ports",
    "api_server_count",
    "client_service",
    "config_map",
    "devices_per_pod",
    "devices_per_rank",
    "disruption_budget",
    "engine_argv",
    "group_objects",
    "head_pod",
    "head_ranks",
    "health",
    "in_bytes",
    "kept_objects",
    "launch_plan",
    "multiply",
    "network_policy",
    "owner_reference",
    "pod_group",
    "pods",
    "ranks_of",
    "ranks_without_port",
    "resolve",
    "rpc_service",
    "serves",
    "slot_devices",
    "stateful_sets",
    "supervised",
    "worker_pods",
    "worker_sets",
]
