"""Every mode of docs/modes.md on the cluster: its example as it stands, and the same object with an older release.

A few groups at a time, because the examples take fixed device slots: one thread brings a group up, looks at it from all
sides and deletes it, and the tests judge what it saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dp_engine.versions import NEWEST
from dp_handshake.protocol import Stage
from tests.e2e.conftest import make_space
from tests.e2e.kube import Cluster, Space, condition, until

EXAMPLES = Path(__file__).parents[2] / "examples" / "modes"
SIDE_BY_SIDE = 3
SIZE = 4
ASKED_DIRECTLY = 3  # of each API server
HEAD, WORKER = "head", "worker"


class Mode(NamedTuple):
    """What docs/modes.md says of one mode. Examples have four ranks on the devices 0 to 3 of a node, rank r on device r."""

    example: str
    older: str  # release that is tried besides the newest
    head_ranks: int
    worker_ranks: int
    head_argv: tuple[str, ...]
    worker_argv: tuple[str, ...]
    serving: tuple[str, ...]
    ports: tuple[int, ...] = (8000,)


BALANCING = ("--headless", "--data-parallel-hybrid-lb", "--data-parallel-multi-port-external-lb")
PLACING = ("--data-parallel-size-local", "--data-parallel-start-rank", "--data-parallel-rank")

MODES = (
    Mode(
        "internal",
        older="0.17.1",
        head_ranks=2,
        worker_ranks=2,
        head_argv=("--data-parallel-size-local 2",),
        worker_argv=("--headless", "--data-parallel-size-local 2", "--data-parallel-start-rank 2"),
        serving=(HEAD,),
    ),
    Mode(
        "internal-dedicated",
        older="0.17.1",
        head_ranks=0,
        worker_ranks=2,
        head_argv=("--data-parallel-size-local 0",),
        worker_argv=("--headless", "--data-parallel-size-local 2", "--data-parallel-start-rank FIRST"),
        serving=(HEAD,),
    ),
    Mode(
        "hybrid",
        older="0.17.1",
        head_ranks=2,
        worker_ranks=2,
        head_argv=("--data-parallel-hybrid-lb", "--data-parallel-size-local 2", "--data-parallel-start-rank 0"),
        worker_argv=("--data-parallel-hybrid-lb", "--data-parallel-size-local 2", "--data-parallel-start-rank 2"),
        serving=(HEAD, WORKER),
    ),
    Mode(
        "external",
        older="0.17.1",
        head_ranks=1,
        worker_ranks=1,
        head_argv=("--data-parallel-rank 0",),
        worker_argv=("--data-parallel-rank FIRST",),
        serving=(HEAD, WORKER),
    ),
    Mode(
        "external-supervised",
        older="0.22.0",
        head_ranks=2,
        worker_ranks=2,
        head_argv=(
            "--data-parallel-multi-port-external-lb",
            "--data-parallel-size-local 2",
            "--data-parallel-start-rank 0",
        ),
        worker_argv=(
            "--data-parallel-multi-port-external-lb",
            "--data-parallel-size-local 2",
            "--data-parallel-start-rank 2",
        ),
        serving=(HEAD, WORKER),
        ports=(8000, 8001),
    ),
)


class Pod(NamedTuple):
    """One engine container."""

    role: str
    node: str
    environ: dict[str, str]  # of its first process
    argv: str
    log: str

    @property
    def first_rank(self) -> int:
        return int(self.environ["DPD_START_RANK"])


def _ranks(pod: Pod, mode: Mode) -> range:
    return range(pod.first_rank, pod.first_rank + (mode.head_ranks if pod.role == HEAD else mode.worker_ranks))


class Seen(NamedTuple):
    """All that was seen of one group."""

    status: Any
    pods: dict[str, Pod]
    snapshot: Any
    relayed: set[int]  # ranks whose HELLO, INIT and READY passed the relay
    asked: int  # completions through the Service
    served: dict[tuple[str, int], dict[int, int]]  # (pod, port) -> completions by rank after those through the Service
    served_directly: dict[tuple[str, int], dict[int, int]]  # (pod, port) -> further completions, asked of this server
    left: list[str]


def manifest(mode: Mode, version: str) -> Any:
    """The example; for an older release with what says so to a stand-in, its variable, and to the operator."""
    document = yaml.safe_load((EXAMPLES / f"{mode.example}.yaml").read_text())
    if version != NEWEST:
        document["spec"]["engine"] |= {
            "version": version,
            "env": [{"name": "DP_ENGINE_VERSION", "value": version}],
        }
    return document


def look(cluster: Cluster, mode: Mode, version: str) -> Seen:
    with make_space(cluster) as space:
        document = manifest(mode, version)
        name = document["metadata"]["name"]
        uid = space.create(document)["metadata"]["uid"]
        try:
            seen = _while_ready(space, name, mode, model=document["spec"]["model"]["name"])
        except Exception as error:
            error.add_note(space.report())
            raise
        space.delete("dataparalleldeployments", name)
        with contextlib.suppress(AssertionError):
            until("nothing is left", lambda: space.leftovers(uid), lambda found: not found, within_s=60)
        return seen._replace(left=[*space.leftovers(uid), *space.find("dataparalleldeployments")])


def _while_ready(space: Space, name: str, mode: Mode, *, model: str) -> Seen:
    # Groups wait for each other's devices, and for those of other tests.
    status = space.until_ready(name, within_s=240)
    found = space.pods(name)
    pods = {pod: _pod(space, pod, found[pod]) for pod in found}
    head = space.head(name)["metadata"]["name"]
    servers = [(pod, port) for pod in pods if pods[pod].role in mode.serving for port in mode.ports]

    def served() -> dict[tuple[str, int], dict[int, int]]:
        return {(pod, port): space.served_at(pod, port) for pod, port in servers}

    asked, before = 0, served()
    while any(rank not in _used(before) for rank in range(SIZE)):
        assert asked < 300, f"after {asked} completions through the Service: {before}"
        with ThreadPoolExecutor(16) as pool:
            ports = [port for port in mode.ports for _ in range(16)]
            asked += len(list(pool.map(lambda port: space.complete(name, port=port, model=model, timeout_s=60), ports)))
        before = served()
    for pod, port in servers:
        for _ in range(ASKED_DIRECTLY):
            space.complete_at(pod, port, model=model, timeout_s=60)
    after = served()
    text = space.kubectl("exec", head, "-c", "relay", "--", "cat", "/run/dataparallel/ranks.log")
    steps = [line.split() for line in text.splitlines()]
    return Seen(
        status=status,
        pods=pods,
        snapshot=space.snapshot(name),
        relayed={int(rank) for rank, what in steps if what == str(Stage.READY.value)},
        asked=asked,
        served=before,
        served_directly={
            server: {rank: count - before[server].get(rank, 0) for rank, count in ranks.items()}
            for server, ranks in after.items()
        },
        left=[],
    )


def _used(counts: dict[tuple[str, int], dict[int, int]]) -> set[int]:
    """Ranks that have served, by the counts of several API servers."""
    return {rank for ranks in counts.values() for rank, count in ranks.items() if count}


def _pod(space: Space, name: str, found: Any) -> Pod:
    text = space.kubectl("exec", name, "-c", "engine", "--", "cat", "/proc/1/environ", "/proc/1/cmdline")
    environ, words = {}, []
    for word in text.split("\0"):
        key, equals, value = word.partition("=")
        if equals and key.isidentifier():
            environ[key] = value
        else:
            words.append(word)
    return Pod(
        role=found["metadata"]["labels"]["dataparallel.io/role"],
        node=found["spec"]["nodeName"],
        environ=environ,
        argv=" ".join(words),
        log=space.kubectl("logs", name, "-c", "engine"),
    )


CASES = [(mode, version) for mode in MODES for version in (NEWEST, mode.older)]


def _name(case: tuple[Mode, str]) -> str:
    return f"{case[0].example}-{case[1]}"


@pytest.fixture(scope="module")
def looks(cluster: Cluster, _namespaces: None, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Seen]]]:
    chosen = {item.callspec.id for item in request.session.items if item.path == request.path}  # type: ignore[attr-defined]
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    yield {_name(case): pool.submit(look, cluster, *case) for case in CASES if _name(case) in chosen}
    pool.shutdown(cancel_futures=True)  # of a run that somebody interrupts


@pytest.fixture(scope="module")
def told() -> set[str]:
    """Cases whose error has been shown."""
    return set()


@pytest.fixture(params=CASES, ids=_name, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Mode, str]:
    found: tuple[Mode, str] = request.param
    return found


@pytest.fixture
def seen(looks: dict[str, Future[Seen]], told: set[str], case: tuple[Mode, str]) -> Seen:
    future = looks[_name(case)]
    if future.exception() and _name(case) in told:
        pytest.fail("this group did not come so far: see the first failure of it", pytrace=False)
    told.add(_name(case))
    return future.result()


@pytest.fixture
def mode(case: tuple[Mode, str]) -> Mode:
    return case[0]


@pytest.fixture
def version(case: tuple[Mode, str]) -> str:
    return case[1]


def test_the_example_becomes_ready_and_says_which_vllm_it_runs(seen: Seen, version: str) -> None:
    assert seen.status["ranks"]["summary"] == "4/4"
    (group,) = seen.status["groups"]
    assert group["engineVersion"] == version
    assert group["restarts"] == 0
    assumed = condition(seen.status, "VersionAssumed")
    assert (assumed["status"], assumed["message"]) == ("False", f"vLLM {version}, found in the image")


def test_every_pod_is_launched_as_its_mode_wants(seen: Seen, mode: Mode) -> None:
    """gpustack/gpustack#6221, PR#6236, vllm-project/vllm-ascend PR#16204, ai-dynamo/dynamo#5001."""
    first = sorted(pod.first_rank for pod in seen.pods.values() if pod.role == WORKER)
    assert first == list(range(mode.head_ranks, SIZE, mode.worker_ranks))
    for name, pod in seen.pods.items():
        wanted = mode.head_argv if pod.role == HEAD else mode.worker_argv
        wanted = tuple(words.replace("FIRST", str(pod.first_rank)) for words in wanted)
        argv = f"{pod.argv} "
        assert [words for words in wanted if f" {words} " not in argv] == [], f"{name}: {argv}"
        given = {word for words in wanted for word in words.split() if word.startswith("--")}
        assert {flag for flag in (*BALANCING, *PLACING) if f" {flag} " in argv} == given, f"{name}: {argv}"


