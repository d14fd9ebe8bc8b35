"""Services, NetworkPolicy and PodDisruptionBudget."""

from __future__ import annotations

from typing import Any

from dp_handshake.messages import MONITOR_PORT
from dp_operator import naming
from dp_operator.api import DataParallelDeployment, ServicePort, Spec
from dp_operator.render.base import Incarnation, Manifest, Settings, incarnation_selector, kept_meta, meta
from dp_operator.render.shape import api_ports, port_name


def rpc_service(inc: Incarnation, *, cluster_ip: str | None = None) -> Manifest:
    """Address of the monitor, known before any pod exists. Not-ready heads are published: that is its purpose.

    cluster_ip asks for the address that the launch plan already names, when the Service has to be made again.
    """
    dp = inc.cr.spec.data_parallel
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": incarnation_selector(inc, naming.HEAD),
        "ports": [
            {"name": "monitor", "port": MONITOR_PORT, "targetPort": MONITOR_PORT, "protocol": "TCP"},
            {"name": "rpc", "port": dp.rpc_port, "targetPort": dp.rpc_port, "protocol": "TCP"},
        ],
    }
    if cluster_ip:
        spec["clusterIP"] = cluster_ip
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(inc, naming.rpc_service_name(inc.base)),
        "spec": spec,
    }


def disruption_budget(inc: Incarnation, *, pods: int, opened: bool = False) -> Manifest:
    """Allow no pod of a group to be evicted alone; opened lets evictions through (disruption.py says when).

    An integer, because percentages and maxUnavailable count through the custom resource's scale subresource, which
    counts groups.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(inc, inc.base),
        "spec": {
            "minAvailable": 0 if opened else pods,
            "selector": {"matchLabels": incarnation_selector(inc)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow" if opened else "IfHealthyBudget",
        },
    }


def service_target(spec: Spec, port: ServicePort) -> int | str:
    """Where a port of the client Service leads: as written, else to the rank that has its number, else to the first."""
    own = api_ports(spec)
    return port.target_port or port_name(own.index(port.port) if port.port in own else 0)


def ranks_without_port(spec: Spec) -> list[int]:
    """Local ranks of a supervised pod that no port of the client Service leads to, while it has one for others."""
    targets = {service_target(spec, port) for port in spec.service.ports}
    reached = [bool(targets & {port, port_name(index)}) for index, port in enumerate(api_ports(spec))]
    return [index for index, has_port in enumerate(reached) if not has_port] if any(reached) else []


def client_service(cr: DataParallelDeployment) -> Manifest:
    """What clients talk to: every ready pod that has an API, and no other.

    A Service port leads to one port of each pod. So where a supervisor serves every local rank on a port of its own,
    the Service has one port per local rank (`http-0`, `http-1` …, on the engine's port numbers): a gateway that knows
    ranks takes its pick, and a client that takes the first still reaches one rank of every pod.
    """
    # Targets by name: while an engine.port changes, each pod is reached at the port that it has.
    ports = [
        {
            "name": port.name or ("http" if index == 0 else f"port-{port.port}"),
            "port": port.port,
            "targetPort": service_target(cr.spec, port),
            "protocol": "TCP",
            **({"appProtocol": port.app_protocol} if port.app_protocol else {}),
        }
        for index, port in enumerate(cr.spec.service.ports)
    ]
    own = api_ports(cr.spec)
    default = [
        {
            "name": "http" if len(own) == 1 else f"http-{index}",
            "port": port,
            "targetPort": port_name(index),
            "protocol": "TCP",
        }
        for index, port in enumerate(own)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": kept_meta(cr, annotations=dict(cr.spec.service.annotations)),
        "spec": {
            "type": cr.spec.service.type,
            "selector": {naming.LABEL_UID: cr.metadata.uid, naming.LABEL_SERVING: "true"},
            "ports": ports or default,
        },
    }


def network_policy(cr: DataParallelDeployment, settings: Settings) -> Manifest | None:
    """Who may reach the pods: each other, peers, API clients, and the operator at the monitor. None when switched off."""
    policy = cr.spec.network_policy
    if policy.mode == "Unmanaged":
        return None
    mine = {naming.LABEL_UID: cr.metadata.uid}
    api: dict[str, Any] = {"ports": _open_ports(cr)}
    if policy.api_from is not None:
        api["from"] = policy.api_from
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "podSelector": {"matchLabels": settings.pod_labels},
    }
    # Prefill and decode hand caches over on ports that their connectors choose: all ports, but from these pods only.
    members = [{"podSelector": {"matchLabels": mine}}]
    members += [{"podSelector": {"matchLabels": {naming.LABEL_NAME: peer}}} for peer in policy.peers]
    ingress: list[dict[str, Any]] = [
        {"from": members},
        {"from": [operator], "ports": [{"protocol": "TCP", "port": MONITOR_PORT}]},
    ]
    # An empty list means nobody; an absent one everybody. In a rule, an empty `from` would mean everybody.
    if policy.api_from is None or policy.api_from:
        ingress.append(api)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": kept_meta(cr),
        "spec": {"podSelector": {"matchLabels": mine}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _open_ports(cr: DataParallelDeployment) -> list[dict[str, Any]]:
    """Ports that clients may reach: those the Service leads to. An engine behind a sidecar is not among them."""
    named: list[int | str] = [port_name(index) for index in range(len(api_ports(cr.spec)))]
    chosen = {service_target(cr.spec, port) for port in cr.spec.service.ports}
    return [{"protocol": "TCP", "port": port} for port in sorted(chosen, key=str) or named]
