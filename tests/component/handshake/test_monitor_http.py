"""The monitor over HTTP, and the launcher against it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from dp_handshake import monitor
from dp_handshake.messages import CheckIn, CheckInReply, Fill, Snapshot, WorkerSet
from tests.component.handshake.play import REPOSITORY, Group, Head, http

Make = Callable[..., Group]


def test_a_poll_is_held_until_the_last_pod_arrives(group: Make) -> None:
    one = group(size=3)
    one.relay.until(lambda _: True)
    started = time.monotonic()
    status, text = one.relay.check_in("g-w-0", "127.1.0.2", wait_s=0.5)
    assert time.monotonic() - started >= 0.5
    assert (status, json.loads(text)["state"]) == (200, "waiting")
    one.relay.check_in("g-head", "127.0.0.1")
    held = subprocess.Popen(
        ["curl", "-s", "-d", _check_in(one, "g-w-0", wait_s=20), f"{one.relay.url}/v1/check-in"], stdout=subprocess.PIPE
    )
    one.relay.until(lambda snapshot: snapshot.missing_pods == ["g-w-1"])
    released = time.monotonic()
    assert json.loads(one.relay.check_in("g-w-1", "127.1.0.3")[1])["state"] == "released"
    output, _ = held.communicate(timeout=5)
    assert json.loads(output) == {"state": "released", "headIp": "127.0.0.1", "arrived": 3, "expected": 3}
    assert time.monotonic() - released < 2


def _check_in(one: Group, pod: str, *, wait_s: float) -> bytes:
    place = next(place for place in one.places if place.pod == pod)
    return msgspec.json.encode(
        CheckIn(
            incarnation=one.plan.incarnation,
            pod=pod,
            ip=one.addresses[pod],
            launch="first",
            role=place.role,
            first_rank=place.first_rank,
            ranks=place.ranks,
            engine_version="0.32.0",
            python_version="3.12.3",
            wait_seconds=wait_s,
        )
    )


async def test_four_thousand_pods_wait_and_are_released_together(group: Make) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    pods = 4096
    one = group(size=pods, workers=[WorkerSet(name="g-w", replicas=pods - 1, first_rank=1, rank_stride=1)])
    await asyncio.to_thread(one.relay.until, lambda _: True)
    names = [place.pod for place in one.places]

    async def check_in(session: aiohttp.ClientSession, pod: str) -> CheckInReply:
        async with session.post(f"{one.relay.url}/v1/check-in", data=_check_in(one, pod, wait_s=25)) as response:
            return msgspec.json.decode(await response.read(), type=CheckInReply)

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        waiting = [asyncio.create_task(check_in(session, pod)) for pod in names[:-1]]
        end = time.monotonic() + 40
        while (await asyncio.to_thread(one.relay.snapshot)).arrived_pods < pods - 1:
            assert time.monotonic() < end, "not all pods have arrived"
            await asyncio.sleep(0.1)
        started = time.monotonic()
        last = await check_in(session, names[-1])
        replies = await asyncio.gather(*waiting)
    assert time.monotonic() - started < 10
    assert {reply.state for reply in [last, *replies]} == {"released"}
    snapshot = await asyncio.to_thread(one.relay.snapshot)
    assert (snapshot.arrived_pods, snapshot.stages.arrived, snapshot.missing_pods) == (pods, "0-4095", [])
    assert snapshot.engine_versions == {"0.32.0": pods}
    assert snapshot.python_versions == {"3.12.3": pods}


def test_a_pod_that_restarts_after_the_release_is_refused_even_by_a_restarted_relay(group: Make) -> None:
    one = group(size=2)
    one.start()
    assert one.relay.check_in("g-w-0", "127.1.0.2")[0] == 200
    status, text = one.relay.check_in("g-w-0", "127.1.0.2", launch="second")
    assert (status, json.loads(text)["state"]) == (409, "refused")
    first = one.relay.worker_pid()
    os.kill(first, signal.SIGKILL)
    after = one.relay.until(lambda snapshot: bool(snapshot.restarted))
    assert one.relay.worker_pid() != first
    assert [(entry.pod, "started again" in entry.message) for entry in after.restarted] == [("g-w-0", True)]
    assert one.relay.check_in("g-w-0", "127.1.0.2", launch="third")[0] == 409
    assert one.relay.check_in("g-w-0", "127.1.0.2")[0] == 200


def test_bad_requests_are_answered_and_harm_nothing(group: Make) -> None:
    one = group(size=2)
    one.relay.until(lambda _: True)
    url = f"{one.relay.url}/v1/check-in"
    for body in (b"", b"{", b"[]", b'{"pod":1}', b"[" * 50_000, b"\xff\xfe"):
        assert http("POST", url, body)[0] == 400
    assert http("POST", url, bytes(100_000))[0] == 413
    assert one.relay.get("/v1/ready/nobody") == (503, "pod nobody is not in the launch plan\n")
    assert one.relay.get("/v1/ready/g-w-0") == (503, "not checked in\n")
    assert one.relay.get("/nothing")[0] == 404
    assert one.relay.get("/healthz") == (200, "ok\n")


def test_metrics_count_ranks_by_stage(group: Make) -> None:
    one = group(size=4)
    one.start()
    text = one.relay.get("/metrics")[1]
    assert 'dp_handshake_ranks{stage="connected"} 0\n' in text
    assert "dp_handshake_ranks_expected 4\n" in text
    assert "dp_handshake_released 1\n" in text
    assert "dp_handshake_violations_total 0\n" in text


class Source:
    """A monitor's source whose changes the test makes."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.version = 1
        self.condition = asyncio.Condition()

    def check_in(self, message: CheckIn) -> CheckInReply:
        raise RuntimeError("a bug")

    def waiting_reply(self) -> CheckInReply:
        return CheckInReply(state="waiting")

    def snapshot(self) -> Snapshot:
        return Snapshot(incarnation="a", time=time.time(), size=1, expected_pods=1, arrived_pods=self.version)

    async def changed(self, since: int) -> int:
        async with self.condition:
            await self.condition.wait_for(lambda: self.version > since)
            return self.version

    async def change(self) -> None:
        async with self.condition:
            self.version += 1
            self.condition.notify_all()

    def readiness(self, pod: str) -> str:
        return ""

    def metrics(self) -> str:
        return ""


