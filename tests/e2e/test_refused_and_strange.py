"""What the operator does not take: resources that make no sense, and objects that are somebody else's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.kube import RefusedError, Space, condition, dpd, until


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataParallel": {"sizeLocal": 3}}, "write a sizeLocal that divides size"),
        ({"engine": {"args": ["--data-parallel-size", "4"]}}, "a flag the operator owns"),
        ({"template": {"spec": {"restartPolicy": "Always"}}}, "the operator decides restartPolicy"),
    ],
)
def test_a_resource_that_makes_no_sense_is_refused_with_what_to_write_instead(
    space: Space, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        space.create(dpd("wrong", size=4, **changes))
    assert refused.value.status == 422
    assert message in refused.value.message


def test_a_service_of_the_same_name_is_left_alone_and_reported(space: Space) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"selector": {"app": "something-else"}, "ports": [{"port": 80}]},
    }
    before = space.create(stranger, "services")
    space.create(dpd("taken", size=1, replicas=0))
    stalled = until(
        "Stalled says whose the name is",
        lambda: condition(space.status("taken"), "Stalled"),
        lambda found: found["status"] == "True",
        within_s=10,
    )
    assert stalled["reason"] == "NameTaken"
    assert "Service taken: an object of this name exists that is not ours" in stalled["message"]
    after = space.get("services", "taken")
    assert after == before
    space.delete("dataparalleldeployments", "taken")
    until("the deployment is gone", lambda: space.find("dataparalleldeployments"), lambda x: not x, within_s=10)
    assert space.get("services", "taken") == before
