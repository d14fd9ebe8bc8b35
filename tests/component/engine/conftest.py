"""Real processes of the stand-in engine on loopback, and what a test asks of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

ENGINE_PATH = str(Path(__file__).parents[3] / "engine_image")
START_S = 20.0


def until(condition: Callable[[], Any], *, within_s: float, last: Callable[[], str]) -> Any:
    """Wait until the condition holds; past the deadline fail with what `last` says."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s; last seen:\n{last()}")
        time.sleep(0.02)
    return value


class Process:
    """One `dp-engine serve`."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(argv, env=env, stdout=file, stderr=file, start_new_session=True)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, *, within_s: float = START_S) -> None:
        until(lambda: text in self.log(), within_s=within_s, last=lambda: f"no {text!r} in\n{self.log()}")

    def exit_code(self, *, within_s: float = START_S) -> int:
        until(lambda: self.popen.poll() is not None, within_s=within_s, last=self.log)
        return self.popen.returncode

    def child(self, name: str) -> int:
        """Pid of the child that logs as `name`."""
        return int(until(lambda: re.search(rf"\({name} pid=(\d+)\)", self.log()), within_s=START_S, last=self.log)[1])


class Bed:
    """A test's processes, its ports and its requests."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._mark = f"DP_ENGINE_TEST={uuid.uuid4().hex}"
        self._started: list[Process] = []
        self.port = free_port()
        self.rpc_port = free_port()
        self.ports: list[int] = []

    def start(
        self, *argv: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = (), model: str = "test-model"
    ) -> Process:
        name, _, value = self._mark.partition("=")
        tmp = self._tmp_path / "t"
        tmp.mkdir(exist_ok=True)
        full = {**os.environ, "PYTHONPATH": ENGINE_PATH, "TMPDIR": str(tmp), name: value, **(env or {})}
        command = [*prefix, sys.executable, "-m", "dp_engine", "serve", model, "--load-seconds", "0.05", *argv]
        process = Process(command, full, self._tmp_path / f"{len(self._started)}.log")
        self._started.append(process)
        return process

    def head(self, *argv: str, size: int, local: int, servers: int = 1, **kwargs: Any) -> Process:
        return self.start(
            *("--host", "127.0.0.1", "--port", str(self.port), "--api-server-count", str(servers)),
            *self._group(size=size, local=local),
            *argv,
            **kwargs,
        )

    def workers(self, *argv: str, size: int, start: int, local: int = 1, **kwargs: Any) -> Process:
        return self.start("--headless", "-dpr", str(start), *self._group(size=size, local=local), *argv, **kwargs)

    def node(self, *argv: str, size: int, port: int | None = None, model: str = "test-model", **kwargs: Any) -> Process:
        """A node with API servers of its own (hybrid, external); its port is appended to `ports`."""
        self.ports.append(port or free_port())
        return self.start(
            *("--host", "127.0.0.1", "--port", str(self.ports[-1]), "--data-parallel-size", str(size)),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self.rpc_port)),
            *argv,
            model=model,
            **kwargs,
        )

    def use(self, node: int) -> None:
        """Send what follows to this node's port."""
        self.port = self.ports[node]

    def _group(self, *, size: int, local: int) -> list[str]:
        return [
            *("--data-parallel-size", str(size), "--data-parallel-size-local", str(local)),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self.rpc_port)),
        ]

    def alive(self) -> list[int]:
        """Pids of everything that this test started, children included."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not zombie and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
        return pids

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> tuple[int, str, dict[str, str]]:
        """(status, body, headers). Raises ConnectionError."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.getheaders())
        finally:
            connection.close()

    def health(self) -> int | None:
        """Status of /health; None while the connection is refused."""
        try:
            return self.request("GET", "/health")[0]
        except ConnectionError:
            return None

    def wait_ready(self) -> None:
        until(lambda: self.health() == 200, within_s=START_S, last=self.logs)

    def logs(self) -> str:
        return "\n".join(f"--- {process.popen.args}\n{process.log()}" for process in self._started)

    def complete(
        self, prompt: str = "hello", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        body = {"model": "test-model", "prompt": prompt, "max_tokens": 5, **fields}
        status, text, _ = self.request("POST", "/v1/completions", body, headers)
        assert status == 200, f"{text}\n{self.logs()}"
        return dict(json.loads(text))

    def metric(self, name: str, *, rank: int, **labels: str) -> float:
        text = self.request("GET", "/metrics")[1]
        wanted = [f'engine="{rank}"', *(f'{key}="{value}"' for key, value in labels.items())]
        for line in text.splitlines():
            if line.startswith(name + "{") and all(label in line for label in wanted):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} {wanted} in\n{text}")

    def stop(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.popen.wait()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    bed = Bed(tmp_path)
    yield bed
    bed.stop()


@pytest.fixture
def wait() -> Callable[..., Any]:
    return until
