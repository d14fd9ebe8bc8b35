"""Which devices each rank really gets, after vLLM's own slicing, whatever the version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dp_engine import devices as engine_devices
from dp_engine.versions import wire_of
from dp_operator import render, rules, slicing
from dp_operator.render import Incarnation, devices
from tests.unit.operator.shapes import VERSIONS, specs
from tests.unit.operator.world import SETTINGS, resource

ENV_NAMES = {
    "CUDA_VISIBLE_DEVICES": "cuda",
    "ZE_AFFINITY_MASK": "xpu",
    "TPU_VISIBLE_CHIPS": "tpu",
    "ASCEND_RT_VISIBLE_DEVICES": "ascend",
    "CPU_VISIBLE_MEMORY_NODES": "cpu",
}


def pods_by_slot(spec) -> dict[int, dict[str, int]]:
    """Slot -> worker pods in it and their first ranks; the head is in slot 0."""
    slots = spec.devices.per_node // render.devices_per_pod(spec)
    found: dict[int, dict[str, int]] = {}
    if render.head_ranks(spec):
        found.setdefault(0, {})["head"] = 0
    for pod, first in render.worker_pods(spec, "x").items():
        found.setdefault(first // spec.data_parallel.size_local % slots, {})[pod] = first
    return found


@given(specs(), st.sampled_from(VERSIONS), st.sampled_from(sorted(ENV_NAMES)))
def test_no_two_ranks_of_a_node_share_a_device_and_each_has_its_width(spec, version, env_name):
    """A wrong list is a wrong GPU or "invalid device ordinal".

    vllm PR#53743, #54694, #22677, #44556, PR#41164.
    """
    assume(spec.devices.assignment == "Slots")
    world = render.devices_per_rank(spec)
    used: list[str] = []
    for slot in pods_by_slot(spec):
        visible = ",".join(str(index) for index in render.slot_devices(spec, slot))
        for local in range(spec.data_parallel.size_local):
            mine = slicing.seen_by_rank(visible, local_rank=local, world=world, version=version, env_name=env_name)
            numbers = [int(item) for item in mine]
            assert numbers == list(range(numbers[0], numbers[0] + world)), "contiguous"
            used += mine
    assert len(used) == len(set(used))
    assert all(0 <= int(device) < spec.devices.per_node for device in used)


@given(
    st.sampled_from(VERSIONS),
    st.sampled_from(sorted(ENV_NAMES)),
    st.lists(st.one_of(st.integers(0, 15).map(str), st.just("GPU-1f")), max_size=8),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_the_stand_in_engine_slices_the_same_way(version, env_name, items, local, world):
    visible = ",".join(items)
    platform = ENV_NAMES[env_name]

    def engine() -> Any:
        return list(
            engine_devices.of_rank(
                local_rank=local,
                world_size=world,
                platform=platform,
                env={env_name: visible},
                ids=None,
                wire=wire_of(version),
            )
        )

    def ours() -> Any:
        return slicing.seen_by_rank(visible, local_rank=local, world=world, version=version, env_name=env_name)

    def outcome(call: Any) -> Any:
        try:
            return call()
        except ValueError:
            return "refused"

    assert outcome(ours) == outcome(engine)


@given(specs())
def test_a_device_plugin_gives_each_pod_all_its_ranks_need_and_nothing_hides_them(spec):
    """A pod that sees one GPU as index 0 must not be told to use index 3: nvidia-container-toolkit#27."""
    assume(spec.devices.assignment == "DevicePlugin")
    inc = Incarnation(cr=resource_with(spec), group=0, id="abcde", revision="0123456789", settings=SETTINGS)
    width = spec.data_parallel.size_local * spec.tensor_parallel_size * spec.pipeline_parallel_size
    pods = [s["spec"]["template"]["spec"] for s in render.stateful_sets(inc)]
    if render.head_ranks(spec):
        pods.append(render.head_pod(inc)["spec"])
    for pod in pods:
        engine = pod["containers"][0]
        assert engine["resources"]["limits"][spec.devices.resource_name] == width
        assert not {item["name"] for item in engine["env"]} & set(rules.VISIBLE_DEVICES_ENV_NAMES)


def resource_with(spec):
    import msgspec

    return msgspec.structs.replace(resource(), spec=spec)


def slots_of(width: int, slot: int) -> tuple[set[int], dict[str, str], list[dict[str, Any]]]:
    """Devices, labels and anti-affinity terms of the pods of one slot."""
    per_node = 64 // width * width
    spec = resource(
        dataParallel={"size": width * 2, "sizeLocal": width}, devices={"assignment": "Slots", "perNode": per_node}
    ).spec
    terms: Any = devices.anti_affinity(spec, slot)
    return set(render.slot_devices(spec, slot)), devices.device_labels(spec, slot), terms


slot_places = st.integers(1, 64).flatmap(lambda width: st.tuples(st.just(width), st.integers(0, 64 // width - 1)))


@given(slot_places, slot_places)
def test_pods_of_any_two_widths_exclude_each_other_exactly_where_they_share_a_device(one, other):
    mine, _, (term,) = slots_of(*one)
    theirs, labels, _ = slots_of(*other)
    (expression,) = term["labelSelector"]["matchExpressions"]
    assert expression["operator"] == "In"
    assert (labels[expression["key"]] in expression["values"]) == bool(mine & theirs)


@given(slot_places)
def test_a_pod_that_waits_for_devices_has_one_term_only_so_that_any_pod_that_gives_some_back_wakes_it(place):
    """The scheduler looks again at a waiting pod when a pod goes that matches all of its anti-affinity terms."""
    _, _, terms = slots_of(*place)
    assert len(terms) == 1
    assert terms[0]["namespaceSelector"] == {}, "in every namespace"
    assert terms[0]["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.parametrize("env_name", [*sorted(ENV_NAMES), "HABANA_VISIBLE_DEVICES"])
def test_slots_name_the_devices_of_any_vendor(env_name):
    cr = resource(
        dataParallel={"size": 4, "sizeLocal": 2},
        devices={"assignment": "Slots", "perNode": 4, "visibleDevicesEnvName": env_name},
    )
    inc = Incarnation(cr=cr, group=0, id="abcde", revision="r", settings=SETTINGS)
    pods = [render.head_pod(inc)["spec"], *(s["spec"]["template"]["spec"] for s in render.stateful_sets(inc))]
    values = [next(e["value"] for e in pod["containers"][0]["env"] if e["name"] == env_name) for pod in pods]
    assert values == ["0,1", "2,3"]
