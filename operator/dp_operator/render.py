"""Every object of a DataParallelDeployment as a pure function of its spec. No clock, no API call.

Two families (see docs/architecture.md):

* objects of one incarnation: created once by POST, never edited, deleted together;
* objects that live as long as the custom resource: applied by server-side apply and repaired.

The rendering rules for `vllm serve` are those of Internal load balancing. One rule is easy to get wrong and is
therefore tested by name: the head never gets `--data-parallel-start-rank`, because vLLM 0.28 and newer read any
given value, 0 included, as hybrid load balancing.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

import msgspec

from dp_handshake.messages import MONITOR_PORT, Fill, LaunchPlan, Versioned, WorkerSet
from dp_operator import naming
from dp_operator.api import API_VERSION, KIND, DataParallelDeployment, EnvVar, Resources, Spec
from dp_operator.observe import worker_first_ranks

Manifest = dict[str, Any]
ArgvItem = str | Fill | Versioned

MOUNT = "/dataparallel"
STATE_DIR = "/run/dataparallel"
GRACE_MARGIN_S = 10
_LAUNCH = f"{MOUNT}/launch.py"
# Started hundreds of times a minute by the kubelets: isolated and without site packages it is three times faster.
_FAST_PYTHON = ["python3", "-I", "-S"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering needs to know about the operator itself."""

    relay_image: str
    namespace: str = "dp-system"
    pod_labels: dict[str, str] = msgspec.field(default_factory=lambda: {"app.kubernetes.io/name": "dp-operator"})


def api_server_count(spec: Spec) -> int:
    """API server processes on the head. Always rendered: vLLM 0.15 and newer would start one per rank."""
    return spec.data_parallel.api_server_count or max(1, min(4, spec.data_parallel.size // 4))


def head_ranks(spec: Spec) -> int:
    """Ranks in the head pod."""
    return spec.data_parallel.size_local if spec.data_parallel.head_placement == "Colocated" else 0


def devices_per_pod(spec: Spec) -> int:
    """Accelerators of one pod that runs size_local ranks."""
    return spec.data_parallel.size_local * spec.tensor_parallel_size * spec.pipeline_parallel_size


def devices_per_rank(spec: Spec) -> int:
    """Accelerators of one rank; 0 where the engine uses none."""
    return 0 if spec.devices.assignment == "None" else spec.tensor_parallel_size * spec.pipeline_parallel_size


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


def slot_devices(spec: Spec, slot: int) -> range:
    """Device indices of a slot, contiguous."""
    width = devices_per_pod(spec)
    return range(slot * width, (slot + 1) * width)


def engine_argv(spec: Spec, role: str) -> list[ArgvItem]:
    """Command line of the engine container. Version-dependent items carry their range; the launcher decides."""
    dp = spec.data_parallel
    alone = dp.size == dp.size_local and head_ranks(spec) > 0
    argv: list[ArgvItem] = [*spec.engine.command, spec.model.name, "--port", str(spec.engine.port)]
    if dp.size > 1:
        local = dp.size_local if role == naming.WORKER else head_ranks(spec)
        argv += ["--data-parallel-size", str(dp.size), "--data-parallel-size-local", str(local)]
    if not alone:
        # The relay owns rpcPort; the engine's own ROUTER is one above it, on the head's pod IP.
        port = dp.rpc_port + 1 if role == naming.HEAD else dp.rpc_port
        argv += ["--data-parallel-address", Fill(fill="headIP"), "--data-parallel-rpc-port", str(port)]
    if role == naming.HEAD:
        argv += ["--api-server-count", str(api_server_count(spec))]
    else:
        argv += ["--headless", "--data-parallel-start-rank", Fill(fill="startRank")]
    if spec.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.pipeline_parallel_size > 1:
        argv += ["--pipeline-parallel-size", str(spec.pipeline_parallel_size)]
    if spec.enable_expert_parallel:
        argv.append("--enable-expert-parallel")
    argv.append(Versioned(items=["--shutdown-timeout", str(spec.drain.timeout_seconds)], since="0.18"))
    if spec.model.architecture == "MoE" and dp.size > 1:
        timeout = ["--cpu-distributed-timeout-seconds", str(spec.startup.timeout_seconds)]
        argv.append(Versioned(items=list(timeout), since="0.22"))
    return [*argv, *spec.engine.args]


def launch_plan(cr: DataParallelDeployment, group: int, incarnation: str, monitor_host: str) -> LaunchPlan:
    """What launchers and relay of one incarnation need to know."""
    spec = cr.spec
    base = naming.base_name(cr.metadata.name, group, incarnation)
    return LaunchPlan(
        name=cr.metadata.name,
        group=group,
        incarnation=incarnation,
        size=spec.data_parallel.size,
        size_local=spec.data_parallel.size_local,
        load_balancing=spec.data_parallel.load_balancing,
        head_placement=spec.data_parallel.head_placement,
        architecture=spec.model.architecture,
        head_pod=naming.head_name(base),
        workers=worker_sets(spec, base),
        monitor_host=monitor_host,
        rpc_port=spec.data_parallel.rpc_port,
        api_port=spec.engine.port,
        api_scheme=spec.engine.scheme,
        head_argv=engine_argv(spec, naming.HEAD),
        worker_argv=engine_argv(spec, naming.WORKER),
        visible_devices_env_name=spec.devices.visible_devices_env_name if spec.devices.assignment != "None" else "",
    )


def owner_reference(cr: DataParallelDeployment) -> dict[str, Any]:
    """Controller reference to the custom resource: garbage collection does all cleaning up."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cr.metadata.name,
        "uid": cr.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one incarnation of one group."""

    cr: DataParallelDeployment
    group: int
    id: str
    revision: str
    settings: Settings

    @property
    def base(self) -> str:
        return naming.base_name(self.cr.metadata.name, self.group, self.id)


def _meta(inc: Incarnation, name: str, role: str | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": inc.cr.metadata.namespace,
        "labels": _labels(inc, role),
        "ownerReferences": [owner_reference(inc.cr)],
        **extra,
    }


def _labels(inc: Incarnation, role: str | None) -> dict[str, str]:
    labels = {
        **naming.labels(inc.cr),
        naming.LABEL_GROUP: str(inc.group),
        naming.LABEL_INCARNATION: inc.id,
        naming.LABEL_REVISION: inc.revision,
    }
    if role:
        labels |= {naming.LABEL_ROLE: role, "app.kubernetes.io/component": role}
    return labels


def _incarnation_selector(inc: Incarnation, role: str | None = None) -> dict[str, str]:
    selected = {naming.LABEL_UID: inc.cr.metadata.uid, naming.LABEL_INCARNATION: inc.id}
    return selected | ({naming.LABEL_ROLE: role} if role else {})


def rpc_service(inc: Incarnation, *, cluster_ip: str | None = None) -> Manifest:
    """Address of the monitor, known before any pod exists. Not-ready heads are published: that is its purpose.

    cluster_ip asks for the address that the launch plan already names, when the Service has to be made again.
    """
    dp = inc.cr.spec.data_parallel
    spec: dict[str, Any] = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": _incarnation_selector(inc, naming.HEAD),
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
        "metadata": _meta(inc, naming.rpc_service_name(inc.base)),
        "spec": spec,
    }


def config_map(inc: Incarnation, monitor_host: str) -> Manifest:
    """Launcher and launch plan, immutable."""
    plan = launch_plan(inc.cr, inc.group, inc.id, monitor_host)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(inc, inc.base, annotations={naming.ANNOTATION_MONITOR_HOST: monitor_host}),
        "immutable": True,
        "data": {
            "launch.py": importlib.resources.files("dp_handshake").joinpath("launch.py").read_text("utf-8"),
            "plan.json": msgspec.json.encode(plan).decode(),
        },
    }


