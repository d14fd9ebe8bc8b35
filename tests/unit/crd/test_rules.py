"""The Python side of the rules, over the same table of objects that the API server is asked about."""

import copy
from pathlib import Path

import msgspec
import pytest
import yaml

from dp_operator import api, rules

DATA = Path(__file__).parents[2] / "apiserver" / "data"
REFUSED = [case for case in yaml.safe_load((DATA / "refused.yaml").read_text()) if case["by"] == "rule"]
ACCEPTED = yaml.safe_load((DATA / "accepted.yaml").read_text())


def refusals(case):
    spec = {
        "model": {"name": "m", "architecture": "Dense"},
        "engine": {"image": "i"},
        "dataParallel": {"size": 8},
        "devices": {"assignment": "None"},
    }
    for path, value in copy.deepcopy(case.get("set") or {}).items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return rules.refusals(name=case.get("name", "qwen"), spec=msgspec.convert(spec, api.Spec))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["why"])
def test_the_operator_refuses_what_the_api_server_refuses(case):
    said = [refusal.replace(": ", ": Forbidden: ", 1) for refusal in refusals(case)]
    assert any(case["says"] in refusal for refusal in said), said


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["why"])
def test_the_operator_accepts_what_the_api_server_accepts(case):
    assert refusals(case) == []


def test_every_rule_has_an_object_that_breaks_it():
    broken = {refusal for case in REFUSED for refusal in refusals(case)}
    untried = [rule for rule in rules.RULES if f"spec{rule.field}: {rule.message}" not in broken]
    assert untried == []
