"""Check a value against a structural schema, offline, and say everything that is wrong at once.

The API server does the same when an object is applied. Here it serves `python -m dp_operator plan`, which needs no
cluster; it knows the part of structural schemas that the CRD uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def errors(schema: Schema, value: Any, at: str) -> Iterator[str]:
    """Say what a value breaks, as `path: message`; unknown fields included."""
    if "x-kubernetes-int-or-string" in schema:
        yield from _int_or_string(schema, value, at)
        return
    kind: str = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        yield f"{at}: must be of type {kind}, not {_kind(value)}"
    elif kind == "object":
        yield from _object(schema, value, at)
    elif kind == "array":
        yield from _array(schema, value, at)
    elif kind == "string":
        yield from _string(schema, value, at)
    elif kind == "integer":
        yield from _bounds(schema, value, at)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((name for name, kind in _KINDS.items() if type(value) is kind), type(value).__name__)


def _object(schema: Schema, value: dict[str, Any], at: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}.{name}: is required"
    if len(value) > schema.get("maxProperties", len(value)):
        yield f"{at}: has {len(value)} entries, at most {schema['maxProperties']} are allowed"
    known = schema.get("properties", {})
    for name, item in value.items():
        path = f"{at}.{name}"
        if name in known:
            yield from errors(known[name], item, path)
        elif "additionalProperties" in schema:
            yield from errors(schema["additionalProperties"], item, path)
        elif not schema.get("x-kubernetes-preserve-unknown-fields") and "properties" in schema:
            yield f"{path}: unknown field"


def _array(schema: Schema, value: list[Any], at: str) -> Iterator[str]:
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(value))
    if not low <= len(value) <= high:
        yield f"{at}: has {len(value)} items, {low} to {high} are allowed"
    keys = schema.get("x-kubernetes-list-map-keys", [])
    seen: set[tuple[str, ...]] = set()
    for index, item in enumerate(value):
        yield from errors(schema["items"], item, f"{at}[{index}]")
        if keys and isinstance(item, dict):
            key = tuple(str(item.get(name)) for name in keys)
            if key in seen:
                yield f"{at}[{index}]: duplicate {', '.join(key)}"
            seen.add(key)


def _string(schema: Schema, value: str, at: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {', '.join(schema['enum'])}"
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{at}: has {len(value)} characters, {schema.get('minLength', 0)} to {schema.get('maxLength')} are allowed"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"


def _bounds(schema: Schema, value: int, at: str) -> Iterator[str]:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if not low <= value <= high:
        yield f"{at}: {value} is not within {low} to {high}"


def _int_or_string(schema: Schema, value: Any, at: str) -> Iterator[str]:
    if isinstance(value, str):
        yield from _string(schema, value, at)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from _bounds(schema, value, at)
    else:
        yield f"{at}: must be an integer or a string, not {_kind(value)}"
