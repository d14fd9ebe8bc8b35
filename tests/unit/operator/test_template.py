"""The user's template over what is rendered: merged by name, the user wins."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dp_operator.render.template import merge


def test_containers_are_merged_by_name_and_new_ones_come_last():
    base = {"containers": [{"name": "engine", "image": "a"}]}
    overlay = {"containers": [{"name": "sidecar", "image": "b"}, {"name": "engine", "tty": True}]}
    assert merge(base, overlay) == {
        "containers": [{"name": "engine", "image": "a", "tty": True}, {"name": "sidecar", "image": "b"}]
    }


def test_a_variable_has_one_source_so_the_overlays_takes_the_place_of_ours():
    base = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    overlay = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    assert merge(base, overlay) == {"env": [overlay["env"][0], {"name": "B", "value": "2"}]}


def test_a_volume_has_one_source_too():
    base = {"volumes": [{"name": "cache", "emptyDir": {}}]}
    overlay = {"volumes": [{"name": "cache", "hostPath": {"path": "/cache"}}]}
    assert merge(base, overlay) == overlay


def test_mounts_are_told_apart_by_path_and_ports_by_number_and_protocol():
    base = {
        "volumeMounts": [{"name": "a", "mountPath": "/a"}],
        "ports": [{"name": "api", "containerPort": 8000}],
    }
    overlay = {
        "volumeMounts": [{"name": "a", "mountPath": "/b"}],
        "ports": [
            {"containerPort": 8000, "protocol": "TCP", "hostPort": 8000},
            {"containerPort": 8000, "protocol": "UDP"},
        ],
    }
    assert merge(base, overlay) == {
        "volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/b"}],
        "ports": [
            {"name": "api", "containerPort": 8000, "protocol": "TCP", "hostPort": 8000},
            {"containerPort": 8000, "protocol": "UDP"},
        ],
    }


def test_tolerations_and_anti_affinity_terms_add_up():
    """The terms of device slots must survive the user's own, or two pods share a device.

    vllm PR#53743, #54694, #22677, #44556.
    """
    ours = {"topologyKey": "kubernetes.io/hostname"}
    theirs = {"topologyKey": "zone"}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    merged = merge(
        {"affinity": {"podAntiAffinity": {required: [ours]}}, "tolerations": [{"key": "a"}]},
        {"affinity": {"podAntiAffinity": {required: [theirs]}}, "tolerations": [{"key": "b"}]},
    )
    assert merged["affinity"]["podAntiAffinity"][required] == [ours, theirs]
    assert merged["tolerations"] == [{"key": "a"}, {"key": "b"}]


def test_lists_of_words_are_replaced_as_a_whole():
    assert merge({"command": ["a", "b"]}, {"command": ["c"]}) == {"command": ["c"]}


def test_a_null_removes_a_field():
    assert merge({"securityContext": {"runAsUser": 1}, "a": 1}, {"securityContext": None}) == {"a": 1}


trees: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.booleans()),
    lambda below: st.one_of(
        st.dictionaries(st.sampled_from(["spec", "metadata", "labels", "a", "b"]), below, max_size=3),
        st.lists(below, max_size=3),
    ),
    max_leaves=12,
)
named = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["engine", "x", "y"])}, optional={"image": st.text(max_size=2)}),
    max_size=3,
    unique_by=lambda item: item["name"],
)
templates = st.fixed_dictionaries(
    {"metadata": st.dictionaries(st.sampled_from(["labels", "annotations"]), trees, max_size=2)},
    optional={"spec": st.fixed_dictionaries({"containers": named, "volumes": named}, optional={"a": trees})},
)


@given(templates)
def test_an_empty_template_changes_nothing(base):
    assert merge(base, {}) == base


@given(templates, templates)
def test_what_the_user_wrote_is_in_the_result_and_neither_side_is_touched(base, overlay):
    before = copy.deepcopy((base, overlay))
    merged = merge(base, overlay)
    assert (base, overlay) == before
    for field in ("containers", "volumes"):
        for item in overlay.get("spec", {}).get(field, []):
            found = next(other for other in merged["spec"][field] if other["name"] == item["name"])
            assert item.items() <= found.items()


@given(templates, templates)
def test_laying_it_over_twice_is_laying_it_over_once(base, overlay):
    once = merge(base, overlay)
    assert merge(once, overlay) == once


@given(templates, templates)
def test_names_stay_unique(base, overlay):
    for field in ("containers", "volumes"):
        names = [item["name"] for item in merge(base, overlay).get("spec", {}).get(field, [])]
        assert len(names) == len(set(names))
