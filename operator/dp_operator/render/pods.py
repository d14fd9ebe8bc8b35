"""The pods: head Pod and worker StatefulSets, with the user's template laid over them."""

from __future__ import annotations

from typing import Any

from dp_handshake.messages import MONITOR_PORT, WorkerSet
from dp_operator import naming
from dp_operator.api import EnvVar, Resources, Spec
from dp_operator.render import gang
from dp_operator.render.base import Incarnation, Manifest, incarnation_selector, labels, meta
from dp_operator.render.devices import anti_affinity, device_labels, slot_devices
from dp_operator.render.quantity import multiply
from dp_operator.render.shape import (
    api_ports,
    devices_per_pod,
    head_ranks,
    health,
    pods,
    port_name,
    ranks_of,
    serves,
    supervised,
    worker_sets,
)
from dp_operator.render.template import merge

MOUNT = "/dataparallel"
STATE_DIR = "/run/dataparallel"
GROUP_DIR = "/run/dpd"
GRACE_MARGIN_S = 10
_LAUNCH = f"{MOUNT}/launch.py"
# Started hundreds of times a minute by the kubelets: isolated and without site packages it is three times faster.
_FAST_PYTHON = ["python3", "-I", "-S"]
_OURS = frozenset({"engine", "relay"})


def head_pod(inc: Incarnation) -> Manifest:
    """The head: relay as native sidecar, then the engine. A bare pod, because nobody but us may restart it."""
    spec = inc.cr.spec
    slot = 0 if spec.devices.assignment == "Slots" and head_ranks(spec) else None
    pod = _pod_spec(inc, naming.HEAD, slot)
    pod["restartPolicy"] = "Never"
    pod["initContainers"] = [_relay_container(inc)]
    pod["volumes"].append({"name": "relay-state", "emptyDir": {}})
    metadata = meta(inc, naming.head_name(inc.base))
    metadata["labels"] = _pod_labels(inc, naming.HEAD, slot)
    template = _with_templates(inc, naming.HEAD, slot, {"metadata": metadata, "spec": pod})
    return {"apiVersion": "v1", "kind": "Pod", **template}


def stateful_sets(inc: Incarnation) -> list[Manifest]:
    """The workers: one StatefulSet per device slot with Slots, at most one otherwise."""
    return [_stateful_set(inc, ws) for ws in worker_sets(inc.cr.spec, inc.base)]


def _stateful_set(inc: Incarnation, workers: WorkerSet) -> Manifest:
    spec = inc.cr.spec
    slot = None
    if spec.devices.assignment == "Slots":
        slot = workers.first_rank // spec.data_parallel.size_local
    pod = _pod_spec(inc, naming.WORKER, slot)
    env = pod["containers"][0]["env"]
    env.insert(3, {"name": "DPD_WORKER_SET", "value": workers.name})
    selector = incarnation_selector(inc, naming.WORKER) | {naming.LABEL_SET: workers.name}
    pod_labels = _pod_labels(inc, naming.WORKER, slot) | {naming.LABEL_SET: workers.name}
    template = {"metadata": {"labels": pod_labels}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta(inc, workers.name, naming.WORKER),
        "spec": {
            "replicas": workers.replicas,
            "ordinals": {"start": workers.ordinal_start},
            # Pod names in DNS are nobody's need here: ranks are reached by address. So no Service of its own.
            "serviceName": naming.rpc_service_name(inc.base),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": selector},
            "template": _with_templates(inc, naming.WORKER, slot, template),
        },
    }


def _pod_labels(inc: Incarnation, role: str, slot: int | None) -> dict[str, str]:
    serving = {naming.LABEL_SERVING: "true"} if serves(inc.cr.spec, role) else {}
    return labels(inc, role) | serving | device_labels(inc.cr.spec, slot)


def _with_templates(inc: Incarnation, role: str, slot: int | None, rendered: dict[str, Any]) -> dict[str, Any]:
    """Lay the gang scheduler's needs, template and headTemplate over a rendered pod, in this order.

    What keeps pods of the same devices apart comes last: a null in a template must not take it away.
    """
    spec = inc.cr.spec
    result = merge(rendered, gang.pod_template(inc))
    for overlay in (spec.template, spec.head_template if role == naming.HEAD else None):
        if overlay:
            result = merge(result, overlay)
    if slot is not None:
        apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": anti_affinity(spec, slot)}}
        result = merge(result, {"spec": {"affinity": apart}})
    return result | {"spec": _with_guests_told(inc, role, result["spec"])}


def _with_guests_told(inc: Incarnation, role: str, pod: dict[str, Any]) -> dict[str, Any]:
    """Tell containers of the user's own where they are: by environment, and by a file once the group is released."""
    guests = [c for field in ("initContainers", "containers") for c in pod.get(field, []) if c["name"] not in _OURS]
    if not guests:
        return pod
    shared = {"name": "dpd-group", "mountPath": GROUP_DIR}
    engine = {"name": "engine", "env": [{"name": "DPD_GROUP_DIR", "value": GROUP_DIR}], "volumeMounts": [shared]}
    told = merge(pod, {"volumes": [{"name": "dpd-group", "emptyDir": {}}], "containers": [engine]})
    for field in ("initContainers", "containers"):
        if field in told:
            told[field] = [c if c["name"] in _OURS else _told(inc, role, c, shared) for c in told[field]]
    return told


