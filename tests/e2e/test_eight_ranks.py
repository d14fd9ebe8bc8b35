"""The demo's group, 8 ranks on fixed device slots, brought up once and looked at by every test of this module."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.e2e.kube import LABELS, Audit, Call, Space, condition, dpd, identities, until

NAME = "eight"


class Eight(NamedTuple):
    space: Space
    uid: str
    writes: list[Call]  # of the operator from creation until shortly after Ready
    took_s: float


@pytest.fixture(scope="module")
def eight(shared_space: Space, audit: Audit) -> Eight:
    mark, began = audit.mark(), time.monotonic()
    manifest = dpd(
        NAME,
        size=8,
        dataParallel={"apiServerCount": 2},
        devices={"assignment": "Slots", "perNode": 4},
    )
    uid = shared_space.create(manifest)["metadata"]["uid"]
    shared_space.kubectl("wait", "--for=condition=Ready", f"dpd/{NAME}", "--timeout=120s", timeout_s=130)
    took_s = time.monotonic() - began
    time.sleep(3)  # a write too many would come now
    writes = [call for call in audit.writes(mark) if call.namespace == shared_space.name]
    return Eight(shared_space, uid, writes, took_s)


def test_kubectl_wait_returns_when_all_eight_ranks_are_ready(eight: Eight) -> None:
    status = eight.space.status(NAME)
    assert condition(status, "Ready")["status"] == "True"
    assert status["ranks"] == {
        "expected": 8, "arrived": 8, "connected": 8, "loaded": 8, "ready": 8, "summary": "8/8"
    }  # fmt: skip
    (group,) = status["groups"]
    assert group["stages"] == dict.fromkeys(("arrived", "connected", "loaded", "ready"), "0-7")
    assert group["headPod"] == eight.space.head(NAME)["metadata"]["name"]


def test_a_create_costs_one_write_per_object_and_at_most_eight_status_writes(eight: Eight) -> None:
    made = Counter(call.resource for call in eight.writes if call.verb == "create" and call.resource != "events")
    assert made == {
        "services": 2,
        "configmaps": 1,
        "poddisruptionbudgets": 1,
        "networkpolicies": 1,
        "statefulsets": 4,
        "pods": 1,
    }
    statuses = [call.at for call in eight.writes if call.resource == "dataparalleldeployments/status"]
    # Four that matter (begun, created, released, serving), and progress every 2.5 s while a busy machine takes longer.
    assert 4 <= len(statuses) <= max(8, 4 + eight.took_s / 2.5)
    assert len([call for call in eight.writes if call.resource == "events"]) <= 1
    assert len(eight.writes) == made.total() + len(statuses) + 1, [
        call for call in eight.writes if call.verb != "create"
    ]
    gaps = [later - earlier for earlier, later in pairwise(statuses)]
    assert min(gaps) > 0.95, gaps


def test_each_container_sees_its_own_device_and_no_node_gives_one_twice(eight: Eight) -> None:
    pods = eight.space.pods(NAME)
    with ThreadPoolExecutor(4) as pool:
        seen = pool.map(
            lambda name: eight.space.kubectl("exec", name, "-c", "engine", "--", "printenv", "CUDA_VISIBLE_DEVICES"),
            pods,
        )
    devices = dict(zip(pods, (text.strip() for text in seen), strict=True))
    places = Counter((pods[name]["spec"]["nodeName"], device) for name, device in devices.items())
    assert len(places) == 8
    assert set(places.values()) == {1}
    assert Counter(devices.values()) == {"0": 2, "1": 2, "2": 2, "3": 2}
    for name, device in devices.items():
        assert name.endswith("-head") or f"-s{device}-" in name


def test_completions_are_served_by_every_rank(eight: Eight) -> None:
    answers = eight.space.complete_many(NAME, 32)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 32
    served = eight.space.served(NAME)
    assert sum(served.values()) == 32
    assert set(served) == set(range(8))
    assert all(served.values()), served


def test_the_service_sends_clients_to_the_head_only(eight: Eight) -> None:
    (slice_,) = eight.space.find("endpointslices", f"kubernetes.io/service-name={NAME}")
    ready = [
        address
        for endpoint in slice_["endpoints"]
        if endpoint["conditions"]["ready"]
        for address in endpoint["addresses"]
    ]
    assert ready == [eight.space.head(NAME)["status"]["podIP"]]


def test_kubectl_get_shows_groups_and_ranks_in_columns(eight: Eight) -> None:
    titles, values = (line.split() for line in eight.space.kubectl("get", "dpd").splitlines())
    row = dict(zip(titles, values, strict=True))
    assert row.pop("AGE")
    assert row == {"NAME": NAME, "READY": "True", "GROUPS": "1", "SERVING": "1", "RANKS": "8/8"}


@pytest.mark.parametrize("plural", ["services", "poddisruptionbudgets", "networkpolicies"])
def test_what_somebody_deletes_beside_the_pods_is_back_within_ten_seconds(eight: Eight, plural: str) -> None:
    space = eight.space
    pods = identities(space.pods(NAME))
    before = {item["metadata"]["name"]: item for item in space.find(plural, f"{LABELS}/uid={eight.uid}")}
    assert before
    for name in before:
        space.delete(plural, name)

    def back() -> Any:
        return {item["metadata"]["name"]: item for item in space.find(plural, f"{LABELS}/uid={eight.uid}")}

    after = until(
        f"{plural} {list(before)} are there again", back, lambda found: set(found) == set(before), within_s=10
    )
    for name, item in before.items():
        assert after[name]["metadata"]["uid"] != item["metadata"]["uid"]
        if plural == "services" and name != NAME:
            # Launch plans name this address; with another one no worker would find its monitor.
            assert after[name]["spec"]["clusterIP"] == item["spec"]["clusterIP"]
    assert identities(space.pods(NAME)) == pods
    assert condition(space.status(NAME), "Ready")["status"] == "True"


def test_a_service_whose_selector_was_edited_is_set_right(eight: Eight) -> None:
    space = eight.space
    before = space.get("services", NAME)
    space.merge("services", NAME, {"spec": {"selector": {f"{LABELS}/role": "worker", f"{LABELS}/uid": None}}})
    after = until(
        "the selector is what it was",
        lambda: space.get("services", NAME),
        lambda service: service["spec"]["selector"] == before["spec"]["selector"],
        within_s=10,
    )
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_deleting_the_resource_leaves_nothing(eight: Eight) -> None:
    space = eight.space
    assert len(space.leftovers(eight.uid)) == 8 + 4 + 2 + 1 + 1 + 1
    space.delete("dataparalleldeployments", NAME)
    until("nothing is left", lambda: space.leftovers(eight.uid), lambda left: not left, within_s=40)
