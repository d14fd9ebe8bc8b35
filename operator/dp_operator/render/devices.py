"""Which accelerators each container may use."""

from __future__ import annotations

from dp_operator import naming
from dp_operator.api import PER_NODE_MAX, Spec
from dp_operator.render.shape import devices_per_pod


def slot_devices(spec: Spec, slot: int) -> range:
    """Device indices of a slot, contiguous."""
    width = devices_per_pod(spec)
    return range(slot * width, (slot + 1) * width)


def device_labels(spec: Spec, slot: int | None) -> dict[str, str]:
    """The devices of a slot as a label, so that pods of different widths and objects still exclude each other."""
    if slot is None:
        return {}
    return {naming.LABEL_DEVICES: _range(slot, devices_per_pod(spec))}


def anti_affinity(spec: Spec, slot: int) -> list[dict[str, object]]:
    """Keep pods that use one of this slot's devices, of whatever object and namespace, off the node.

    One term that lists every slot of any width that shares a device, not one term per device: when a pod goes, the
    scheduler looks again at those waiting pods only whose terms *all* match it (Kubernetes 1.35), so that a pod with a
    term for each of its eight devices would sleep for five minutes beside devices that a narrower pod has given back.
    """
    return [
        {
            "topologyKey": "kubernetes.io/hostname",
            "namespaceSelector": {},
            "labelSelector": {
                "matchExpressions": [
                    {"key": naming.LABEL_DEVICES, "operator": "In", "values": _overlapping(slot_devices(spec, slot))}
                ]
            },
        }
    ]


def _range(slot: int, width: int) -> str:
    return f"{slot * width}-{slot * width + width - 1}"


def _overlapping(devices: range) -> list[str]:
    """All slots of all widths on a node of PER_NODE_MAX devices that share one with these."""
    return [
        _range(slot, width)
        for width in range(1, PER_NODE_MAX + 1)
        for slot in range(devices[0] // width, devices[-1] // width + 1)
        if (slot + 1) * width <= PER_NODE_MAX
    ]