def disruption_budget(inc: Incarnation, *, pods: int, opened: bool = False) -> Manifest:
    """Allow no pod of a group to be evicted alone; opened lets evictions through (disruption.py says when).

    An integer, because percentages and maxUnavailable count through the custom resource's scale subresource, which
    counts groups.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(inc, inc.base),
        "spec": {
            "minAvailable": 0 if opened else pods,
            "selector": {"matchLabels": _incarnation_selector(inc)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow" if opened else "IfHealthyBudget",
        },
    }


def head_pod(inc: Incarnation) -> Manifest:
    """The head: relay as native sidecar, then the engine. A bare pod, because nobody but us may restart it."""
    spec = inc.cr.spec
    slot = 0 if spec.devices.assignment == "Slots" and head_ranks(spec) else None
    pod = _pod_spec(inc, naming.HEAD, slot)
    pod["restartPolicy"] = "Never"
    pod["initContainers"] = [_relay_container(inc)]
    pod["volumes"].append({"name": "relay-state", "emptyDir": {}})
    labels = _labels(inc, naming.HEAD) | _device_labels(spec, slot)
    meta = _meta(inc, naming.head_name(inc.base))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"labels": labels}, "spec": pod}


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
    selector = _incarnation_selector(inc, naming.WORKER) | {naming.LABEL_SET: workers.name}
    labels = _labels(inc, naming.WORKER) | _device_labels(spec, slot) | {naming.LABEL_SET: workers.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(inc, workers.name, naming.WORKER),
        "spec": {
            "replicas": workers.replicas,
            "ordinals": {"start": workers.ordinal_start},
            # Pod names in DNS are nobody's need here: ranks are reached by address. So no Service of its own.
            "serviceName": naming.rpc_service_name(inc.base),
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _pod_spec(inc: Incarnation, role: str, slot: int | None) -> dict[str, Any]:
    spec = inc.cr.spec
    ranks_here = spec.data_parallel.size_local if role == naming.WORKER else max(1, head_ranks(spec))
    pod: dict[str, Any] = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": spec.drain.endpoint_seconds + spec.drain.timeout_seconds + GRACE_MARGIN_S,
        "containers": [_engine_container(inc, role, slot)],
        "volumes": [
            {"name": "dataparallel", "configMap": {"name": inc.base}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": multiply(spec.engine.shared_memory, ranks_here)},
            },
        ],
    }
    if slot is not None:
        pod["affinity"] = {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "topologyKey": "kubernetes.io/hostname",
                        "namespaceSelector": {},
                        "labelSelector": {"matchExpressions": [{"key": key, "operator": "Exists"}]},
                    }
                    for key in _device_labels(spec, slot)
                ]
            }
        }
    return pod


def _device_labels(spec: Spec, slot: int | None) -> dict[str, str]:
    """One label per device index, so that pods of different widths and objects still exclude each other."""
    if slot is None:
        return {}
    return {f"{naming.LABEL_DEVICE}{index}": "used" for index in slot_devices(spec, slot)}


def _engine_container(inc: Incarnation, role: str, slot: int | None) -> dict[str, Any]:
    spec = inc.cr.spec
    container: dict[str, Any] = {
        "name": "engine",
        "image": spec.engine.image,
        "command": ["python3", _LAUNCH],
        "env": _environment(inc, role, slot),
        "resources": _resources(spec, role),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "dataparallel", "mountPath": MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    drain = spec.drain
    if role == naming.HEAD:
        container["ports"] = [{"name": "api", "containerPort": spec.engine.port}]
        container["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": "api", "scheme": spec.engine.scheme},
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


def _environment(inc: Incarnation, role: str, slot: int | None) -> list[dict[str, Any]]:
    spec = inc.cr.spec
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    env: list[dict[str, Any]] = [
        {"name": "DPD_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DPD_POD_IP", "valueFrom": pod_ip},
        {"name": "DPD_ROLE", "value": role},
        {"name": "DPD_NAME", "value": inc.cr.metadata.name},
        {"name": "DPD_GROUP", "value": str(inc.group)},
        {"name": "DPD_SIZE", "value": str(spec.data_parallel.size)},
        # vLLM takes its own address from here; a pod can have several.
        {"name": "VLLM_HOST_IP", "valueFrom": pod_ip},
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


def client_service(cr: DataParallelDeployment) -> Manifest:
    """What clients talk to: ready heads only. Workers have no API."""
    engine_port = cr.spec.engine.port
    ports = [
        {
            "name": port.name or ("http" if index == 0 else f"port-{port.port}"),
            "port": port.port,
            "targetPort": port.target_port or engine_port,
            "protocol": "TCP",
            **({"appProtocol": port.app_protocol} if port.app_protocol else {}),
        }
        for index, port in enumerate(cr.spec.service.ports)
    ]
    default = {"name": "http", "port": engine_port, "targetPort": engine_port, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _kept_meta(cr, annotations=dict(cr.spec.service.annotations)),
        "spec": {
            "type": cr.spec.service.type,
            "selector": {naming.LABEL_UID: cr.metadata.uid, naming.LABEL_ROLE: naming.HEAD},
            "ports": ports or [default],
        },
    }


def network_policy(cr: DataParallelDeployment, settings: Settings) -> Manifest | None:
    """Who may reach the pods: each other, API clients, and the operator at the monitor. None when switched off."""
    policy = cr.spec.network_policy
    if policy.mode == "Unmanaged":
        return None
    mine = {naming.LABEL_UID: cr.metadata.uid}
    api: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": cr.spec.engine.port}]}
    if policy.api_from is not None:
        api["from"] = policy.api_from
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "podSelector": {"matchLabels": settings.pod_labels},
    }
    ingress: list[dict[str, Any]] = [
        {"from": [{"podSelector": {"matchLabels": mine}}]},
        {"from": [operator], "ports": [{"protocol": "TCP", "port": MONITOR_PORT}]},
    ]
    # An empty list means nobody; an absent one everybody. In a rule, an empty `from` would mean everybody.
    if policy.api_from is None or policy.api_from:
        ingress.append(api)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _kept_meta(cr),
        "spec": {"podSelector": {"matchLabels": mine}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _kept_meta(cr: DataParallelDeployment, *, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "name": cr.metadata.name,
        "namespace": cr.metadata.namespace,
        "labels": naming.labels(cr),
        "ownerReferences": [owner_reference(cr)],
    }
    if annotations:
        meta["annotations"] = annotations
    return meta


def multiply(quantity: int | str, factor: int) -> str:
    """A Kubernetes quantity times an integer, same suffix: "2Gi" x 4 = "8Gi", "1.5Gi" x 3 = "4.5Gi"."""
    match = re.fullmatch(r"\+?(\d*\.?\d*)(.*)", str(quantity))
    if not match or not match.group(1):
        raise ValueError(f"{quantity!r} is not a quantity such as 2Gi")
    whole, _, fraction = match.group(1).partition(".")
    scaled = int((whole or "0") + fraction) * factor
    digits = str(scaled).rjust(len(fraction) + 1, "0")
    if fraction:
        digits = f"{digits[: -len(fraction)]}.{digits[-len(fraction) :]}".rstrip("0").rstrip(".")
    return digits + match.group(2)