def _told(inc: Incarnation, role: str, guest: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Ours come first, so that the guest's own variables may refer to them; what it sets itself stays its own."""
    theirs = guest.get("env", [])
    names = {item["name"] for item in theirs}
    ours = [item for item in _environment(inc, role) if item["name"] not in names]
    mounts = list(guest.get("volumeMounts", []))
    if all(mount["mountPath"].rstrip("/") != GROUP_DIR for mount in mounts):
        mounts.append(shared | {"readOnly": True})
    return guest | {"env": [*ours, *theirs], "volumeMounts": mounts}


def _pod_spec(inc: Incarnation, role: str, slot: int | None) -> dict[str, Any]:
    spec = inc.cr.spec
    return {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": spec.drain.endpoint_seconds + spec.drain.timeout_seconds + GRACE_MARGIN_S,
        "containers": [_engine_container(inc, role, slot)],
        "volumes": [
            {"name": "dataparallel", "configMap": {"name": inc.base}},
            {
                "name": "shm",
                "emptyDir": {
                    "medium": "Memory",
                    "sizeLimit": multiply(spec.engine.shared_memory, max(1, ranks_of(spec, role))),
                },
            },
        ],
    }


def _engine_container(inc: Incarnation, role: str, slot: int | None) -> dict[str, Any]:
    spec = inc.cr.spec
    container: dict[str, Any] = {
        "name": "engine",
        "image": spec.engine.image,
        "command": ["python3", _LAUNCH],
        "env": [*_environment(inc, role), *_engine_environment(spec, slot)],
        "resources": _resources(spec, role),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "dataparallel", "mountPath": MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    drain = spec.drain
    if serves(spec, role):
        container["ports"] = _container_ports(spec, role)
        port, path = health(spec)
        container["readinessProbe"] = {
            "httpGet": {
                "path": path,
                "port": "api" if port == spec.engine.port else "supervisor",
                "scheme": spec.engine.scheme,
            },
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        }
        if drain.endpoint_seconds:
            # The endpoint leaves the Service at once; the engine goes on until routers have noticed.
            container["lifecycle"] = {"preStop": {"sleep": {"seconds": drain.endpoint_seconds}}}
    else:
        container["readinessProbe"] = {
            "exec": {"command": [*_FAST_PYTHON, _LAUNCH, "ready"]},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        }
        wait = drain.endpoint_seconds + drain.timeout_seconds
        container["lifecycle"] = {"preStop": {"exec": {"command": [*_FAST_PYTHON, _LAUNCH, "prestop", str(wait)]}}}
    return container


def _container_ports(spec: Spec, role: str) -> list[dict[str, Any]]:
    """Ports of a serving pod.

    In the host's network Kubernetes makes a hostPort of each, so that no two pods of the operator that listen on the
    same port share a node.
    """
    own = api_ports(spec)
    ports: list[dict[str, Any]] = [{"name": port_name(index), "containerPort": port} for index, port in enumerate(own)]
    if supervised(spec):
        ports.append({"name": "supervisor", "containerPort": spec.data_parallel.supervisor_port})
    if role == naming.HEAD and pods(spec) > 1:
        ports.append({"name": "handshake", "containerPort": spec.data_parallel.rpc_port + 1})
    return ports


def _environment(inc: Incarnation, role: str) -> list[dict[str, Any]]:
    """Where a container is, for ours and for the user's own."""
    return [
        {"name": "DPD_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DPD_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "DPD_ROLE", "value": role},
        {"name": "DPD_NAME", "value": inc.cr.metadata.name},
        {"name": "DPD_GROUP", "value": str(inc.group)},
        {"name": "DPD_SIZE", "value": str(inc.cr.spec.data_parallel.size)},
    ]


def _engine_environment(spec: Spec, slot: int | None) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        # vLLM takes its own address from here; a pod can have several.
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # vLLM's own limit must not end a start that the deadline still allows.
        {"name": "VLLM_ENGINE_READY_TIMEOUT_S", "value": str(spec.startup.timeout_seconds)},
    ]
    if slot is not None:
        visible = ",".join(str(index) for index in slot_devices(spec, slot))
        env.append({"name": spec.devices.visible_devices_env_name, "value": visible})
    return env + [_env_var(item) for item in spec.engine.env]


def _env_var(item: EnvVar) -> dict[str, Any]:
    if item.value_from is not None:
        return {"name": item.name, "valueFrom": item.value_from}
    return {"name": item.name, "value": item.value or ""}


def _resources(spec: Spec, role: str) -> dict[str, Any]:
    merged: dict[str, dict[str, int | str]] = {}
    sources: list[Resources] = [spec.engine.resources]
    if role == naming.HEAD:
        sources.append(spec.head_resources)
    for source in sources:
        for part, values in (("requests", source.requests), ("limits", source.limits)):
            merged.setdefault(part, {}).update(values)
    if spec.devices.assignment == "DevicePlugin" and (role == naming.WORKER or head_ranks(spec)):
        merged.setdefault("limits", {})[spec.devices.resource_name] = devices_per_pod(spec)
    return {part: values for part, values in merged.items() if values}


def _relay_container(inc: Incarnation) -> dict[str, Any]:
    dp = inc.cr.spec.data_parallel
    return {
        "name": "relay",
        "image": inc.settings.relay_image,
        "restartPolicy": "Always",
        "command": ["dp-handshake", "relay", "--plan", f"{MOUNT}/plan.json", "--state-dir", STATE_DIR],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [
            {"name": "monitor", "containerPort": MONITOR_PORT},
            {"name": "rpc", "containerPort": dp.rpc_port},
        ],
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "dataparallel", "mountPath": MOUNT, "readOnly": True},
            {"name": "relay-state", "mountPath": STATE_DIR},
        ],
    }
