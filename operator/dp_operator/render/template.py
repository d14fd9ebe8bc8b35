"""A partial PodTemplateSpec laid over a rendered one. Pure.

Objects are merged field by field; lists of things that have a name are merged by it, in the order: ours, then theirs;
other lists are joined where both sides may add (`tolerations`, anti-affinity terms, …) and otherwise replaced. The
overlay wins. What it may not touch is refused earlier, by the rules of the API, and never overwritten here.
"""

from __future__ import annotations

import copy
from typing import Any

# Key of the items of a list, by the field that holds it. hostAliases and ports have keys of their own.
_LIST_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "sysctls": ("name",),
    "hostAliases": ("ip",),
    "ports": ("containerPort", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_JOINED = frozenset(
    {
        "tolerations",
        "envFrom",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
        "readinessGates",
        "schedulingGates",
    }
)
# A volume and a variable have one source: the overlay's takes the place of ours.
_REPLACED_ITEMS = frozenset({"env", "volumes"})


def merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Lay an overlay over a base; neither is changed. A null in the overlay removes the field."""
    result = dict(base)
    for name, value in overlay.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merge(result[name], value)
        elif isinstance(value, list) and isinstance(result.get(name), list):
            result[name] = _merge_list(name, result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merge_list(name: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    if name in _JOINED:
        return [*base, *copy.deepcopy(overlay)]
    keys = _LIST_KEYS.get(name)
    if keys is None:
        return copy.deepcopy(overlay)
    result = list(base)
    places = {_key(item, keys): index for index, item in enumerate(base)}
    for item in overlay:
        place = places.get(_key(item, keys))
        if place is None:
            places[_key(item, keys)] = len(result)
            result.append(copy.deepcopy(item))
        elif name in _REPLACED_ITEMS:
            result[place] = copy.deepcopy(item)
        else:
            result[place] = merge(result[place], item)
    return result


def _key(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(item, dict):
        return (item,)
    return tuple(item.get(key, "TCP" if key == "protocol" else None) for key in keys)
