"""Names fit, ids are safe, and revisions move only when pods must."""

from __future__ import annotations

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dp_operator import api, naming, versions
from tests.unit.operator.world import resource


@given(st.binary(min_size=8, max_size=32))
def test_ids_are_labels_of_fixed_length(seed):
    assert re.fullmatch(rf"[a-z0-9]{{{naming.INCARNATION_LENGTH}}}", naming.incarnation_id(seed))


def test_the_longest_names_fit_their_limits():
    base = naming.base_name("x" * naming.NAME_MAX, 63, "abcde")
    largest_set = naming.worker_set_name(base, 63)
    assert len(largest_set) <= 52, "the StatefulSet controller appends a hash for a label of at most 63"
    assert len(f"{largest_set}-4095") <= 63
    assert len(naming.rpc_service_name(base)) <= 63


def test_spelt_out_defaults_and_fields_outside_change_no_revision():
    plain = resource().spec
    full = msgspec.convert(msgspec.json.decode(_with_all_defaults(plain)), api.Spec)
    assert naming.revision(plain) == naming.revision(full)
    outside = resource(replicas=5, startup={"timeoutSeconds": 60}, rollout={"maxUnavailable": 1}).spec
    assert naming.revision(plain) == naming.revision(outside)


def _with_all_defaults(spec: api.Spec) -> bytes:
    """The spec as the API server returns it, with every schema default filled in."""

    def fill(value: object) -> object:
        if isinstance(value, msgspec.Struct):
            items = {f.encode_name: getattr(value, f.name) for f in msgspec.structs.fields(value)}
            return {name: fill(item) for name, item in items.items() if item is not None}
        if isinstance(value, list):
            return [fill(item) for item in value]
        return value

    return msgspec.json.encode(fill(spec))


def test_whatever_needs_new_pods_changes_the_revision():
    base = naming.revision(resource().spec)
    for change in (
        {"engine": {"image": "other:1"}},
        {"engine": {"image": "vllm/vllm-openai:v0.32.0", "args": ["--seed", "1"]}},
        {"dataParallel": {"size": 8}},
        {"drain": {"timeoutSeconds": 5}},
        {"tensorParallelSize": 2},
    ):
        assert naming.revision(resource(**change).spec) != base, change


def test_only_vllm_images_tell_vllms_version_by_their_tag():
    tells = {
        "vllm/vllm-openai:v0.32.0": "0.32.0",
        "registry.example:5000/vllm/vllm-openai:v0.11.2": "0.11.2",
        "vllm/vllm-openai:v0.32.0-x86_64": "0.32.0",
        "vllm/vllm-openai:v0.11.0.post2": "0.11.0",
        "ghcr.io/org/vllm-cpu:0.32.0-cpu": "0.32.0",
        "vllm/vllm-openai-rocm:v0.18.1": "0.18.1",
        "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0": "0.32.0",
        "public.ecr.aws/q9t5s3a7/vllm-arm64-cpu-release-repo:v0.16.0": "0.16.0",
        "vllm/vllm-omni:v0.16.0": None,
        "vllm/vllm-tpu:v0.13.2": None,
        "me/vllm-cpu-tools:1.2.3": None,
        "registry.example/vllm-openai-wrapper:2.1.0": None,
        "my-vllm-openai:0.32.0": None,
        "vllm/vllm-openai:nightly": None,
        "vllm/vllm-openai:latest": None,
        "vllm/vllm-openai": None,
        "vllm/vllm-openai@sha256:abc": None,
        "vllm/vllm-openai:v0.32.0@sha256:abc": "0.32.0",
        "registry.example:5000/team/server": None,
        "team/llm-server:0.32.0": None,
        "localhost/dp-engine:dev": None,
    }
    assert {image: versions.from_image(image) for image in tells} == tells
