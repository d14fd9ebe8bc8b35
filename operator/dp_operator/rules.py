"""What a DataParallelDeployment must meet beyond its schema: every rule once, as CEL and as Python.

The CEL goes into the CRD, so that the API server refuses an object with the message below. The Python side is for
objects that an older CRD let in: the operator checks them again and says the same words in `Accepted=False`.

A message says what to write instead. A rule that doubts lets the object through: vLLM itself still refuses nonsense,
and a false refusal leaves no way around it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dp_handshake.messages import MONITOR_PORT
from dp_operator import podtemplate, versions
from dp_operator.api import Spec
from dp_operator.naming import NAME_MAX
from dp_operator.slicing import seen_by_rank

# Ports from here on may be taken by outgoing connections (the first of Linux' ephemeral range).
EPHEMERAL_PORTS_START = 32768


class Owned(Struct, frozen=True, kw_only=True):
    """Flags of vLLM that one field of the spec, or the operator by itself, decides.

    A pattern stands for every form in which vLLM's argument parser takes the flag: `--hea[dless]` is `--hea`,
    `--head` … `--headless` (an abbreviation counts as long as one release resolves it), `--data-parallel*` is anything
    that begins so, `-n#` is `-n` with digits attached.
    """

    patterns: tuple[str, ...]
    instead: str


# vLLM's parser turns underscores in `--` flags into dashes, takes a value behind `=`, and takes unambiguous prefixes
# of long flags and of its many-letter short flags. No flag of vLLM that we leave to the user is itself such a prefix.
OWNED_FLAGS = (
    Owned(
        patterns=("--data-parallel*", "--no-data-parallel*", "-dp*"),
        instead="the operator places the ranks: write spec.dataParallel (size, sizeLocal, loadBalancing, rpcPort)",
    ),
    Owned(patterns=("--te[nsor-parallel-size]", "-t[p]"), instead="write spec.tensorParallelSize"),
    Owned(patterns=("--pi[peline-parallel-size]", "-p[p]"), instead="write spec.pipelineParallelSize"),
    # It would multiply the devices of a rank, which limits and slots do not know.
    Owned(
        patterns=("--prefil[l-context-parallel-size]", "-pc[p]"),
        instead="devices are counted without prefill context parallelism, which is not supported: leave it out",
    ),
    Owned(
        patterns=("--enable-e[xpert-parallel]", "--no-enable-e[xpert-parallel]", "-e[p]"),
        instead="write spec.enableExpertParallel",
    ),
    Owned(patterns=("--api-s[erver-count]", "-a[sc]"), instead="write spec.dataParallel.apiServerCount"),
    Owned(patterns=("--por[t]",), instead="write spec.engine.port"),
    Owned(patterns=("--shu[tdown-timeout]",), instead="write spec.drain.timeoutSeconds"),
    # `--conf` and `--confi` are ambiguous (`--config-format`), and vLLM reads the file for the whole word only.
    Owned(
        patterns=("--config",), instead="a file could set flags the operator owns: write its flags as spec.engine.args"
    ),
    Owned(
        patterns=("--hea[dless]", "--ho[st]", "--ud[s]"),
        instead="the operator decides which pod serves the API and where it listens: leave it out",
    ),
    Owned(
        patterns=("--nn[odes]", "--nod[e-rank]", "--master-a[ddr]", "--master-p[ort]", "-n", "-n#", "-r", "-r#"),
        instead="one rank lives in one pod, with its tensor and pipeline parallel workers: leave it out",
    ),
)

OWNED_ENV_NAMES = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_ENGINE_READY_TIMEOUT_S")
OWNED_ENV_PREFIXES = ("VLLM_DP_", "DPD_")

# Variables by which a runtime hides devices. With a device plugin they come from the plugin.
VISIBLE_DEVICES_ENV_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
)
TWINS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NO_EPLB = ("TPU_VISIBLE_CHIPS", "CPU_VISIBLE_MEMORY_NODES")  # XPU has it in newer releases
_CPU_THREADS_ENV_NAME = "VLLM_CPU_OMP_THREADS_BIND"


class Rule(Struct, frozen=True, kw_only=True):
    """One rule.

    `cel` is true for a spec (`self`) that keeps the rule, `broken` is true for one that does not. `field` is the field
    to blame, below spec and with a leading dot. Where an older vLLM than 0.`since` breaks it, `what` is what it lacks.
    """

    field: str
    cel: str
    broken: Callable[[Spec], bool]
    message: str
    since: int = 0
    what: str = ""


def _written(pattern: str) -> tuple[set[str], set[str], set[str]]:
    """Exact forms, prefixes, and forms that digits may follow, of one pattern of `Owned`."""
    if pattern.endswith("*"):
        return set(), {pattern[:-1]}, set()
    if pattern.endswith("#"):
        return set(), set(), {pattern[:-1]}
    start, _, rest = pattern.partition("[")
    rest = rest.removesuffix("]")
    return {start + rest[:n] for n in range(len(rest) + 1)}, set(), set()


def _forms(owned: Owned) -> tuple[list[str], list[str], list[str]]:
    forms = [_written(pattern) for pattern in owned.patterns]
    exact, prefixes, digits = (sorted(set().union(*kind)) for kind in zip(*forms, strict=True))
    return exact, prefixes, digits


@functools.cache
def _spelt(owned: Owned) -> re.Pattern[str]:
    exact, prefixes, digits = ([re.escape(form) for form in kind] for kind in _forms(owned))
    kinds = [*exact, *(f"{flag}.*" for flag in prefixes), *(f"{flag}[0-9]+" for flag in digits)]
    return re.compile("|".join(kinds), re.DOTALL)


def owns(owned: Owned, arg: str) -> bool:
    """Whether vLLM's parser would take one argument for one of these flags."""
    return _spelt(owned).fullmatch(arg.split("=", 1)[0].replace("_", "-")) is not None


