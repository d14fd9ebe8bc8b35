"""All objects at once, in the order in which they are made."""

from __future__ import annotations

from dp_operator.api import DataParallelDeployment
from dp_operator.render.base import Incarnation, Manifest, Settings
from dp_operator.render.gang import pod_group
from dp_operator.render.launchplan import config_map
from dp_operator.render.pods import head_pod, stateful_sets
from dp_operator.render.services import client_service, disruption_budget, network_policy, rpc_service
from dp_operator.render.shape import pods


def group_objects(inc: Incarnation, monitor_host: str) -> list[Manifest]:
    """Objects of one incarnation; monitor_host is the address that the API server gives its Service."""
    gang = pod_group(inc)
    return [
        rpc_service(inc),
        config_map(inc, monitor_host),
        disruption_budget(inc, pods=pods(inc.cr.spec)),
        *([gang] if gang else []),
        head_pod(inc),
        *stateful_sets(inc),
    ]


def kept_objects(cr: DataParallelDeployment, settings: Settings) -> list[Manifest]:
    """Objects that live as long as the custom resource."""
    policy = network_policy(cr, settings)
    return [client_service(cr), *([policy] if policy else [])]
