from pathlib import Path

import pytest
import yaml

DATA = Path(__file__).parent / "data"
REFUSED = yaml.safe_load((DATA / "refused.yaml").read_text())
ACCEPTED = yaml.safe_load((DATA / "accepted.yaml").read_text())


def at(spec, path):
    for part in path.split("."):
        spec = spec.get(part) if spec is not None else None
    return spec


def test_the_crd_is_structural_and_its_names_are_accepted(crd):
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["why"])
def test_an_invalid_object_is_refused_with_what_to_write_instead(trial, case):
    assert case["says"] in trial.refusal(case)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["why"])
def test_a_valid_object_is_accepted_with_its_defaults(trial, case):
    spec = trial.create(case, dry_run=True)["spec"]
    wanted = case.get("then") or {}
    assert {path: at(spec, path) for path in wanted} == wanted


def test_an_update_is_held_to_the_same_rules(dpds):
    dpds.create({})
    with pytest.raises(Exception, match=r"spec.engine.args: Forbidden: .*write spec.engine.port"):
        dpds.merge("qwen", {"spec": {"engine": {"args": ["--port=1"]}}})
