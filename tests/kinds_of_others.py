"""Kinds and labels of other projects, as far as ours and the examples' objects use them: one source for all tests.

Written by hand and compared with the projects' own repositories, at these commits:

* Volcano, `scheduling.volcano.sh/v1beta1`: volcano-sh/volcano 096235e19d45, config/crd/volcano/bases (controller-gen 0.18,
  with networkTopology), and a8913439096f before it; annotation of pods: volcano-sh/apis 04ee8830695d, v1beta1/labels.go;
* Coscheduling, `scheduling.x-k8s.io/v1alpha1`: kubernetes-sigs/scheduler-plugins 3f8606c336a1, config/crd/bases, and label
  of pods: 08079b777f33, apis/scheduling/v1alpha1/types.go;
* Kueue: kubernetes-sigs/kueue 1be1e83c32fb, pkg/controller/jobs/pod/constants, and what its webhook asks of a pod group:
  064520089ed2, pkg/controller/jobs/pod/pod_webhook.go;
* InferencePool, `inference.networking.k8s.io/v1`: kubernetes-sigs/gateway-api-inference-extension, api/v1 at
  ca3d9dd43a88 (release 1.0: one port, a picker is required) and as of release 1.5 (up to eight ports, picker optional).
  The narrower of both counts here.

Fields that nobody here uses are left out, so that one that appears counts as unknown until it is compared, too.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Schema = dict[str, Any]


class Gang(Struct, frozen=True, kw_only=True):
    """A kind of PodGroup, and how a pod names the one that it belongs to."""

    group: str
    version: str
    spec: Schema
    part: str  # of a pod's metadata
    key: str


GANGS = {
    "Volcano": Gang(
        group="scheduling.volcano.sh",
        version="v1beta1",
        spec={
            "type": "object",
            "properties": {
                "minMember": {"type": "integer", "format": "int32"},
                "queue": {"type": "string", "default": "default"},
            },
        },
        part="annotations",
        key="scheduling.k8s.io/group-name",
    ),
    "Coscheduling": Gang(
        group="scheduling.x-k8s.io",
        version="v1alpha1",
        spec={
            "type": "object",
            "properties": {
                "minMember": {"type": "integer", "format": "int32", "minimum": 1},
                "scheduleTimeoutSeconds": {"type": "integer", "format": "int32", "maximum": 2**31 - 1},
            },
        },
        part="labels",
        key="scheduling.x-k8s.io/pod-group",
    ),
}

# A pod group of Kueue: its name, an object name; the number of its pods, a number above 0 as text; and "true", by which
# Kueue neither ends the group when a pod does nor waits for all of its pods to end.
KUEUE: Schema = {
    "type": "object",
    "required": ["labels", "annotations"],
    "properties": {
        "labels": {
            "type": "object",
            "required": ["kueue.x-k8s.io/pod-group-name"],
            "properties": {
                "kueue.x-k8s.io/pod-group-name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                "kueue.x-k8s.io/queue-name": {"type": "string", "pattern": "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"},
            },
        },
        "annotations": {
            "type": "object",
            "required": ["kueue.x-k8s.io/pod-group-total-count", "kueue.x-k8s.io/pod-group-serving"],
            "properties": {
                "kueue.x-k8s.io/pod-group-total-count": {"type": "string", "pattern": "^[1-9][0-9]*$"},
                "kueue.x-k8s.io/pod-group-serving": {"type": "string", "enum": ["true"]},
            },
        },
    },
}

_PORT: Schema = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}},
}
_LABEL_VALUE = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
INFERENCE_POOL: Schema = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "additionalProperties": {"type": "string", "maxLength": 63, "pattern": _LABEL_VALUE},
                }
            },
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 1, "items": _PORT},
        "endpointPickerRef": {
            "type": "object",
            # The port is required by a rule for kind Service, which is the default.
            "required": ["name", "port"],
            "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 253}, "port": _PORT},
        },
    },
}
