"""`python -m dp_operator plan -f FILE`: what would be made of a DataParallelDeployment, without a cluster.

Prints the command line of every kind of pod, the devices of every rank, warnings, and all objects; or, with -o, only
the objects (yaml) or only the command lines (argv). Ends with status 1 and everything that is wrong at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from dp_operator import api, crd, naming, podtemplate, render, rules, slicing, structural, versions

INCARNATION = "xxxxx"
MONITOR_HOST = "MONITOR_IP"


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
    """Decode one object. Raises Invalid with everything that schema, rules and this version have against it."""
    metadata = raw.get("metadata") or {}
    name = str(metadata.get("name") or "")
    wrong = [] if raw.get("apiVersion") == api.API_VERSION else [f"apiVersion: write {api.API_VERSION}"]
    schema = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    wrong += structural.errors(schema, raw.get("spec", {}), "spec")
    if wrong:
        raise Invalid(wrong)
    cr = api.decode(
        {
            "metadata": {"namespace": "default", "uid": "UID", **metadata, "generation": 1},
            "spec": raw["spec"],
        }
    )
    wrong = rules.refusals(name=name, spec=cr.spec, installed=version or versions.known(cr.spec))
    if wrong:
        raise Invalid(wrong)
    return cr


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
    deepep = any("deepep" in arg for arg in spec.engine.args)
    yield (
        deepep and dp.size_local == 1 and dp.size > 1,
        "DeepEP reaches devices of its node by CUDA IPC, which does not cross pods: write one pod per node (sizeLocal)",
    )
    yield (
        any(pod.get("hostNetwork") for pod in pods),
        (
            "a NetworkPolicy does not reach pods in the node's network: vLLM's unauthenticated ports are open to whoever "
            "reaches the node"
        ),
    )
    yield (
        render.supervised(spec) and len(spec.service.ports) == 1,
        (
            "the Service has one port, which leads to the first rank of each pod: write one port per local rank, or leave "
            "service.ports out"
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


def command_lines(spec: api.Spec, *, version: str) -> str:
    """Command line of every kind of pod, one row each; START_RANK stands for the first rank of each worker."""
    rows: list[tuple[str, list[render.ArgvItem], int | None]] = [("head", render.engine_argv(spec, naming.HEAD), 0)]
    if render.worker_sets(spec, "x"):
        rows.append(("worker", render.engine_argv(spec, naming.WORKER), None))
    return "\n".join(
        f"{role:<7} {shlex.join(render.resolve(argv, version=version, start_rank=start))}" for role, argv, start in rows
    )


def rank_table(cr: api.DataParallelDeployment, *, version: str) -> str:
    """Pod, start rank and devices of every rank of group 0."""
    spec = cr.spec
    base = naming.base_name(cr.metadata.name, 0, INCARNATION)
    lines = [f"{'rank':>5}  {'pod':<40} {'API':<12} devices"]
    places = [(naming.head_name(base), 0, render.head_ranks(spec))]
    places += [(pod, first, spec.data_parallel.size_local) for pod, first in render.worker_pods(spec, base).items()]
    slots = spec.devices.per_node // render.devices_per_pod(spec) if spec.devices.assignment == "Slots" else 0
    for pod, first, ranks in places:
        role = naming.HEAD if first == 0 and pod.endswith("-head") else naming.WORKER
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
    status = 0
    try:
        text = sys.stdin.read() if options.file == "-" else _read(options.file)
        documents = load(text)
    except Invalid as invalid:
        print(*invalid.lines, sep="\n", file=sys.stderr)
        return 1
    for raw in documents:
        name = str((raw.get("metadata") or {}).get("name") or "")
        try:
            cr = check(raw, version=options.version)
        except Invalid as invalid:
            print(*(f"{name}: {line}" for line in invalid.lines), sep="\n", file=sys.stderr)
            status = 1
            continue
        version = options.version or versions.known(cr.spec) or versions.NEWEST_KNOWN
        for text in warnings(cr.spec, name=name, version=version):
            print(f"{name}: warning: {text}", file=sys.stderr)
        if options.output == "yaml":
            print(f"---\n{objects(cr)}", end="")
            continue
        print(f"# {name}: {cr.spec.replicas} x {cr.spec.data_parallel.size} ranks, vLLM {version}")
        print(command_lines(cr.spec, version=version))
        if options.output is None:
            print(f"\n{rank_table(cr, version=version)}\n\n{objects(cr)}", end="")
    return status


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise Invalid([f"{path}: {error.strerror}"]) from None
