"""The ConfigMap of an incarnation: the launcher, and what launchers and relay need to know."""

from __future__ import annotations

import functools
import importlib.resources

import msgspec

from dp_handshake.messages import LaunchPlan
from dp_operator import naming, rules, versions
from dp_operator.api import DataParallelDeployment
from dp_operator.render.argv import engine_argv
from dp_operator.render.base import Incarnation, Manifest, meta
from dp_operator.render.quantity import in_bytes
from dp_operator.render.shape import devices_per_pod, head_ranks, health, supervised, worker_sets


def launch_plan(
    cr: DataParallelDeployment, group: int, incarnation: str, monitor_host: str, *, installed: str = ""
) -> LaunchPlan:
    """What launchers and relay of one incarnation need to know; installed: vLLM's version if the image was looked at."""
    spec = cr.spec
    base = naming.base_name(cr.metadata.name, group, incarnation)
    port, path = health(spec)
    assigned = spec.devices.assignment != "None"
    least = rules.least_version(spec)
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
        health_port=port if supervised(spec) else 0,
        health_path=path if supervised(spec) else "",
        head_argv=engine_argv(spec, naming.HEAD),
        worker_argv=engine_argv(spec, naming.WORKER),
        visible_devices_env_name=spec.devices.visible_devices_env_name if assigned else "",
        head_devices=devices_per_pod(spec) if assigned and head_ranks(spec) else 0,
        worker_devices=devices_per_pod(spec) if assigned else 0,
        shared_memory_bytes=in_bytes(spec.engine.shared_memory),
        assumed_version=installed or versions.known(spec) or "",
        needs_version=least[0] if least else "",
        needs_version_for=least[1] if least else "",
    )


def config_map(inc: Incarnation, monitor_host: str) -> Manifest:
    """Launcher and launch plan, immutable."""
    plan = launch_plan(inc.cr, inc.group, inc.id, monitor_host, installed=inc.installed)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta(inc, inc.base, annotations={naming.ANNOTATION_MONITOR_HOST: monitor_host}),
        "immutable": True,
        "data": {
            "launch.py": _launcher(),
            "plan.json": msgspec.json.encode(plan).decode(),
        },
    }


@functools.cache
def _launcher() -> str:
    """Source of the launcher, as it is in this operator's image."""
    return importlib.resources.files("dp_handshake").joinpath("launch.py").read_text("utf-8")
