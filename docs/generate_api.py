"""Rewrites the tables of docs/api.md from the CRD and its rules: `PYTHONPATH=operator python docs/generate_api.py`.

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_operator import crd, rules

PAGE = Path(__file__).with_name("api.md")

Schema = dict[str, Any]


def _fields(node: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    for name, below in node.get("properties", {}).items():
        yield f"{path}{name}", below, name in node.get("required", [])
        yield from _fields(below, f"{path}{name}.")
        if "items" in below:
            yield from _fields(below["items"], f"{path}{name}[].")


def _bounds(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    return f" {low}…{high}" if high is not None else f" ≥ {low}" if low is not None else ""


def _kind(node: Schema) -> str:
    """Type and bounds of a field in a few words."""
    if "enum" in node:
        return " \\| ".join(node["enum"])
    if "x-kubernetes-int-or-string" in node:
        return "number or percentage" if node["pattern"].endswith("%$") else "quantity"
    if node["type"] == "array":
        key = node.get("x-kubernetes-list-map-keys")
        by = f" by {key[0]}" if key else ""
        return f"list{by}, at most {node['maxItems']}"
    if node["type"] == "object" and "additionalProperties" in node:
        return f"map, at most {node['maxProperties']}"
    if node["type"] == "object" and "properties" not in node:
        return "object, passed through"
    if node["type"] == "string" and "maxLength" in node:
        return f"string, at most {node['maxLength']}"
    if node.get("format") == "date-time":
        return "time"
    return str(node["type"]) + _bounds(node)


def _default(node: Schema, *, required: bool) -> str:
    if required:
        return "**required**"
    default = node.get("default")
    if default is None or (default == {} and "properties" in node):
        return ""
    if isinstance(default, list):
        return f"`[{', '.join(default)}]`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _field_table(node: Schema) -> str:
    rows = ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for path, field, required in _fields(node, ""):
        meaning = _cell(field.get("description", ""))
        rows.append(f"| `{path}` | {_kind(field)} | {_default(field, required=required)} | {meaning} |")
    return "\n".join(rows)


def _rule_table(table: tuple[rules.Rule, ...]) -> str:
    rows = ["| Field | Message |", "|---|---|"]
    rows += [f"| `spec{rule.field}` | {_cell(rule.message)} |" for rule in table]
    return "\n".join(rows)


def tables() -> dict[str, str]:
    """Every table by its name in the page."""
    schema = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return {
        "spec": _field_table(schema["spec"]),
        "status": _field_table(schema["status"]),
        "rules": f"{_rule_table(rules.RULES)}\n| `metadata.name` | {rules.NAME_MESSAGE} |",
    }


def page(text: str) -> str:
    """Put the tables of today into a page."""
    for name, table in tables().items():
        begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
        parts = re.split(f"{begin}.*?{end}", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(f"{len(parts) - 1} places for the table {name}")
        text = (begin + table + end).join(parts)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
