"""Names, labels and revisions: what an object is called and how it is found again.

An incarnation is found by labels and by the UID of its custom resource, never by name alone: the name only has to
be unique and short enough that every derived name fits.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec

from dp_operator.api import GROUP, DataParallelDeployment, Spec

MANAGER = "dp-operator"  # field manager, managed-by label and Event reporter

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_NAME = f"{GROUP}/name"
LABEL_UID = f"{GROUP}/uid"
LABEL_GROUP = f"{GROUP}/group"
LABEL_INCARNATION = f"{GROUP}/incarnation"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_ROLE = f"{GROUP}/role"
LABEL_SERVING = f"{GROUP}/serving"  # on pods that have an API: what the client Service selects
LABEL_SET = f"{GROUP}/set"  # which StatefulSet of the incarnation a worker belongs to
LABEL_DEVICES = f"{GROUP}/devices"  # first and last device of the node that the pod uses, as 4-7
ANNOTATION_RESTART = f"{GROUP}/restart"
ANNOTATION_DRAIN_NODES = f"{GROUP}/drain-nodes"  # comma-separated: treat these nodes as being emptied
ANNOTATION_MONITOR_HOST = f"{GROUP}/monitor-host"

HEAD = "head"
WORKER = "worker"

# `<name>-<group ≤ 63>-<incarnation, 5>-s<slot ≤ 63>` must stay within 52 characters: the StatefulSet controller
# puts name + "-" + a 10-character hash into a label of at most 63.
INCARNATION_LENGTH = 5
NAME_MAX = 52 - len("-63") - len("-") - INCARNATION_LENGTH - len("-s63") - 1  # one character in reserve

# Only letters and digits that cannot form words or be misread.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def incarnation_id(seed: bytes) -> str:
    """Turn random bytes (8 or more) into an id of INCARNATION_LENGTH characters."""
    number = int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")
    letters = []
    for _ in range(INCARNATION_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[digit])
    return "".join(letters)


def base_name(name: str, group: int, incarnation: str) -> str:
    """Name shared by the objects of one incarnation; also the ConfigMap's and PodDisruptionBudget's own."""
    return f"{name}-{group}-{incarnation}"


def head_name(base: str) -> str:
    return f"{base}-head"


def rpc_service_name(base: str) -> str:
    return f"{base}-rpc"


def worker_set_name(base: str, slot: int | None) -> str:
    """StatefulSet of the workers; one per device slot with Slots, one otherwise."""
    return f"{base}-w" if slot is None else f"{base}-s{slot}"


def ordinal(pod_name: str) -> int:
    """Ordinal of a StatefulSet's pod."""
    return int(pod_name.rsplit("-", 1)[1])


def selector(cr: DataParallelDeployment) -> str:
    """Label selector of the head pods, one per group: what the scale subresource reports."""
    return f"{LABEL_UID}={cr.metadata.uid},{LABEL_ROLE}={HEAD}"


def restart_token(cr: DataParallelDeployment) -> str:
    """Value of the restart annotation, or a hash of one that is too long to be kept in the status."""
    token = cr.metadata.annotations.get(ANNOTATION_RESTART, "")
    return token if len(token) <= 128 else hashlib.sha256(token.encode()).hexdigest()


def labels(cr: DataParallelDeployment) -> dict[str, str]:
    """Labels of everything made for a custom resource."""
    return {
        LABEL_MANAGED_BY: MANAGER,
        "app.kubernetes.io/instance": cr.metadata.name,
        LABEL_NAME: cr.metadata.name,
        LABEL_UID: cr.metadata.uid,
    }


# Fields that change nothing inside a pod: a change of theirs must not replace a group.
_OUTSIDE_REVISION = (
    "replicas",
    "suspend",
    "startup",
    "failurePolicy",
    "rollout",
    "disruption",
    "service",
    "networkPolicy",
)


def revision(spec: Spec) -> str:
    """Hash of the part of a spec that needs new pods, 10 hex digits.

    Defaults are left out, spelled out or not, so a newer CRD that adds a defaulted field, or fills defaults in, moves
    nothing.
    """
    return _revision(msgspec.json.encode(spec))


@functools.lru_cache(maxsize=1024)
def _revision(encoded: bytes) -> str:
    """The revision of an encoded spec. Remembered: every reconcile of an unchanged object asks for it."""
    content = _without_defaults(msgspec.json.decode(encoded, type=Spec))
    for name in _OUTSIDE_REVISION:
        content.pop(name, None)
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:10]


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Fields of a struct type. Looked up once: it costs a millisecond, and every reconcile hashes a spec."""
    return msgspec.structs.fields(kind)


def _without_defaults(value: Any) -> Any:
    """Builtins of a value, without the struct fields that equal their defaults.

    msgspec's own omit_defaults compares most values by identity, so it keeps defaults that were decoded.
    """
    if isinstance(value, msgspec.Struct):
        kept = {}
        for field in _fields(type(value)):
            item = getattr(value, field.name)
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            if item != default:
                kept[field.encode_name] = _without_defaults(item)
        return kept
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    return msgspec.to_builtins(value)
