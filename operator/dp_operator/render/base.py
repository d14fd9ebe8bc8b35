"""Identity of what is rendered: settings, incarnation, names, labels, owner."""

from __future__ import annotations

from typing import Any

import msgspec

from dp_operator import naming
from dp_operator.api import API_VERSION, KIND, DataParallelDeployment

Manifest = dict[str, Any]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering needs to know about the operator itself."""

    relay_image: str
    namespace: str = "dp-system"
    pod_labels: dict[str, str] = msgspec.field(default_factory=lambda: {"app.kubernetes.io/name": "dp-operator"})


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one incarnation of one group."""

    cr: DataParallelDeployment
    group: int
    id: str
    revision: str
    settings: Settings
    installed: str = ""  # vLLM version that an earlier incarnation of the revision found in the image

    @property
    def base(self) -> str:
        return naming.base_name(self.cr.metadata.name, self.group, self.id)


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


def meta(inc: Incarnation, name: str, role: str | None = None, **extra: Any) -> dict[str, Any]:
    """Metadata of an object of one incarnation."""
    return {
        "name": name,
        "namespace": inc.cr.metadata.namespace,
        "labels": labels(inc, role),
        "ownerReferences": [owner_reference(inc.cr)],
        **extra,
    }


def labels(inc: Incarnation, role: str | None) -> dict[str, str]:
    """Labels of an object of one incarnation."""
    result = {
        **naming.labels(inc.cr),
        naming.LABEL_GROUP: str(inc.group),
        naming.LABEL_INCARNATION: inc.id,
        naming.LABEL_REVISION: inc.revision,
    }
    if role:
        result |= {naming.LABEL_ROLE: role, "app.kubernetes.io/component": role}
    return result


def incarnation_selector(inc: Incarnation, role: str | None = None) -> dict[str, str]:
    """Labels that find the pods of one incarnation."""
    selected = {naming.LABEL_UID: inc.cr.metadata.uid, naming.LABEL_INCARNATION: inc.id}
    return selected | ({naming.LABEL_ROLE: role} if role else {})


def kept_meta(cr: DataParallelDeployment, *, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """Metadata of an object that lives as long as the custom resource."""
    result: dict[str, Any] = {
        "name": cr.metadata.name,
        "namespace": cr.metadata.namespace,
        "labels": naming.labels(cr),
        "ownerReferences": [owner_reference(cr)],
    }
    if annotations:
        result["annotations"] = annotations
    return result
