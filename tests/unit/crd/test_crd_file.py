"""What holds for the committed CRD as a whole."""

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest

from dp_operator import api, crd, rules
from dp_operator.descriptions import DESCRIPTIONS

ROOT = Path(__file__).parents[3]
NAME = "dataparallel.io_dataparalleldeployments.yaml"


def walk(node, path=""):
    """Every schema below one, with its path."""
    yield path, node
    for name, below in node.get("properties", {}).items():
        yield from walk(below, f"{path}.{name}")
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(node["additionalProperties"], f"{path}{{}}")


def defaulted(node, value):
    """What the API server makes of a value: defaults filled in, at every depth."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, below in node.get("properties", {}).items():
            if name not in filled and "default" in below:
                filled[name] = below["default"]
            if name in filled:
                filled[name] = defaulted(below, filled[name])
        return filled
    if isinstance(value, list):
        return [defaulted(node["items"], item) for item in value]
    return value


def json_schema(node):
    """The part of a structural schema that a JSON Schema validator knows; strings are not numbers."""
    return json.loads(json.dumps(node))


@pytest.mark.parametrize("folder", ["crds", "charts/dp-operator/files"])
def test_the_committed_crd_is_what_the_types_say(folder):
    assert (ROOT / folder / NAME).read_text() == crd.text(), (
        f"stale: cd operator && python -m dp_operator.crd ../crds/{NAME} ../charts/dp-operator/files/{NAME}"
    )


def test_every_list_string_and_map_is_bounded(schema):
    unbounded = []
    for path, node in walk(schema):
        opaque = node.get("x-kubernetes-preserve-unknown-fields")
        if node.get("type") == "array" and "maxItems" not in node:
            unbounded.append(path)
        text = node.get("type") == "string" or "x-kubernetes-int-or-string" in node
        if text and not {"maxLength", "enum", "format"} & node.keys() and path not in {".apiVersion", ".kind"}:
            unbounded.append(path)
        if "additionalProperties" in node and "maxProperties" not in node and not opaque:
            unbounded.append(path)
    assert unbounded == []


def test_every_spec_number_is_bounded(schema):
    open_numbers = [
        path
        for path, node in walk(schema["properties"]["spec"])
        if node.get("type") == "integer" and not {"minimum", "maximum"} <= node.keys()
    ]
    assert open_numbers == []


def test_no_quantity_or_share_can_be_negative(schema):
    numbers = [(path, node) for path, node in walk(schema) if "x-kubernetes-int-or-string" in node]
    assert any(path.endswith(".sharedMemory") for path, _ in numbers)
    for path, node in numbers:
        assert not jsonschema.Draft202012Validator(node).is_valid(-1), path
        assert not jsonschema.Draft202012Validator(node).is_valid("-1"), path


def test_nothing_is_nullable_and_nothing_refers_elsewhere(schema):
    text = json.dumps(schema)
    assert "nullable" not in text
    assert "$ref" not in text
    assert '"null"' not in text
    assert "null" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", text)


def test_every_node_has_a_type_and_only_opaque_objects_are_open(schema):
    for path, node in walk(schema):
        if "x-kubernetes-int-or-string" in node:
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "pattern" in node, path
            continue
        assert "type" in node, path
        if node["type"] == "object":
            kinds = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & node.keys()
            partly_typed = kinds == {"properties", "x-kubernetes-preserve-unknown-fields"} and "emplate" in path
            assert len(kinds) == 1 or partly_typed, path


def test_names_are_camel_case_and_enums_too(schema):
    for path, node in walk(schema):
        for name in node.get("properties", {}):
            assert re.fullmatch(r"[a-z][A-Za-z]*", name), f"{path}.{name}"
        for value in node.get("enum", []):
            assert re.fullmatch(r"[A-Z][A-Za-z]*", value), f"{path}: {value}"


def test_a_field_with_a_default_is_not_required_and_its_default_is_valid(schema):
    for path, node in walk(schema):
        for name, below in node.get("properties", {}).items():
            if "default" in below:
                assert name not in node.get("required", []), f"{path}.{name}"
                jsonschema.validate(defaulted(below, below["default"]), json_schema(below))


def test_lists_merge_by_key_only_where_an_item_has_one(schema):
    keyed = {}
    for path, node in walk(schema):
        if node.get("type") != "array":
            continue
        kind = node["x-kubernetes-list-type"]
        if kind == "map":
            (key,) = node["x-kubernetes-list-map-keys"]
            assert key in node["items"]["required"], path
            keyed[path] = key
        else:
            assert kind == "atomic", path
    inside = {
        f".{template}.spec.{path}": key
        for template in ("template", "headTemplate")
        for path, key in {
            "containers": "name",
            "containers[].env": "name",
            "containers[].volumeMounts": "mountPath",
            "initContainers": "name",
            "volumes": "name",
        }.items()
    }
    assert keyed == {f".spec{path}": key for path, key in inside.items()} | {
        ".spec.engine.env": "name",
        ".spec.service.ports": "port",
        ".status.conditions": "type",
        ".status.groups": "incarnation",
    }


SMALLEST = {
    "model": {"name": "m", "architecture": "MoE"},
    "engine": {"image": "i"},
    "dataParallel": {"size": 2},
    "devices": {"assignment": "None"},
}


def test_the_api_servers_defaults_are_the_operators(schema):
    filled = defaulted(schema["properties"]["spec"], SMALLEST)
    assert msgspec.convert(filled, api.Spec) == msgspec.convert(SMALLEST, api.Spec)


def test_every_defaulted_field_is_shown_to_the_user(schema):
    filled = defaulted(schema["properties"]["spec"], SMALLEST)
    assert filled["failurePolicy"]["unhealthySeconds"] == 60
    assert filled["engine"]["resources"] == {"requests": {}, "limits": {}}
    assert "maxRestarts" not in filled["failurePolicy"]


def test_a_full_status_of_the_operator_fits_the_schema(schema):
    failure = api.Failure(
        reason="EngineExited",
        time="2026-01-01T00:00:00Z",
        charged=False,
        incarnation="b2c3d",
        rank=3,
        pod="p",
        node="n",
        exit_code=1,
        signal="SIGKILL",
        message="m",
        first_error_lines="e",
        log_tail="t",
    )
    group = api.GroupStatus(
        incarnation="b2c3d",
        index=0,
        revision="r",
        state="Waiting",
        stages=api.Stages(arrived="0-3"),
        restarts=2,
        next_attempt_at="2026-01-01T00:00:00Z",
        restart_token="x",
        last_failures=[failure],
    )
    condition = api.Condition(
        type="Ready",
        status="False",
        reason="RanksMissing",
        message="m",
        last_transition_time="2026-01-01T00:00:00Z",
        observed_generation=1,
    )
    status = api.Status(
        observed_generation=1, replicas=1, ranks=api.Ranks(expected=8), groups=[group], conditions=[condition]
    )
    node = schema["properties"]["status"]
    stored = defaulted(node, msgspec.to_builtins(status))
    jsonschema.validate(stored, json_schema(node))
    assert msgspec.convert(stored, api.Status) == status


def test_no_field_of_the_types_is_missing_from_the_schema(schema):
    def missing(kind, node, path):
        for field in msgspec.structs.fields(kind):
            below = node["properties"].get(field.encode_name)
            if below is None:
                yield f"{path}.{field.encode_name}"
            elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                yield from missing(field.type, below, f"{path}.{field.encode_name}")

    assert list(missing(api.Spec, schema["properties"]["spec"], "spec")) == []
    assert list(missing(api.Status, schema["properties"]["status"], "status")) == []


def test_every_field_says_what_it_is_for_and_none_that_is_gone(schema):
    fields = {
        path.removeprefix("."): node for path, node in walk(schema) if re.match(r"\.(spec|status)\..*[a-zA-Z]$", path)
    }
    assert [path for path, node in fields.items() if not node.get("description")] == []
    assert [path for path in DESCRIPTIONS if path not in fields] == []
    assert [path for path, text in DESCRIPTIONS.items() if fields[path]["description"] != text] == []


def test_every_rule_blames_a_field_that_exists_and_says_what_to_write(schema):
    paths = {path for path, _ in walk(schema["properties"]["spec"])}
    for rule in rules.RULES:
        assert rule.field in paths, rule.message
        assert re.search(r"\b(write|leave)\b", rule.message), rule.message
        assert len(rule.message) <= 2048
        assert "\n" not in rule.cel + rule.message


def test_a_union_that_no_structural_schema_has_is_refused():
    with pytest.raises(TypeError, match="no union"):
        crd._schema(msgspec.inspect.type_info(int | list[int]), at="spec")


def test_a_type_that_no_structural_schema_has_is_refused():
    with pytest.raises(TypeError, match="structural schema has no"):
        crd._schema(msgspec.inspect.type_info(float), at="spec")


def test_the_command_prints_and_writes_the_same_text(tmp_path, capsys):
    crd.main([])
    crd.main([str(tmp_path / "crd.yaml")])
    assert capsys.readouterr().out == (tmp_path / "crd.yaml").read_text() == crd.text()
