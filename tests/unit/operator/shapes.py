"""Random valid specs of every mode, and the versions that are looked at."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dp_operator import api
from tests.unit.operator.world import resource

# One release of each family that takes other command lines than the one before.
VERSIONS = ("0.11.0", "0.14.0", "0.17.1", "0.20.2", "0.22.0", "0.28.0", "0.32.0", "0.33.0")


@st.composite
def specs(draw: st.DrawFn, *, modes: tuple[str, ...] = ("Internal", "Hybrid", "External")) -> api.Spec:
    """A spec that the API server would accept."""
    mode = draw(st.sampled_from(modes))
    architecture = "MoE" if mode == "External" else draw(st.sampled_from(["Dense", "MoE"]))
    local = draw(st.sampled_from([2, 3, 4, 8] if mode == "Hybrid" else [1, 2, 3, 4, 8]))
    least = 2 if mode == "Hybrid" or (mode == "External" and local == 1) else 1
    parallel: dict[str, Any] = {
        "size": local * draw(st.integers(least, 24)),
        "sizeLocal": local,
        "loadBalancing": mode,
    }
    if mode == "Internal" and architecture == "Dense" and parallel["size"] >= 2 and draw(st.booleans()):
        parallel["headPlacement"] = "Dedicated"
    if draw(st.booleans()) and not (mode == "External" and local > 1):
        parallel["apiServerCount"] = draw(st.integers(1, 8))
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    devices: dict[str, Any] = {"assignment": draw(st.sampled_from(["None", "DevicePlugin", "Slots"]))}
    width = local * tensor * pipeline
    if devices["assignment"] == "Slots":
        devices["perNode"] = width * draw(st.integers(1, max(1, 64 // width)))
    return resource(
        model={"name": "m", "architecture": architecture},
        dataParallel=parallel,
        devices=devices,
        tensorParallelSize=tensor,
        pipelineParallelSize=pipeline,
        enableExpertParallel=architecture == "MoE" and draw(st.booleans()),
    ).spec