def _strings(values: tuple[str, ...] | list[str]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _flag_rule(owned: Owned) -> Rule:
    exact, prefixes, digits = _forms(owned)
    hits = [f"k in {_strings(exact)}"] if exact else []
    hits += [f"k.startsWith('{prefix}')" for prefix in prefixes]
    hits += [f"k.matches('^{flag}[0-9]+$')" for flag in digits]
    names = [re.sub(r"[\[\]]", "", pattern) for pattern in owned.patterns if not pattern.endswith("#")]
    return Rule(
        field=".engine.args",
        cel=f"self.engine.args.map(a, a.split('=', 2)[0].replace('_', '-')).all(k, !({' || '.join(hits)}))",
        broken=lambda spec: any(owns(owned, arg) for arg in spec.engine.args),
        message=f"a flag the operator owns ({', '.join(names)}, or a short form of it): {owned.instead}",
    )


# What no wrapper of vLLM has a flag of its own for; abbreviations and the rest are looked at behind `serve` only.
_OF_VLLM_ALONE = (
    *("--headless", "--tensor-parallel-size", "--pipeline-parallel-size", "--prefill-context-parallel-size"),
    *("--enable-expert-parallel", "--api-server-count"),
)


def _in_command(spec: Spec) -> list[str]:
    """Words of the command that vLLM reads as its own."""
    words = spec.engine.command
    return words[words.index("serve") + 1 :] if "serve" in words else []


def _of_vllm_alone(word: str) -> bool:
    flag = word.split("=", 1)[0].replace("_", "-")
    return flag in _OF_VLLM_ALONE or flag.startswith("--data-parallel-")


def _command_rule() -> Rule:
    return Rule(
        field=".engine.command",
        cel=(
            "self.engine.command.map(a, a.split('=', 2)[0].replace('_', '-')).all(k, "
            f"!(k.startsWith('--data-parallel-') || k in {_strings(_OF_VLLM_ALONE)}))"
        ),
        broken=lambda spec: any(_of_vllm_alone(word) for word in spec.engine.command),
        message=(
            "a flag the operator owns: a command has wrappers and the program, such as [numactl, --localalloc, vllm, "
            "serve]; write the field of the spec that decides it (docs/api.md), and other flags as spec.engine.args"
        ),
    )


def _older_than(version: str | None, minor: int) -> bool:
    """Whether a version given as 0.x is below 0.`minor`; an absent or unreadable version is not."""
    match = re.match(r"0\.([0-9]+)", version or "")
    return match is not None and int(match[1]) < minor


def _not_older_than(minor: int) -> str:
    """CEL for a version that is absent or at least 0.`minor`, `minor` between 10 and 99."""
    tens, units = divmod(minor, 10)
    older = [r"[0-9]", f"[1-{tens - 1}][0-9]" if tens > 1 else "", f"{tens}[0-{units - 1}]" if units else ""]
    pattern = "|".join(part for part in older if part)
    return f"!has(self.engine.version) || !self.engine.version.matches('^0[.]({pattern})([^0-9].*)?$')"


def _devices_per_pod(spec: Spec) -> int:
    return spec.data_parallel.size_local * spec.tensor_parallel_size * spec.pipeline_parallel_size


def _taken_ports(spec: Spec) -> tuple[int, int, int]:
    return spec.data_parallel.rpc_port, spec.data_parallel.rpc_port + 1, MONITOR_PORT


def _api_ports(spec: Spec) -> range:
    return range(spec.engine.port, spec.engine.port + (spec.data_parallel.size_local if _supervised(spec) else 1))


def _supervised(spec: Spec) -> bool:
    return spec.data_parallel.load_balancing == "External" and spec.data_parallel.size_local >= 2


_DEDICATED = "self.dataParallel.headPlacement != 'Dedicated' || "
_EXTERNAL = "self.dataParallel.loadBalancing != 'External' || "
_IS_SUPERVISED = "self.dataParallel.loadBalancing == 'External' && self.dataParallel.sizeLocal >= 2"
_SUPERVISED = f"{_EXTERNAL}self.dataParallel.sizeLocal < 2 || "


def _spellings(flag: str) -> list[str]:
    return [flag, "--" + flag[2:].replace("-", "_")]


def switch(spec: Spec, flag: str) -> bool:
    """Whether args have a switch of vLLM, in one of its two spellings."""
    return any(arg in _spellings(flag) for arg in spec.engine.args)


def _has_switch(flag: str) -> str:
    return f"self.engine.args.exists(a, a in {_strings(_spellings(flag))})"


# Flags of data parallelism that came later, by the 0.x that has them first. An older parser ends at them.
_NEWER_FLAGS = {
    17: ("--enable-elastic-ep",),
    24: ("--device-ids",),
    27: ("--enable-fault-tolerance", "--fault-tolerance-config"),
    30: ("--elastic-ep-max-dp-size", "--dp-sync-interval"),
}


def _switch_rules() -> list[Rule]:
    """Switches in args that vLLM takes only together with certain fields of ours (protocol notes §1.4).

    Whole words only: what an abbreviation means is vLLM's to say.
    """
    rows: list[tuple[str, str, Callable[[Spec], bool], str]] = [
        (
            "--enable-eplb",
            "self.enableExpertParallel",
            lambda spec: not spec.enable_expert_parallel,
            (
                "expert load balancing moves experts between ranks, which own whole experts only with expert "
                "parallelism: write enableExpertParallel: true"
            ),
        ),
        (
            "--enable-eplb",
            f"self.devices.assignment == 'None' || !(self.devices.visibleDevicesEnvName in {_strings(_NO_EPLB)})",
            lambda spec: spec.devices.assignment != "None" and spec.devices.visible_devices_env_name in _NO_EPLB,
            "vLLM has no expert load balancing on this platform: leave the flag out",
        ),
        (
            "--enable-elastic-ep",
            _has_switch("--enable-eplb"),
            lambda spec: not switch(spec, "--enable-eplb"),
            "elastic expert parallelism is done by expert load balancing: write --enable-eplb too",
        ),
        (
            "--enable-elastic-ep",
            "self.dataParallel.loadBalancing != 'Hybrid' && self.pipelineParallelSize == 1",
            lambda spec: spec.data_parallel.load_balancing == "Hybrid" or spec.pipeline_parallel_size > 1,
            (
                "vLLM has no elastic expert parallelism with Hybrid load balancing or pipeline parallelism: "
                "leave the flag out, or write loadBalancing: External and pipelineParallelSize: 1"
            ),
        ),
        (
            "--enable-fault-tolerance",
            (
                "self.dataParallel.loadBalancing == 'External' && "
                "(!has(self.dataParallel.apiServerCount) || self.dataParallel.apiServerCount == 1)"
            ),
            lambda spec: (
                spec.data_parallel.load_balancing != "External" or spec.data_parallel.api_server_count not in {None, 1}
            ),
            (
                "vLLM tolerates faults only with External load balancing and one API server: leave the flag out, or write "
                "loadBalancing: External"
            ),
        ),
        (
            "--grpc",
            f"!({_IS_SUPERVISED})",
            _supervised,
            "External with several ranks per pod serves HTTP only: leave the flag out, or write sizeLocal: 1",
        ),
    ]
    return [
        Rule(
            field=".engine.args",
            cel=f"!{_has_switch(flag)} || ({cel})",
            broken=lambda spec, flag=flag, broken=broken: switch(spec, flag) and broken(spec),  # type: ignore[misc]
            message=f"{flag}: {message}",
        )
        for flag, cel, broken, message in rows
    ] + [
        Rule(
            field=".engine.args",
            cel=f"!{_has_switch('--enable-elastic-ep')} || {_EXTERNAL}{_not_older_than(33)}",
            broken=lambda spec: (
                switch(spec, "--enable-elastic-ep")
                and spec.data_parallel.load_balancing == "External"
                and _older_than(spec.engine.version, 33)
            ),
            message=(
                "--enable-elastic-ep: elastic expert parallelism with External load balancing needs vLLM 0.33 or newer: "
                "leave the flag out, or write a newer engine.image and engine.version"
            ),
            since=33,
            what="elastic expert parallelism with External load balancing",
        ),
        *(_newer_flag_rule(minor, flags) for minor, flags in _NEWER_FLAGS.items()),
    ]


def _newer_flag_rule(minor: int, flags: tuple[str, ...]) -> Rule:
    spellings = tuple(spelling for flag in flags for spelling in _spellings(flag))
    exists = " || ".join(f"a.startsWith('{spelling}')" for spelling in spellings)
    return Rule(
        field=".engine.args",
        cel=f"{_not_older_than(minor)} || !self.engine.args.exists(a, {exists})",
        broken=lambda spec: (
            _older_than(spec.engine.version, minor) and any(arg.startswith(spellings) for arg in spec.engine.args)
        ),
        message=(
            f"only vLLM 0.{minor} and newer know {' and '.join(flags)}: leave it out, or write a newer engine.image and "
            "engine.version"
        ),
        since=minor,
        what=" or ".join(flags),
    )


def literal(spec: Spec, name: str) -> str | None:
    """Value of a variable of the engine's that the spec gives literally."""
    return next((entry.value for entry in spec.engine.env if entry.name == name), None)


def _too_short(value: str | None, separator: str, spec: Spec) -> bool:
    """Whether a list that vLLM slices by local rank has too few items; words such as `all` are no lists."""
    if not value or value[0] not in "0123456789":
        return False
    return value.count(separator) + 1 < _devices_per_pod(spec)


def _sliced_list_rules() -> list[Rule]:
    """Lists in env that vLLM slices by local rank (protocol notes §6), where nobody but the user decides about them."""
    width = "self.dataParallel.sizeLocal * self.tensorParallelSize * self.pipelineParallelSize"

    def long_enough(name: str, separator: str) -> str:
        return (
            f"self.engine.env.all(e, e.name != {name} || !has(e.value) || !e.value.matches('^[0-9]') || "
            f"size(e.value.split('{separator}')) >= {width})"
        )

    return [
        Rule(
            field=".engine.env",
            cel=f"self.devices.assignment != 'None' || {long_enough('self.devices.visibleDevicesEnvName', ',')}",
            broken=lambda spec: (
                spec.devices.assignment == "None"
                and _too_short(literal(spec, spec.devices.visible_devices_env_name), ",", spec)
            ),
            message=(
                "every local rank takes tensorParallelSize x pipelineParallelSize devices of the visible-devices variable, "
                "and there are too few for sizeLocal ranks: write more, or devices.assignment: Slots"
            ),
        ),
        Rule(
            field=".engine.env",
            cel=long_enough(f"'{_CPU_THREADS_ENV_NAME}'", "|"),
            broken=lambda spec: _too_short(literal(spec, _CPU_THREADS_ENV_NAME), "|", spec),
            message=(
                f"every worker of a pod takes one list of cores of {_CPU_THREADS_ENV_NAME}, and there are too few: write "
                "sizeLocal x tensorParallelSize x pipelineParallelSize lists, with a bar between them"
            ),
        ),
        Rule(
            field=".engine.env",
            cel=(
                f"({_not_older_than(12)}) || "
                f"self.engine.env.all(e, e.name != '{_CPU_THREADS_ENV_NAME}' || !has(e.value) || e.value != 'nobind')"
            ),
            broken=lambda spec: (
                _older_than(spec.engine.version, 12) and literal(spec, _CPU_THREADS_ENV_NAME) == "nobind"
            ),
            message=f"vLLM 0.11 has no {_CPU_THREADS_ENV_NAME}=nobind and ends: write all",
            since=12,
            what=f"{_CPU_THREADS_ENV_NAME}=nobind",
        ),
        Rule(
            field=".engine.args",
            cel=(
                "self.devices.assignment == 'None' || "
                "self.engine.args.all(a, !a.startsWith('--device-i') && !a.startsWith('--device_i'))"
            ),
            broken=lambda spec: (
                spec.devices.assignment != "None"
                and any(arg.startswith(("--device-i", "--device_i")) for arg in spec.engine.args)
            ),
            message=(
                "--device-ids: devices.assignment decides which devices the ranks of a pod use: leave the flag out, or "
                "write assignment: None to choose devices yourself"
            ),
        ),
    ]


_TEMPLATES: tuple[tuple[str, Callable[[Spec], dict[str, Any] | None]], ...] = (
    ("template", lambda spec: spec.template),
    ("headTemplate", lambda spec: spec.head_template),
)
_OWNED_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "app.kubernetes.io/component")
_OWNED_POD_FIELDS = ("restartPolicy", "enableServiceLinks", "terminationGracePeriodSeconds", "hostname", "subdomain")
_IN_SPEC = ("image", "command", "args", "resources")
_WATCHED = (
    *("readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "restartPolicy"),
    *("terminationMessagePath", "terminationMessagePolicy"),
)
_OWNED_MOUNTS = ("/dev/shm", "/dataparallel", "/run/dpd")  # noqa: S108 - paths in a container
_OWNED_VOLUMES = ("dataparallel", "shm", "relay-state", "dpd-group")


def _hiding(spec: Spec) -> set[str]:
    """Variables that decide which devices a container sees, where the operator or a plugin assigns them."""
    own = {spec.devices.visible_devices_env_name}
    if spec.devices.assignment == "DevicePlugin":
        return own | {*VISIBLE_DEVICES_ENV_NAMES}
    return own | {*TWINS} if own & {*TWINS} else own


def _owned_env(name: str) -> bool:
    return name in OWNED_ENV_NAMES or name.startswith(OWNED_ENV_PREFIXES)


def _template_rules(path: str, get: Callable[[Spec], dict[str, Any] | None]) -> list[Rule]:
    """What a template may not touch, by name, with the field to write instead."""
    pod = f"self.{path}.spec"

    def absent_or(where: str, cel: str) -> str:
        """CEL for an optional field below template: it is absent, or the rest holds.

        Not by CEL's optional values: the API server's estimate of costs forgets the bounds of lists behind them.
        """
        parts = where.split(".")
        chain = [".".join(parts[: n + 1]) for n in range(1, len(parts))]
        return " || ".join([*(f"!has({step})" for step in chain), f"({cel})"])

    def engine_keeps(cel: str) -> str:
        return absent_or(f"{pod}.containers", f"{pod}.containers.all(c, c.name != 'engine' || ({cel}))")

    owned_name = f"e.name in {_strings(OWNED_ENV_NAMES)}" + "".join(
        f" || e.name.startsWith('{prefix}')" for prefix in OWNED_ENV_PREFIXES
    )

    def engine(spec: Spec) -> dict[str, Any]:
        return podtemplate.engine(get(spec))

    def env_names(spec: Spec) -> list[str]:
        return [item["name"] for item in engine(spec).get("env") or []]

    def keys(spec: Spec) -> list[str]:
        metadata = (get(spec) or {}).get("metadata") or {}
        return [*(metadata.get("labels") or {}), *(metadata.get("annotations") or {})]

    def any_of(fields: tuple[str, ...]) -> str:
        return " || ".join(f"has(c.{field})" for field in fields)

    return [
        Rule(
            field=f".{path}.metadata",
            cel=" && ".join(
                "("
                + absent_or(
                    f"self.{path}.metadata.{part}",
                    f"self.{path}.metadata.{part}.all(k, "
                    f"!(k.startsWith('dataparallel.io/') || k in {_strings(_OWNED_LABELS)}))",
                )
                + ")"
                for part in ("labels", "annotations")
            ),
            broken=lambda spec: any(key.startswith("dataparallel.io/") or key in _OWNED_LABELS for key in keys(spec)),
            message=(
                "the operator finds its pods by labels of dataparallel.io and by "
                f"{', '.join(_OWNED_LABELS)}: leave them out"
            ),
        ),
        Rule(
            field=f".{path}.spec",
            cel=absent_or(pod, "!(" + " || ".join(f"has({pod}.{field})" for field in _OWNED_POD_FIELDS) + ")"),
            broken=lambda spec: not podtemplate.pod_spec(get(spec)).keys().isdisjoint(_OWNED_POD_FIELDS),
            message=(
                f"the operator decides {', '.join(_OWNED_POD_FIELDS)}: leave them out, and write spec.drain for the time "
                "that a pod has to end"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel=engine_keeps(f"!({any_of(_IN_SPEC)})"),
            broken=lambda spec: not engine(spec).keys().isdisjoint(_IN_SPEC),
            message=(
                "image, command, args and resources of container engine have fields of their own: write spec.engine.image, "
                "spec.engine.command, spec.engine.args, spec.engine.resources or spec.headResources"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel=engine_keeps(f"!({any_of(_WATCHED)})"),
            broken=lambda spec: not engine(spec).keys().isdisjoint(_WATCHED),
            message=(
                "the operator decides when container engine is ready, has failed and has to end: leave its probes, "
                "lifecycle, restartPolicy and termination message out, and write startup.timeoutSeconds, "
                "failurePolicy.unhealthySeconds or spec.drain"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel=engine_keeps(f"!has(c.env) || c.env.all(e, !({owned_name}))"),
            broken=lambda spec: any(_owned_env(name) for name in env_names(spec)),
            message=(
                f"in container engine the operator sets {', '.join(OWNED_ENV_NAMES)} and everything that begins with "
                f"{' or '.join(OWNED_ENV_PREFIXES)}: leave it out"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel=engine_keeps(f"!has(c.env) || c.env.all(e, e.name != '{_CPU_THREADS_ENV_NAME}')"),
            broken=lambda spec: _CPU_THREADS_ENV_NAME in env_names(spec),
            message=(
                f"{_CPU_THREADS_ENV_NAME} has a list of cores for every worker of a pod, which is checked in one place: "
                "write spec.engine.env"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel="self.devices.assignment == 'None' || "
            + engine_keeps(
                "!has(c.env) || c.env.all(e, "
                "e.name != self.devices.visibleDevicesEnvName && !(self.devices.assignment == 'DevicePlugin' && "
                f"e.name in {_strings(VISIBLE_DEVICES_ENV_NAMES)}) && !(self.devices.assignment == 'Slots' && "
                f"self.devices.visibleDevicesEnvName in {_strings(TWINS)} && e.name in {_strings(TWINS)}))"
            ),
            broken=lambda spec: spec.devices.assignment != "None" and bool(_hiding(spec) & set(env_names(spec))),
            message=(
                "devices.assignment decides which devices container engine sees: leave the visible-devices variable out, "
                "or write assignment: None to choose devices yourself"
            ),
        ),
        Rule(
            field=f".{path}.spec.containers",
            cel=engine_keeps(
                f"!has(c.volumeMounts) || c.volumeMounts.all(m, !(m.mountPath in {_strings(_OWNED_MOUNTS)}))"
            ),
            broken=lambda spec: any(
                mount["mountPath"] in _OWNED_MOUNTS for mount in engine(spec).get("volumeMounts") or []
            ),
            message=(
                f"the operator mounts {', '.join(_OWNED_MOUNTS)} in container engine: write another mountPath, or "
                "spec.engine.sharedMemory for the size of /dev/shm"
            ),
        ),
        Rule(
            field=f".{path}.spec",
            cel=" && ".join(
                f"({absent_or(where, f'{where}.all(c, {cel})')})"
                for where, cel in (
                    (f"{pod}.containers", "c.name != 'relay'"),
                    (f"{pod}.initContainers", "!(c.name in ['relay', 'engine'])"),
                )
            ),
            broken=lambda spec: (
                any(c["name"] == "relay" for c in podtemplate.containers(get(spec)))
                or any(
                    c["name"] in {"relay", "engine"} for c in podtemplate.containers(get(spec), field="initContainers")
                )
            ),
            message="relay and engine are the operator's containers: write another name for your own",
        ),
        Rule(
            field=f".{path}.spec.volumes",
            cel=absent_or(f"{pod}.volumes", f"{pod}.volumes.all(v, !(v.name in {_strings(_OWNED_VOLUMES)}))"),
            broken=lambda spec: any(
                volume["name"] in _OWNED_VOLUMES for volume in podtemplate.containers(get(spec), field="volumes")
            ),
            message=(
                f"the volumes {', '.join(_OWNED_VOLUMES)} are the operator's: write another name, or "
                "spec.engine.sharedMemory for the size of shm"
            ),
        ),
        Rule(
            field=f".{path}.spec.hostNetwork",
            cel=absent_or(
                f"{pod}.hostNetwork",
                f"!{pod}.hostNetwork || self.devices.assignment != 'Slots' || "
                "self.dataParallel.loadBalancing == 'Internal' || self.devices.perNode == "
                "self.dataParallel.sizeLocal * self.tensorParallelSize * self.pipelineParallelSize",
            ),
            broken=lambda spec: (
                bool(podtemplate.pod_spec(get(spec)).get("hostNetwork"))
                and spec.devices.assignment == "Slots"
                and spec.data_parallel.load_balancing != "Internal"
                and spec.devices.per_node != _devices_per_pod(spec)
            ),
            message=(
                "in the node's network every pod that serves needs engine.port for itself, and Slots puts several pods on "
                "a node: leave hostNetwork out, or write a sizeLocal that fills the node"
            ),
        ),
    ]


RULES = (
    Rule(
        field=".dataParallel.sizeLocal",
        cel="self.dataParallel.size % self.dataParallel.sizeLocal == 0",
        broken=lambda spec: spec.data_parallel.size % spec.data_parallel.size_local != 0,
        message="every pod runs the same number of ranks: write a sizeLocal that divides size",
    ),
    Rule(
        field=".enableExpertParallel",
        cel="!self.enableExpertParallel || self.model.architecture == 'MoE'",
        broken=lambda spec: spec.enable_expert_parallel and spec.model.architecture != "MoE",
        message=(
            "vLLM refuses expert parallelism for a model without experts: write model.architecture: MoE, or leave it out"
        ),
    ),
    Rule(
        field=".dataParallel.headPlacement",
        cel=f"{_DEDICATED}self.model.architecture == 'Dense'",
        broken=lambda spec: spec.data_parallel.head_placement == "Dedicated" and spec.model.architecture != "Dense",
        message=(
            "Dedicated is for Dense models: rank 0 of an MoE group binds the group's store on the head's IP, so it must "
            "run in the head pod; write headPlacement: Colocated"
        ),
    ),
    Rule(
        field=".dataParallel.headPlacement",
        cel=f"{_DEDICATED}self.dataParallel.size >= 2",
        broken=lambda spec: spec.data_parallel.head_placement == "Dedicated" and spec.data_parallel.size < 2,
        message="Dedicated needs at least two ranks to balance over: write size: 2 or more, or headPlacement: Colocated",
    ),
    Rule(
        field=".dataParallel.headPlacement",
        cel=f"{_DEDICATED}self.dataParallel.loadBalancing == 'Internal'",
        broken=lambda spec: (
            spec.data_parallel.head_placement == "Dedicated" and spec.data_parallel.load_balancing != "Internal"
        ),
        message=(
            "Dedicated is the head of Internal load balancing; with Hybrid and External every pod serves the API: "
            "write loadBalancing: Internal, or headPlacement: Colocated"
        ),
    ),
    Rule(
        field=".dataParallel.headPlacement",
        cel=f"{_DEDICATED}{_not_older_than(14)}",
        broken=lambda spec: spec.data_parallel.head_placement == "Dedicated" and _older_than(spec.engine.version, 14),
        since=14,
        what="headPlacement Dedicated",
        message=(
            "Dedicated needs vLLM 0.14 or newer, where Dense ranks are independent engines: "
            "write headPlacement: Colocated, or a newer engine.image and engine.version"
        ),
    ),
    Rule(
        field=".dataParallel.loadBalancing",
        cel=f"{_EXTERNAL}self.model.architecture == 'MoE'",
        broken=lambda spec: spec.data_parallel.load_balancing == "External" and spec.model.architecture != "MoE",
        message=(
            "vLLM refuses External for Dense models, whose ranks share nothing: "
            "write loadBalancing: Internal, or size: 1 and as many replicas"
        ),
    ),
    Rule(
        field=".dataParallel.loadBalancing",
        cel=f"{_EXTERNAL}self.dataParallel.size >= 2",
        broken=lambda spec: spec.data_parallel.load_balancing == "External" and spec.data_parallel.size < 2,
        message="External needs at least two ranks: write size: 2 or more, or loadBalancing: Internal",
    ),
    Rule(
        field=".dataParallel.loadBalancing",
        cel=f"{_SUPERVISED}{_not_older_than(22)}",
        broken=lambda spec: _supervised(spec) and _older_than(spec.engine.version, 22),
        since=22,
        what="External load balancing with several ranks per pod",
        message=(
            "External with several ranks per pod needs vLLM 0.22 or newer: "
            "write sizeLocal: 1, or a newer engine.image and engine.version"
        ),
    ),
    Rule(
        field=".dataParallel.apiServerCount",
        cel=f"{_SUPERVISED}!has(self.dataParallel.apiServerCount) || self.dataParallel.apiServerCount == 1",
        broken=lambda spec: _supervised(spec) and spec.data_parallel.api_server_count not in {None, 1},
        message="External with several ranks per pod has one API server per rank: leave apiServerCount out",
    ),
    Rule(
        field=".dataParallel.supervisorPort",
        cel=(
            f"{_SUPERVISED}self.dataParallel.supervisorPort < self.engine.port || "
            "self.dataParallel.supervisorPort >= self.engine.port + self.dataParallel.sizeLocal"
        ),
        broken=lambda spec: (
            _supervised(spec)
            and 0 <= spec.data_parallel.supervisor_port - spec.engine.port < spec.data_parallel.size_local
        ),
        message="the ranks of a pod listen on engine.port up to engine.port + sizeLocal - 1: write a port outside of it",
    ),
    Rule(
        field=".dataParallel.loadBalancing",
        cel=(
            "self.dataParallel.loadBalancing != 'Hybrid' || "
            "(self.dataParallel.sizeLocal >= 2 && self.dataParallel.sizeLocal < self.dataParallel.size)"
        ),
        broken=lambda spec: (
            spec.data_parallel.load_balancing == "Hybrid"
            and not 2 <= spec.data_parallel.size_local < spec.data_parallel.size
        ),
        message=(
            "Hybrid balances over the ranks of one pod, and vLLM drops it for one rank or for all of them: "
            "write a sizeLocal of at least 2 and below size, or loadBalancing: Internal"
        ),
    ),
    Rule(
        field=".devices.perNode",
        cel=(
            "self.devices.assignment != 'Slots' || self.devices.perNode % "
            "(self.dataParallel.sizeLocal * self.tensorParallelSize * self.pipelineParallelSize) == 0"
        ),
        broken=lambda spec: spec.devices.assignment == "Slots" and spec.devices.per_node % _devices_per_pod(spec) != 0,
        message=(
            "a node must hold a whole number of pods: write a perNode that is a multiple of "
            "sizeLocal x tensorParallelSize x pipelineParallelSize"
        ),
    ),
    Rule(
        field=".engine.port",
        cel=(
            f"[self.dataParallel.rpcPort, self.dataParallel.rpcPort + 1, {MONITOR_PORT}].all(p, "
            f"p < self.engine.port || p > self.engine.port + ({_IS_SUPERVISED} ? self.dataParallel.sizeLocal - 1 : 0))"
        ),
        broken=lambda spec: any(port in _api_ports(spec) for port in _taken_ports(spec)),
        message=(
            f"the head also listens on dataParallel.rpcPort, rpcPort + 1 and {MONITOR_PORT} (monitor), and under a "
            "supervisor every rank of a pod takes one port from engine.port on: write another engine.port"
        ),
    ),
    Rule(
        field=".engine.port",
        cel=f"{_SUPERVISED}self.engine.port + self.dataParallel.sizeLocal <= 65536",
        broken=lambda spec: _api_ports(spec).stop > 65536,
        message="the ranks of a pod listen on engine.port up to engine.port + sizeLocal - 1: write a lower engine.port",
    ),
    Rule(
        field=".dataParallel.supervisorPort",
        cel=(
            f"{_SUPERVISED}!(self.dataParallel.supervisorPort in "
            f"[self.dataParallel.rpcPort, self.dataParallel.rpcPort + 1, {MONITOR_PORT}])"
        ),
        broken=lambda spec: _supervised(spec) and spec.data_parallel.supervisor_port in _taken_ports(spec),
        message=(
            f"the head also listens on dataParallel.rpcPort, rpcPort + 1 and {MONITOR_PORT} (monitor): "
            "write another supervisorPort"
        ),
    ),
    Rule(
        field=".dataParallel.rpcPort",
        cel=f"!({MONITOR_PORT} in [self.dataParallel.rpcPort, self.dataParallel.rpcPort + 1])",
        broken=lambda spec: MONITOR_PORT in _taken_ports(spec)[:2],
        message=f"the relay takes rpcPort and the engine rpcPort + 1; {MONITOR_PORT} is the monitor's: write another rpcPort",
    ),
    Rule(
        field=".dataParallel.rpcPort",
        cel=f"self.dataParallel.rpcPort + 1 < {EPHEMERAL_PORTS_START}",
        broken=lambda spec: spec.data_parallel.rpc_port + 1 >= EPHEMERAL_PORTS_START,
        message=(
            f"from {EPHEMERAL_PORTS_START} on an outgoing connection may hold the port when the engine needs it: "
            f"write an rpcPort of at most {EPHEMERAL_PORTS_START - 2}"
        ),
    ),
    Rule(
        field=".failurePolicy.backoffSeconds",
        cel="self.failurePolicy.backoffSeconds <= self.failurePolicy.maxBackoffSeconds",
        broken=lambda spec: spec.failure_policy.backoff_seconds > spec.failure_policy.max_backoff_seconds,
        message="the back-off starts at backoffSeconds and ends at maxBackoffSeconds: write at most maxBackoffSeconds",
    ),
    Rule(
        field=".rollout",
        cel="!(string(self.rollout.maxSurge) in ['0', '0%'] && string(self.rollout.maxUnavailable) in ['0', '0%'])",
        broken=lambda spec: (
            str(spec.rollout.max_surge) in {"0", "0%"} and str(spec.rollout.max_unavailable) in {"0", "0%"}
        ),
        message="with maxSurge and maxUnavailable both 0 no group could ever be replaced: write maxUnavailable: 1",
    ),
    Rule(
        field=".engine.env",
        cel=(
            f"self.engine.env.all(e, !(e.name in {_strings(OWNED_ENV_NAMES)}"
            + "".join(f" || e.name.startsWith('{prefix}')" for prefix in OWNED_ENV_PREFIXES)
            + "))"
        ),
        broken=lambda spec: any(
            entry.name in OWNED_ENV_NAMES or entry.name.startswith(OWNED_ENV_PREFIXES) for entry in spec.engine.env
        ),
        message=(
            f"the operator sets {', '.join(OWNED_ENV_NAMES)} and everything that begins with "
            f"{' or '.join(OWNED_ENV_PREFIXES)}: leave it out"
        ),
    ),
    Rule(
        field=".engine.env",
        cel=(
            "self.devices.assignment != 'Slots' || self.engine.env.all(e, e.name != self.devices.visibleDevicesEnvName)"
        ),
        broken=lambda spec: (
            spec.devices.assignment == "Slots"
            and any(entry.name == spec.devices.visible_devices_env_name for entry in spec.engine.env)
        ),
        message=(
            "with devices.assignment: Slots the operator sets devices.visibleDevicesEnvName for every pod: leave it out, "
            "or write assignment: None to choose devices yourself"
        ),
    ),
    Rule(
        field=".engine.env",
        cel=(
            "self.devices.assignment != 'DevicePlugin' || self.engine.env.all(e, "
            f"e.name != self.devices.visibleDevicesEnvName && !(e.name in {_strings(VISIBLE_DEVICES_ENV_NAMES)}))"
        ),
        broken=lambda spec: (
            spec.devices.assignment == "DevicePlugin"
            and any(
                entry.name in {spec.devices.visible_devices_env_name, *VISIBLE_DEVICES_ENV_NAMES}
                for entry in spec.engine.env
            )
        ),
        message=(
            "with devices.assignment: DevicePlugin the plugin decides which devices a container sees: leave the "
            "visible-devices variable out, or write assignment: Slots for fixed indices"
        ),
    ),
    Rule(
        field=".engine.env",
        cel=(
            "self.devices.assignment != 'Slots' || "
            "!(self.devices.visibleDevicesEnvName in ['CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES']) || "
            "self.engine.env.all(e, !(e.name in ['CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES']))"
        ),
        broken=lambda spec: (
            spec.devices.assignment == "Slots"
            and spec.devices.visible_devices_env_name in TWINS
            and any(entry.name in TWINS for entry in spec.engine.env)
        ),
        message=(
            "vLLM refuses CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES that differ, and Slots sets one of them: "
            "leave the other out"
        ),
    ),
    Rule(
        field=".engine.env",
        cel="self.engine.env.all(e, !(has(e.value) && has(e.valueFrom)))",
        broken=lambda spec: any(entry.value is not None and entry.value_from is not None for entry in spec.engine.env),
        message="a variable has one source: write value or valueFrom, not both",
    ),
    *(
        Rule(
            field=path,
            cel=(
                f"!(self.devices.resourceName in self{path}.limits) && "
                f"!(self.devices.resourceName in self{path}.requests)"
            ),
            broken=broken,
            message=(
                "the operator counts devices per pod: leave devices.resourceName out here and "
                "write devices.assignment: DevicePlugin"
            ),
        )
        for path, broken in (
            (
                ".engine.resources",
                lambda spec: (
                    spec.devices.resource_name in {*spec.engine.resources.limits, *spec.engine.resources.requests}
                ),
            ),
            (
                ".headResources",
                lambda spec: spec.devices.resource_name in {*spec.head_resources.limits, *spec.head_resources.requests},
            ),
        )
    ),
    Rule(
        field=".service.ports",
        cel="size(self.service.ports) < 2 || self.service.ports.all(p, has(p.name))",
        broken=lambda spec: len(spec.service.ports) > 1 and any(port.name is None for port in spec.service.ports),
        message="a Service with several ports needs a name for each: write name",
    ),
    Rule(
        field=".service.ports",
        cel="self.service.ports.all(p, !has(p.name) || self.service.ports.exists_one(q, has(q.name) && q.name == p.name))",
        broken=lambda spec: len(names := [port.name for port in spec.service.ports if port.name]) != len(set(names)),
        message="two ports of the Service have the same name: write another one",
    ),
    *(_flag_rule(owned) for owned in OWNED_FLAGS),
    _command_rule(),
    *_switch_rules(),
    Rule(
        field=".engine.args",
        cel=(
            f"{_has_switch('--enable-eplb')} || "
            "self.engine.args.all(a, !a.contains('num-redundant-experts') && !a.contains('num_redundant_experts'))"
        ),
        broken=lambda spec: (
            not switch(spec, "--enable-eplb")
            and any(f"num{dash}redundant{dash}experts" in arg for arg in spec.engine.args for dash in "-_")
        ),
        message=(
            "redundant experts are placed by expert load balancing: write --enable-eplb too, or leave their number out"
        ),
    ),
    *_sliced_list_rules(),
    *(rule for path, get in _TEMPLATES for rule in _template_rules(path, get)),
)


# A name becomes part of pod, Service and label names: a DNS-1035 label, short enough for all of them.
NAME_CEL = f"self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= {NAME_MAX}"
NAME_MESSAGE = (
    f"it becomes part of the names of pods and Services: write at most {NAME_MAX} lower-case letters, digits "
    "and dashes, beginning with a letter and ending with a letter or digit"
)


def least_version(spec: Spec) -> tuple[str, str] | None:
    """The oldest vLLM that can run a spec and what it is needed for; None where every supported one can.

    A launcher in an image with an older one says so and starts nothing, before the operator can know.
    """
    oldest = _with_version(spec, "0.0")
    needs = [(f"0.{rule.since}", rule.what) for rule in RULES if rule.since and rule.broken(oldest)]
    needs += [
        (first, "a device by another name than its number")
        for last, first in (("0.11.1", "0.11.2"), ("0.23", "0.24"))
        if len(list(_argument_errors(spec, version=last))) > len(list(_argument_errors(spec, version=first)))
    ]
    return max(needs, key=lambda need: versions.order(need[0]), default=None)


def _with_version(spec: Spec, version: str) -> Spec:
    return replace(spec, engine=replace(spec.engine, version=version))


def _argument_errors(spec: Spec, *, version: str) -> Iterator[str]:
    """Say what vLLM refuses and CEL cannot tell: values that depend on each other, or on their places."""
    for word in _in_command(spec):
        owner = next((owned for owned in OWNED_FLAGS if owns(owned, word)), None)
        if owner and not _of_vllm_alone(word):  # of those a rule has told
            yield f"spec.engine.command: {word} is a flag the operator owns: {owner.instead}"
    dp = spec.data_parallel
    most = _argument(spec, "--elastic-ep-max-dp-size")
    if switch(spec, "--enable-elastic-ep") and most.isdigit() and int(most) < dp.size:
        yield f"spec.engine.args: --elastic-ep-max-dp-size {most}: write at least dataParallel.size, {dp.size}"
    if spec.devices.assignment != "None":
        return
    env_name = spec.devices.visible_devices_env_name
    lists = [("engine.args", "--device-ids", _argument(spec, "--device-ids"))]
    for where, env in _device_environments(spec):
        if len({env[name] for name in TWINS if env.get(name) is not None}) > 1:
            yield f"spec.{where}: vLLM refuses {' and '.join(TWINS)} that differ: leave one out"
        visible = env.get(env_name) or ""
        if where != "engine.env" or not _too_short(visible, ",", spec):  # of those a rule has told
            lists.append((where, env_name, visible))
    for where, name, visible in lists:
        try:
            for local_rank in range(dp.size_local):
                world = spec.tensor_parallel_size * spec.pipeline_parallel_size
                seen_by_rank(visible, local_rank=local_rank, world=world, version=version, env_name=name)
        except ValueError as error:
            yield f"spec.{where}: {error}"


def _device_environments(spec: Spec) -> Iterator[tuple[str, dict[str, str | None]]]:
    """What hides devices from the engine, by the field that says it last: engine.env and each template that adds to it."""
    wanted = {spec.devices.visible_devices_env_name, *TWINS}
    values = {entry.name: entry.value for entry in spec.engine.env if entry.name in wanted}
    yield "engine.env", values
    for path, get in _TEMPLATES:
        if path == "headTemplate" and spec.data_parallel.head_placement == "Dedicated":
            return  # a head without ranks has no use for devices
        entries = podtemplate.engine(get(spec)).get("env") or []
        own = {entry["name"]: entry.get("value") for entry in entries if entry["name"] in wanted}
        if own:
            values = values | own
            yield f"{path}.spec.containers", values


def _argument(spec: Spec, flag: str) -> str:
    """Value of a flag in args, in one word or two; empty where it is not given."""
    words = [*spec.engine.args, ""]
    for word, following in pairwise(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == flag:
            return value if equals else following
    return ""


def broken_rules(*, name: str, spec: Spec) -> list[str]:
    """Why the CRD of this release would refuse an object, as `field: message`; empty where it accepts it."""
    found = [f"spec{rule.field}: {rule.message}" for rule in RULES if rule.broken(spec)]
    if len(name) > NAME_MAX or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        found.insert(0, f"metadata.name: {NAME_MESSAGE}")
    return found


def refusals(*, name: str, spec: Spec, installed: str | None = None) -> list[str]:
    """Why an object cannot be acted on: what its CRD should refuse, what CEL cannot tell, and what its vLLM cannot do.

    `installed` is the version that counts: what the launchers found in the image, or else what field or tag say.
    """
    found = broken_rules(name=name, spec=spec)
    if installed and installed != spec.engine.version:
        true = _with_version(spec, installed)
        found += [
            f"spec{rule.field}: with vLLM {installed}: {rule.message}"
            for rule in RULES
            if rule.broken(true) and not rule.broken(spec)
        ]
    return found + list(_argument_errors(spec, version=installed or versions.known(spec) or versions.NEWEST_KNOWN))