@pytest.fixture
async def client() -> AsyncIterator[tuple[Source, TestClient]]:
    source = Source()
    async with TestClient(TestServer(monitor.application(source))) as client:
        yield source, client


async def test_a_watch_gives_the_state_at_once_and_every_change_not_more_than_five_a_second(
    client: tuple[Source, TestClient],
) -> None:
    source, http_client = client
    async with http_client.get("/v1/handshake?watch=1") as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        lines = [await asyncio.wait_for(response.content.readline(), 1)]
        started = time.monotonic()
        while time.monotonic() - started < 1:
            await source.change()
            await asyncio.sleep(0.01)
        while True:
            lines.append(await asyncio.wait_for(response.content.readline(), 2))
            if msgspec.json.decode(lines[-1], type=Snapshot).arrived_pods == source.version:
                break
    assert 3 <= len(lines) <= 8


async def test_a_watch_without_changes_shows_that_it_lives(
    client: tuple[Source, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert monitor.WATCH_HEARTBEAT_S + monitor.WATCH_INTERVAL_S < 10
    monkeypatch.setattr(monitor, "WATCH_HEARTBEAT_S", 0.2)
    _, http_client = client
    async with http_client.get("/v1/handshake?watch=1") as response:
        times = [
            msgspec.json.decode(await asyncio.wait_for(response.content.readline(), 2), type=Snapshot).time
            for _ in range(4)
        ]
    assert times == sorted(set(times))


async def test_a_bug_answers_500_which_a_launcher_takes_for_not_yet(client: tuple[Source, TestClient]) -> None:
    _, http_client = client
    body = CheckIn(incarnation="a", pod="p", ip="::1", launch="x", role="head", first_rank=0, ranks=1)
    async with http_client.post("/v1/check-in", data=msgspec.json.encode(body)) as response:
        assert response.status == 500
    async with http_client.get("/healthz") as response:
        assert response.status == 200


def launcher(directory: Path, one: Group, pod: str) -> subprocess.Popen[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(directory),
        "DPD_POD_NAME": pod,
        "DPD_POD_IP": one.addresses[pod],
        "DPD_ROLE": "head" if pod == one.plan.head_pod else "worker",
        "DPD_WORKER_SET": pod.rpartition("-")[0],
        "DPD_TERMINATION_LOG": str(directory / f"{pod}.termination"),
        "DP_ENGINE_VERSION": "0.32.0",
    }
    return subprocess.Popen(
        [sys.executable, str(directory / "launch.py")],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_launchers_start_their_engines_together_and_never_a_second_time(group: Make, tmp_path: Path) -> None:
    """Pods that start one after the other miss each other's windows; here none starts before all are there.

    llm-d `guides/wide-ep-lws/README.md` troubleshooting, awslabs/awsome-distributed-ai PR#1230.
    """
    one = group(
        size=3,
        head_argv=["sh", "-c", "date +%s.%N; echo head at $0", Fill(fill="headIP")],
        worker_argv=["sh", "-c", "date +%s.%N; echo rank $0 for $1", Fill(fill="startRank"), Fill(fill="headIP")],
    )
    (tmp_path / "launch.py").write_bytes((REPOSITORY / "operator/dp_handshake/launch.py").read_bytes())
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(one.plan))
    processes = [launcher(tmp_path, one, pod) for pod in ("g-w-1", "g-w-0")]
    waiting = one.relay.until(lambda snapshot: snapshot.arrived_pods == 2)
    assert (waiting.missing_pods, waiting.stages.arrived, waiting.released_at) == (["g-head"], "1-2", None)
    processes.append(launcher(tmp_path, one, "g-head"))
    outputs = [process.communicate(timeout=20)[0].splitlines() for process in processes]
    assert [lines[-1] for lines in outputs] == ["rank 2 for 127.0.0.1", "rank 1 for 127.0.0.1", "head at 127.0.0.1"]
    assert any("waiting for 1 of 3 pods: g-head" in line for lines in outputs[:2] for line in lines), outputs
    times = [float(lines[-2]) for lines in outputs]
    assert max(times) - min(times) < 2
    again = launcher(tmp_path, one, "g-w-0")
    text = again.communicate(timeout=20)[0]
    assert again.returncode == 1
    assert "rank 1 for" not in text
    assert "started again" in (tmp_path / "g-w-0.termination").read_text()
    snapshot = one.relay.snapshot()
    assert [entry.pod for entry in snapshot.restarted] == ["g-w-0"]
    assert snapshot.engine_versions == {"0.32.0": 3}


def test_people_can_read_the_state(group: Make) -> None:
    one = group(size=2, size_local=2, workers=[])
    one.relay.check_in_all(one.addresses)
    one.head = Head(one.plan)
    one.relay.until(lambda snapshot: snapshot.ready_at is not None)
    text = subprocess.run(
        [sys.executable, "-m", "dp_handshake", "status", one.relay.url],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    assert "pods 1/1, ready " in text
    assert "ready              2/2  0-1" in text
