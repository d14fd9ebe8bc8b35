"""The CustomResourceDefinition, generated from the types of `api` and the rules of `rules`.

`python -m dp_operator.crd [FILE ...]` prints it or writes it; `crds/` and `charts/dp-operator/files/` hold that text, and
a unit test fails when they differ.

Structural schemas know no references, no union with null and no tuple of types, so the types are walked here rather
than through msgspec's JSON schema. Decisions:

* an object field with a default gets `default: {}`, so that the defaults below it apply to objects that leave it out;
* `X | None` is an optional field without default: null is refused, absent is said by leaving the field out;
* status shows numbers and booleans even where they have their default, and leaves out empty strings and lists;
* all rules hang on spec (the one on the name on the whole object): rules inside lists would multiply their cost.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from dp_operator import api, rules
from dp_operator.descriptions import DESCRIPTIONS

Schema = dict[str, Any]

# In the functions below `at` is the path of the schema that is made, such as `spec.engine.env[].name`.

# Lists that are maps by one key of their items. All others are replaced as a whole.
LIST_KEYS: dict[type, str] = {
    api.EnvVar: "name",
    api.ServicePort: "port",
    api.Condition: "type",
    api.GroupStatus: "incarnation",
}
INT32_MAX = 2**31 - 1


def _integer(kind: inspect.IntType) -> Schema:
    schema: Schema = {"type": "integer"}
    bounded = kind.le is not None and kind.le <= INT32_MAX
    schema["format"] = "int32" if bounded else "int64"
    if kind.ge is not None:
        schema["minimum"] = kind.ge
    if kind.le is not None:
        schema["maximum"] = kind.le
    return schema


def _string(kind: inspect.StrType) -> Schema:
    limits = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": kind.pattern}
    return {"type": "string"} | {name: value for name, value in limits.items() if value is not None}


def _list(kind: inspect.ListType, *, at: str) -> Schema:
    schema: Schema = {"type": "array"}
    if kind.min_length is not None:
        schema["minItems"] = kind.min_length
    if kind.max_length is not None:
        schema["maxItems"] = kind.max_length
    key = LIST_KEYS.get(kind.item_type.cls) if isinstance(kind.item_type, inspect.StructType) else None
    if key is None:
        schema["x-kubernetes-list-type"] = "atomic"
    else:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return schema | {"items": _schema(kind.item_type, at=f"{at}[]")}


def _map(kind: inspect.DictType, *, at: str) -> Schema:
    schema: Schema = {"type": "object"}
    if isinstance(kind.value_type, inspect.AnyType):
        return schema
    if kind.max_length is not None:
        schema["maxProperties"] = kind.max_length
    return schema | {"additionalProperties": _schema(kind.value_type, at=at)}


def _union(kind: inspect.UnionType, *, at: str) -> Schema:
    alternatives = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
    if len(alternatives) == 1:
        return _schema(alternatives[0], at=at)
    if {type(part) for part in alternatives} == {inspect.IntType, inspect.StrType}:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    raise TypeError(f"a structural schema has no union of {alternatives}")


def _default(field: inspect.Field, schema: Schema, *, at: str) -> Schema:
    """Return the `default` of one field's schema, or nothing where the API server should not fill it in."""
    if field.required or field.default is None:
        return {}
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        below = schema["properties"].values()
        return {"default": {}} if any("default" in part for part in below) else {}
    if at.startswith("status.") and value in ("", [], {}):
        return {}
    return {"default": msgspec.to_builtins(value)}


def _object(kind: inspect.StructType, *, at: str) -> Schema:
    properties: dict[str, Schema] = {}
    for field in kind.fields:
        path = f"{at}.{field.encode_name}"
        described = {"description": DESCRIPTIONS[path]} if path in DESCRIPTIONS else {}
        below = described | _schema(field.type, at=path)
        properties[field.encode_name] = below | _default(field, below, at=path)
    schema: Schema = {"type": "object"}
    if kind.cls.__doc__:
        schema["description"] = " ".join(kind.cls.__doc__.split())
    if required := [field.encode_name for field in kind.fields if field.required]:
        schema["required"] = required
    return schema | {"properties": properties}


