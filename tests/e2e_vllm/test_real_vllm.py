"""Groups of real vLLM, from the custom resource that a user writes to the last object gone."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.e2e.kube import API_PORT, Film, Object, Space, condition, until
from tests.e2e_vllm.conftest import Vllm

# Alone on two cores a group starts in half a minute; other programs may use them too.
START_S = 300
RANKS = (0, 1)
INSTALLED = "0.32.0+cpu"
TOO_OLD = "0.11.0.post2"  # the environment has its Python files, which is all that tells a version


class Mode(NamedTuple):
    kind: str
    data_parallel: Object
    version: str | None  # what the user says of the image: the truth, something wrong, nothing
    said: str  # about the version in the end

    @property
    def external(self) -> bool:
        return self.data_parallel.get("loadBalancing") == "External"


FOUND = f"vLLM {INSTALLED}, found in the image"
MODES = {
    "internal-colocated": Mode("Dense", {}, "0.32", FOUND),
    "internal-dedicated": Mode(
        "Dense", {"headPlacement": "Dedicated"}, "0.17", f"{FOUND}; engine.version says 0.17, the image decides"
    ),
    "external-moe": Mode("MoE", {"loadBalancing": "External"}, None, FOUND),
}


def pods_by_rank(space: Space, name: str) -> dict[int, str]:
    """The pod that has each of two ranks: they are never in the same one."""
    workers = sorted(space.pods(name, role="worker"))
    pods = workers if len(workers) == len(RANKS) else [space.head(name)["metadata"]["name"], *workers]
    return dict(zip(RANKS, pods, strict=True))


def answered(space: Space, pod: str) -> dict[int, int]:
    """Finished requests by rank, as the metrics of this pod's vLLM count them."""
    page = space.cluster.raw("GET", f"{space.path('pods', pod)}:{API_PORT}/proxy/metrics").decode()
    found: dict[int, int] = {}
    for rank, count in re.findall(r'^vllm:request_success_total{engine="(\d+)".*} ([\d.e+]+)$', page, re.MULTILINE):
        found[int(rank)] = found.get(int(rank), 0) + int(float(count))
    return found


def every_rank_answers(space: Space, name: str, mode: Mode) -> None:
    """Each rank is asked by its own pod's API, or by name where one API serves them all; it counts what it answers."""
    head = space.head(name)["metadata"]["name"]
    for rank, pod in pods_by_rank(space, name).items():
        api = pod if mode.external else head
        before = answered(space, api).get(rank, 0)
        answer = space.cluster.call(
            "POST",
            f"{space.path('pods', api)}:{API_PORT}/proxy/v1/completions",
            {"model": "example/tiny", "prompt": "Say something.", "max_tokens": 5, "ignore_eos": True},
            headers={} if mode.external else {"X-data-parallel-rank": str(rank)},
            timeout_s=60,
        )
        assert answer["usage"]["completion_tokens"] == 5
        assert answered(space, api)[rank] == before + 1


def in_engine(space: Space, pod: str, script: str) -> str:
    return space.kubectl("exec", pod, "-c", "engine", "--", "sh", "-c", script)


def kill_rank(space: Space, pod: str, rank: int) -> None:
    """SIGKILL for the process of one rank and for nothing else in its pod."""
    # Command lines that begin with the title that vLLM gives the process: this shell's has it inside.
    find = f"grep -lz '^VLLM::EngineCore_DP{rank}' /proc/[0-9]*/cmdline"
    script = f"for p in $({find}); do p=${{p#/proc/}}; kill -9 ${{p%/cmdline}} && echo killed; done"
    assert in_engine(space, pod, script) == "killed\n"


def groups_of(film: Film) -> list[Any]:
    return [group for frame in film.frames for group in frame.get("status", {}).get("groups", [])]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_real_vllm_starts_serves_from_every_rank_is_replaced_as_a_group_and_goes(
    vllm: Vllm, space: Space, mode: Mode
) -> None:
    manifest = vllm.deployment("real", mode.kind, version=mode.version, dataParallel=mode.data_parallel)
    with Film(space, "dataparalleldeployments") as film:
        uid = space.create(manifest)["metadata"]["uid"]
        status = space.until_ready("real", within_s=START_S)
    assert status["ranks"]["summary"] == "2/2"
    first = pods_by_rank(space, "real")
    seen = [group.get("waitingFor", "") for group in groups_of(film)]
    for rank, pod in first.items():
        named = re.compile(rf"not (connected|loaded|ready): .*\branks? {rank} \(pod {pod} on n\d\)")
        assert any(named.search(line) for line in seen), f"rank {rank} was never named as missing: {seen}"
    the_version_is_found_in_the_image(space, film, status, mode)
    every_rank_answers(space, "real", mode)

    before = space.group("real")
    kill_rank(space, first[1], 1)
    group = space.until_replaced("real", before, within_s=START_S)
    (failure,) = group["lastFailures"]
    assert (failure["rank"], failure["pod"], failure["charged"]) == (1, first[1], True), failure
    assert failure["reason"] == "EngineExited", failure
    assert group["restarts"] == 1
    assert not set(first.values()) & set(space.pods("real"))
    space.until_ready("real")
    every_rank_answers(space, "real", mode)

    space.delete("dataparalleldeployments", "real")
    until("nothing is left", lambda: space.leftovers(uid), lambda left: not left, within_s=60)


def the_version_is_found_in_the_image(space: Space, film: Film, status: Object, mode: Mode) -> None:
    """Status tells the true version, and the command line is that version's, whatever the spec says."""
    assert space.group("real")["engineVersion"] == INSTALLED
    assumed = condition(status, "VersionAssumed")
    assert (assumed["status"], assumed["message"]) == ("False", mode.said)
    before = [
        condition(frame["status"], "VersionAssumed")["status"]
        for frame in film.frames
        if "conditions" in frame.get("status", {})
    ]
    assert ("True" in before) == (mode.version is None), before
    for pod in space.pods("real"):
        # Since 0.18: had the spec's version decided, the group that says 0.17 would not have it.
        assert "--shutdown-timeout 5 " in in_engine(space, pod, r"tr '\0' ' ' </proc/1/cmdline")


def test_an_image_whose_vllm_is_too_old_for_the_spec_is_refused_in_words_before_it_loads(
    vllm: Vllm, space: Space
) -> None:
    shape = {"headPlacement": "Dedicated"}
    old = vllm.root / "releases" / TOO_OLD
    with Film(space, "dataparalleldeployments") as film:
        space.create(vllm.deployment("old", "Dense", python_path=(old,), dataParallel=shape))
        status = until(
            "the spec is refused",
            lambda: space.status("old"),
            lambda status: condition(status, "Accepted")["status"] == "False",
            within_s=120,
        )
    assert "0.14" in condition(status, "Accepted")["message"]
    (version,) = {group["engineVersion"] for group in groups_of(film) if group.get("engineVersion")}
    assert version == f"{TOO_OLD}+cpu"
    group = space.group("old")
    (failure,) = group["lastFailures"]
    assert (failure["reason"], failure["charged"]) == ("EngineTooOld", False), failure
    assert TOO_OLD in failure["logTail"]

    right = vllm.deployment("old", "Dense", dataParallel=shape)["spec"]["engine"]["env"]
    space.spec("old", engine={"env": right})
    until(
        "the group of another image is tried",
        lambda: space.group("old"),
        lambda group: group.get("engineVersion") == INSTALLED,
        within_s=120,
    )
