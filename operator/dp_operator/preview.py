"""`python -m dp_operator plan -f FILE`: what would be made of a DataParallelDeployment, without a cluster.

Prints the command line of every kind of pod, the devices of every rank, warnings, and all objects; or, with -o, only
the objects (yaml) or only the command line of every pod (argv). Ends with status 1 and everything that is wrong at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from dp_operator import api, crd, naming, podtemplate, render, rules, slicing, structural, versions

INCARNATION = "xxxxx"
MONITOR_HOST = "MONITOR_IP"
# Rules count with these fields and look into the templates: where they do not fit the schema, no rule is asked.
_RULES_RELY_ON = ("dataParallel", "devices", "tensorParallelSize", "pipelineParallelSize", "template", "headTemplate")


class Invalid(Exception):  # noqa: N818 - it is the verdict on a file
    """A file that would be refused; the lines say why."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def load(text: str) -> list[dict[str, Any]]:
    """Give the DataParallelDeployments of a YAML file; other objects in it are passed over. Raises Invalid."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise Invalid([f"not YAML: {error}"]) from None
    found = [document for document in documents if isinstance(document, dict) and document.get("kind") == api.KIND]
    if not found:
        raise Invalid([f"no object of kind {api.KIND}"])
    return found


def check(raw: dict[str, Any], *, version: str | None) -> api.DataParallelDeployment:
    """Decode one object, as if it named this version. Raises Invalid with everything that schema and rules have against it."""
    wrong = [] if raw.get("apiVersion") == api.API_VERSION else [f"apiVersion: write {api.API_VERSION}"]
    if not isinstance(raw.get("metadata", {}), dict):
        wrong.append("metadata: must be an object with a name")
    misfits = list(structural.errors(_schema(), raw.get("spec", {}), "spec"))
    wrong += misfits
    metadata = {"namespace": "default", "uid": "UID", **_metadata(raw), "generation": 1}
    try:
        cr = api.decode({"metadata": metadata, "spec": raw.get("spec", {})})
    except msgspec.ValidationError as error:
        raise Invalid(wrong or [str(error)]) from None
    if version:
        cr = replace(cr, spec=replace(cr.spec, engine=replace(cr.spec.engine, version=version)))
    if not any(misfit.startswith(tuple(f"spec.{field}" for field in _RULES_RELY_ON)) for misfit in misfits):
        wrong += rules.refusals(name=cr.metadata.name, spec=cr.spec, installed=versions.known(cr.spec))
    if wrong:
        raise Invalid(wrong)
    return cr


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def _metadata(raw: dict[str, Any]) -> dict[str, Any]:
    metadata = raw.get("metadata")
    return {"name": "", **metadata} if isinstance(metadata, dict) else {"name": ""}


def warnings(spec: api.Spec, *, name: str, version: str) -> list[str]:
    """Say what is allowed and may still surprise."""
    return [text for holds, text in _warnings(spec, name=name, release=versions.order(version)) if holds]


def _warnings(spec: api.Spec, *, name: str, release: tuple[int, ...]) -> Iterator[tuple[bool, str]]:
    dp = spec.data_parallel
    pods = [podtemplate.pod_spec(template) for template in (spec.template, spec.head_template)]
    yield (
        versions.known(spec) is None,
        f"the image does not tell its vLLM version: {versions.NEWEST_KNOWN} is assumed; write engine.version",
    )
    yield (
        name == "vllm",
        (
            "a Service called vllm puts VLLM_PORT=tcp://… into every other pod of the namespace that has service links, and "
            "vLLM ends there: write another metadata.name"
        ),
    )
    yield (
        spec.model.architecture == "Dense" and dp.size > 1 and release < (0, 14),
        "below vLLM 0.14 the ranks of a Dense model step together like those of an MoE model and wait for the slowest",
    )
    yield (
        spec.drain.timeout_seconds > 0 and release < (0, 18),
        "below vLLM 0.18 the engine aborts its requests on SIGTERM: drain.timeoutSeconds has no effect",
    )
    backends = [*spec.engine.args, *_engine_env(spec, "VLLM_ALL2ALL_BACKEND")]
    yield (
        any("deepep" in word for word in backends) and dp.size_local == 1 and dp.size > 1,
        "DeepEP reaches devices of its node by CUDA IPC, which does not cross pods: write one pod per node (sizeLocal)",
    )
    slots_share_nodes = spec.devices.assignment == "Slots" and render.devices_per_pod(spec) < spec.devices.per_node
    yield (
        slots_share_nodes and dp.load_balancing == "External" and dp.size_local == 1,
        (
            "each rank sees its own devices alone, and kernels that share memory between the ranks of a node (DeepGEMM "
            "MegaMoE) need all of them visible: write one pod per node (sizeLocal) for these"
        ),
    )
    yield (
        slots_share_nodes and spec.devices.visible_devices_env_name == "ZE_AFFINITY_MASK",
        (
            "ranks on XPU reach each other only on devices that all of them see: write one pod per node, with a sizeLocal "
            "that fills devices.perNode"
        ),
    )
    yield (
        any(pod.get("hostNetwork") for pod in pods),
        (
            "a NetworkPolicy does not reach pods in the node's network: vLLM's unauthenticated ports are open to whoever "
            "reaches the node"
        ),
    )
    unreached = ", ".join(str(index) for index in render.ranks_without_port(spec))
    yield (
        bool(unreached),
        (
            f"no port of the Service leads to the local ranks {unreached} of each pod: write one port per local rank "
            "(port or targetPort engine.port, engine.port + 1 …), or leave service.ports out"
        ),
    )
    yield (
        dp.load_balancing != "Internal",
        (
            "the client Service spreads connections over pods, not load over ranks: put a gateway that knows the load "
            "before it"
        ),
    )
    yield (
        spec.scheduling.pod_group == "Coscheduling" and not any(pod.get("schedulerName") for pod in pods),
        "Coscheduling is a plugin of a scheduler of your own: write its name as template.spec.schedulerName",
    )
    queue = ((spec.template or {}).get("metadata") or {}).get("labels") or {}
    yield (
        spec.scheduling.pod_group == "Kueue" and "kueue.x-k8s.io/queue-name" not in queue,
        "Kueue passes over pods without a queue: write template.metadata.labels kueue.x-k8s.io/queue-name",
    )


def _engine_env(spec: api.Spec, name: str) -> list[str]:
    """Literal values of a variable of the engine, from its own field and from the templates."""
    found = [rules.literal(spec, name)]
    for template in (spec.template, spec.head_template):
        found += [item.get("value") for item in podtemplate.engine(template).get("env") or [] if item["name"] == name]
    return [value for value in found if value]


def command_lines(spec: api.Spec, *, version: str) -> str:
    """Command line of every kind of pod, one row each; START_RANK stands for the first rank of each worker."""
    rows: list[tuple[str, list[render.ArgvItem], int | None]] = [("head", render.engine_argv(spec, naming.HEAD), 0)]
    if render.worker_sets(spec, "x"):
        rows.append(("worker", render.engine_argv(spec, naming.WORKER), None))
    return "\n".join(
        f"{role:<7} {shlex.join(render.resolve(argv, version=version, start_rank=start))}" for role, argv, start in rows
    )


def _places(cr: api.DataParallelDeployment) -> list[tuple[str, str, int, int]]:
    """Pod, role, first rank and number of ranks of every pod of group 0."""
    base = naming.base_name(cr.metadata.name, 0, INCARNATION)
    places = [(naming.head_name(base), naming.HEAD, 0, render.head_ranks(cr.spec))]
    workers = render.worker_pods(cr.spec, base).items()
    return places + [(pod, naming.WORKER, first, cr.spec.data_parallel.size_local) for pod, first in workers]


def pod_command_lines(cr: api.DataParallelDeployment, *, version: str) -> str:
    """Command line of every pod of group 0, one row each; HEAD_IP stands for the address that the head will have."""
    return "\n".join(
        f"{pod:<40} " + shlex.join(render.resolve(render.engine_argv(cr.spec, role), version=version, start_rank=first))
        for pod, role, first, _ in _places(cr)
    )


def rank_table(cr: api.DataParallelDeployment, *, version: str) -> str:
    """Pod, start rank and devices of every rank of group 0."""
    spec = cr.spec
    lines = [f"{'rank':>5}  {'pod':<40} {'API':<12} devices"]
    slots = spec.devices.per_node // render.devices_per_pod(spec) if spec.devices.assignment == "Slots" else 0
    for pod, role, first, ranks in _places(cr):
        if not ranks:
            lines.append(f"{'-':>5}  {pod:<40} {_api(spec, role, 0):<12} none")
        for local in range(ranks):
            slot = (first // spec.data_parallel.size_local) % slots if slots else None
            lines.append(
                f"{first + local:>5}  {pod:<40} {_api(spec, role, local):<12} {_devices(spec, slot, local, version=version)}"
            )
    return "\n".join(lines)


def _api(spec: api.Spec, role: str, local_rank: int) -> str:
    if not render.serves(spec, role):
        return "-"
    ports = render.api_ports(spec)
    return f":{ports[local_rank] if len(ports) > 1 else ports[0]}"


def _devices(spec: api.Spec, slot: int | None, local_rank: int, *, version: str) -> str:
    if spec.devices.assignment == "None":
        return "none assigned"
    world = render.devices_per_rank(spec)
    visible = "" if slot is None else ",".join(str(index) for index in render.slot_devices(spec, slot))
    seen = slicing.seen_by_rank(
        visible,
        local_rank=local_rank,
        world=world,
        version=version,
        env_name=spec.devices.visible_devices_env_name,
    )
    if slot is None:
        return f"{','.join(seen)} of {render.devices_per_pod(spec)} x {spec.devices.resource_name}"
    return f"{','.join(seen)} ({spec.devices.visible_devices_env_name}={visible})"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: object) -> bool:
        return True


def objects(cr: api.DataParallelDeployment) -> str:
    """All objects of group 0 and those of the custom resource, as YAML."""
    settings = render.Settings(relay_image=os.environ.get("DP_OPERATOR_IMAGE", "DP_OPERATOR_IMAGE"))
    inc = render.Incarnation(cr=cr, group=0, id=INCARNATION, revision=naming.revision(cr.spec), settings=settings)
    found = [*render.group_objects(inc, MONITOR_HOST), *render.kept_objects(cr, settings)]
    for manifest in found:
        if manifest["kind"] == "ConfigMap":
            manifest["data"]["launch.py"] = "# the launcher, dp_handshake/launch.py\n"
    return str(yaml.dump_all(found, Dumper=_Dumper, sort_keys=False, width=120))


def main(argv: list[str]) -> int:
    """Run the command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dp_operator plan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-f", "--file", required=True, help="YAML file with DataParallelDeployments; - is stdin")
    parser.add_argument("--version", help="vLLM version to render for, instead of what the object says")
    parser.add_argument("-o", "--output", choices=["yaml", "argv"], help="only the objects, or only the command lines")
    options = parser.parse_args(argv)
    unreadable = list(
        structural.errors(_schema()["properties"]["engine"]["properties"]["version"], options.version, "it")
    )
    if options.version is not None and unreadable:
        parser.error(f"argument --version: {options.version!r} is no vLLM version such as 0.32 or 0.32.1")
    status = 0
    try:
        text = sys.stdin.read() if options.file == "-" else _read(options.file)
        documents = load(text)
    except Invalid as invalid:
        print(*invalid.lines, sep="\n", file=sys.stderr)
        return 1
    for raw in documents:
        name = str(_metadata(raw)["name"])
        try:
            cr = check(raw, version=options.version)
        except Invalid as invalid:
            print(*(f"{name or '(no name)'}: {line}" for line in invalid.lines), sep="\n", file=sys.stderr)
            status = 1
            continue
        version = versions.known(cr.spec) or versions.NEWEST_KNOWN
        for text in warnings(cr.spec, name=name, version=version):
            print(f"{name}: warning: {text}", file=sys.stderr)
        if options.output == "yaml":
            print(f"---\n{objects(cr)}", end="")
            continue
        print(f"# {name}: {cr.spec.replicas} x {cr.spec.data_parallel.size} ranks, vLLM {version}")
        if options.output == "argv":
            print(pod_command_lines(cr, version=version))
            continue
        print(command_lines(cr.spec, version=version))
        print(f"\n{rank_table(cr, version=version)}\n\n{objects(cr)}", end="")
    return status


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise Invalid([f"{path}: {error.strerror}"]) from None