def _schema(kind: inspect.Type, *, at: str) -> Schema:
    if isinstance(kind, inspect.Metadata):
        extra = dict(kind.extra_json_schema or {})
        said = {"description": extra.pop("description")} if "description" in extra else {}
        return said | {k: v for k, v in (_schema(kind.type, at=at) | extra).items() if k not in said}
    if isinstance(kind, inspect.StructType):
        return _object(kind, at=at)
    if isinstance(kind, inspect.ListType):
        return _list(kind, at=at)
    if isinstance(kind, inspect.DictType):
        return _map(kind, at=at)
    if isinstance(kind, inspect.UnionType):
        return _union(kind, at=at)
    if isinstance(kind, inspect.LiteralType):
        return {"type": "string", "enum": list(kind.values)}
    if isinstance(kind, inspect.IntType):
        return _integer(kind)
    if isinstance(kind, inspect.StrType):
        return _string(kind)
    if isinstance(kind, inspect.BoolType):
        return {"type": "boolean"}
    raise TypeError(f"a structural schema has no {kind}")


def _validation(rule: rules.Rule) -> Schema:
    # Forbidden prints the message alone; Invalid would print the whole spec before it.
    return {"rule": rule.cel, "message": rule.message, "fieldPath": rule.field, "reason": "FieldValueForbidden"}


def _root_schema() -> Schema:
    spec = _schema(inspect.type_info(api.Spec), at="spec")
    spec["x-kubernetes-validations"] = [_validation(rule) for rule in rules.RULES]
    return {
        "type": "object",
        "description": "Groups of data-parallel vLLM ranks that start together, serve one API and are replaced as a whole.",
        "required": ["spec"],
        "x-kubernetes-validations": [
            {
                "rule": rules.NAME_CEL,
                "message": rules.NAME_MESSAGE,
                "fieldPath": ".metadata.name",
                "reason": "FieldValueForbidden",
            }
        ],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # Only so that the rule on the name can point at it; 253 is every object's limit.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": spec,
            "status": _schema(inspect.type_info(api.Status), at="status"),
        },
    }


def _column(name: str, path: str, *, kind: str = "string", wide: bool = False, description: str) -> Schema:
    return {
        "name": name,
        "type": kind,
        "jsonPath": path,
        "priority": 1 if wide else 0,
        "description": description,
    }


def _ready(part: str) -> str:
    return f'.status.conditions[?(@.type=="Ready")].{part}'


def crd() -> Schema:
    """Build the CustomResourceDefinition as the API server takes it."""
    columns = [
        _column("Ready", _ready("status"), description="All groups serve, in the newest revision."),
        _column("Groups", ".spec.replicas", kind="integer", description="Groups wanted."),
        _column("Serving", ".status.readyReplicas", kind="integer", description="Groups that serve."),
        _column("Ranks", ".status.ranks.summary", description="Ready ranks of expected ranks."),
        _column("Age", ".metadata.creationTimestamp", kind="date", description="Time since creation."),
        _column("Reason", _ready("reason"), wide=True, description="Why it is ready or not, in one word."),
        _column("Size", ".spec.dataParallel.size", kind="integer", wide=True, description="Ranks in one group."),
        _column("Image", ".spec.engine.image", wide=True, description="The vLLM image."),
        _column("Message", _ready("message"), wide=True, description="Why it is ready or not, in a sentence."),
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{api.PLURAL}.{api.GROUP}"},
        "spec": {
            "group": api.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": api.KIND,
                "listKind": f"{api.KIND}List",
                "plural": api.PLURAL,
                "singular": api.KIND.lower(),
                "shortNames": ["dpd"],
                "categories": ["inference"],
            },
            "versions": [
                {
                    "name": api.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": columns,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": _root_schema()},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: shared parts are written out."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def text() -> str:
    """Render the CRD file."""
    body = yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return "# Generated by `python -m dp_operator.crd` from operator/dp_operator/api.py and rules.py.\n" + body


def main(paths: list[str]) -> None:
    """Write the CRD file to every path, or print it where there is none."""
    for path in paths:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text())
    if not paths:
        print(text(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
