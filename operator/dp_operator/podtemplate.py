"""The partial PodTemplateSpec of `template` and `headTemplate`: as much of its schema as the rules look into.

What the rules need is typed, because CEL reaches typed fields only; everything else passes through as it is and is
checked by the API server when the pods are made.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _text(description: str, *, limit: int = 256) -> Schema:
    return {"type": "string", "maxLength": limit, "description": description}


def _open(description: str, properties: Schema | None = None, *, required: list[str] | None = None) -> Schema:
    """An object whose other fields are kept."""
    schema: Schema = {"type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": True}
    if required:
        schema["required"] = required
    return schema | ({"properties": properties} if properties else {})


def _by(key: str, limit: int, description: str, item: Schema) -> Schema:
    return {
        "type": "array",
        "description": description,
        "maxItems": limit,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": item,
    }


def _words(description: str) -> Schema:
    return {
        "type": "array",
        "description": description,
        "maxItems": 128,
        "x-kubernetes-list-type": "atomic",
        "items": {"type": "string", "maxLength": 4096},
    }


def _map(description: str, *, limit: int) -> Schema:
    return {
        "type": "object",
        "description": description,
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": limit},
    }


_CONTAINER = _open(
    "A container, merged with the rendered one of its name; `engine` is vLLM's.",
    {
        "name": _text("Name of the container.", limit=63),
        "image": _text("Image; of the engine: write spec.engine.image.", limit=512),
        "command": _words("Command; of the engine: write spec.engine.command."),
        "args": _words("Arguments; of the engine: write spec.engine.args."),
        "env": _by(
            "name",
            128,
            "Environment, merged by name.",
            _open("A variable.", {"name": _text("Name of the variable.")}, required=["name"]),
        ),
        "resources": _open("Resources; of the engine: write spec.engine.resources."),
        "readinessProbe": _open("Readiness; the engine's is the operator's."),
        "livenessProbe": _open("Liveness; not for the engine: deadlines of the operator replace it."),
        "startupProbe": _open("Startup; not for the engine: startup.timeoutSeconds replaces it."),
        "lifecycle": _open("Hooks; the engine's are the operator's, see spec.drain."),
        "restartPolicy": _text("Restart policy of a sidecar among the init containers.", limit=16),
        "terminationMessagePath": _text("Where the last words are; the engine's is the operator's.", limit=1024),
        "terminationMessagePolicy": _text("Where last words come from; the engine's is the operator's.", limit=32),
        "volumeMounts": _by(
            "mountPath",
            64,
            "Mounts, merged by path.",
            _open(
                "A mount.",
                {"name": _text("The volume."), "mountPath": _text("Where it is mounted.", limit=1024)},
                required=["name", "mountPath"],
            ),
        ),
    },
    required=["name"],
)

SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations that pods get besides the operator's.",
            "properties": {
                "labels": _map("Labels of the pods.", limit=63),
                "annotations": _map("Annotations of the pods.", limit=4096),
            },
        },
        "spec": _open(
            "Fields of a PodSpec; lists of named things are merged by name, and what is written here wins.",
            {
                "containers": _by("name", 16, "Containers, merged by name.", _CONTAINER),
                "initContainers": _by(
                    "name",
                    16,
                    "Init containers and sidecars, after the operator's.",
                    _open("An init container.", {"name": _text("Its name.", limit=63)}, required=["name"]),
                ),
                "volumes": _by(
                    "name",
                    64,
                    "Volumes, beside the operator's.",
                    _open("A volume.", {"name": _text("Its name.")}, required=["name"]),
                ),
                "hostNetwork": {"type": "boolean", "description": "Use the node's network."},
                "restartPolicy": _text("The operator's: a group is restarted as a whole.", limit=16),
                "enableServiceLinks": {"type": "boolean", "description": "The operator's: always false."},
                "terminationGracePeriodSeconds": {
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                    "maximum": 604800,
                    "description": "The operator's: write spec.drain.",
                },
                "hostname": _text("The operator's: pods are found by address.", limit=63),
                "subdomain": _text("The operator's: pods are found by address.", limit=63),
            },
        ),
    },
}


def containers(template: dict[str, Any] | None, *, field: str = "containers") -> list[dict[str, Any]]:
    """Containers of a template, [] where it has none."""
    return list((pod_spec(template)).get(field) or [])


def engine(template: dict[str, Any] | None) -> dict[str, Any]:
    """What a template says of the engine container, {} where it says nothing."""
    return next((c for c in containers(template) if c.get("name") == "engine"), {})


def pod_spec(template: dict[str, Any] | None) -> dict[str, Any]:
    """The PodSpec part of a template, {} where it has none."""
    return (template or {}).get("spec") or {}