def test_every_rank_uses_the_device_of_its_slot_and_no_other(seen: Seen, mode: Mode) -> None:
    """vllm PR#53743, #54694, #22677, #44556."""
    used = {}
    for name, pod in seen.pods.items():
        mine = _ranks(pod, mode)
        assert pod.environ.get("CUDA_VISIBLE_DEVICES", "") == ",".join(map(str, mine)), name
        for rank in mine:
            assert f"DP rank {rank} uses cuda devices {rank}\n" in pod.log, pod.log
            used[rank] = (pod.node, rank)
    assert len(set(used.values())) == len(used) == SIZE


def test_the_relay_lets_exactly_the_ranks_outside_the_head_pod_pass_and_refuses_nobody(
    seen: Seen, mode: Mode, version: str
) -> None:
    """The relay passes a HELLO only if it says headless in Internal groups and does not in others."""
    assert seen.relayed == set(range(mode.head_ranks, SIZE))
    assert seen.snapshot["stages"]["ready"] == "0-3"
    assert seen.snapshot.get("violationCount", 0) == 0, seen.snapshot["violations"]
    assert seen.snapshot["engineVersions"] == {version: len(seen.pods)}
    assert not seen.snapshot.get("warnings"), seen.snapshot


def test_completions_reach_every_rank_through_the_service_and_each_is_counted_once(seen: Seen) -> None:
    total = {rank: sum(ranks.get(rank, 0) for ranks in seen.served.values()) for rank in range(SIZE)}
    assert all(total.values()), total
    assert sum(total.values()) == seen.asked


def test_each_api_server_gives_its_requests_to_its_own_ranks(seen: Seen, mode: Mode) -> None:
    for (name, port), ranks in seen.served_directly.items():
        pod = seen.pods[name]
        if mode.serving == (HEAD,):
            own = set(range(SIZE))
        elif len(mode.ports) > 1:
            own = {pod.first_rank + mode.ports.index(port)}
        else:
            own = set(_ranks(pod, mode))
        assert {rank for rank, count in ranks.items() if count} <= own, f"{name} port {port}: {ranks}"
        assert sum(ranks.values()) == ASKED_DIRECTLY


def test_deleting_it_leaves_nothing(seen: Seen) -> None:
    assert seen.left == []
