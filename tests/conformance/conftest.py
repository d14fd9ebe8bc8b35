"""Processes of both sides, and the record of what worked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import environment, report

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).resolve().parent / "drivers"
# What is installed, and what our engine is told to emulate beside it.
RELEASES = {"0.11.0.post2": "0.11.0", "0.17.1": "0.17.1", "0.32.0": "0.32.0", "0.33.0": "0.33.0"}
WHOLE = "0.32.0"  # the release in vllm.lock
# A machine whose two cores are busy with something else needs this long to import torch.
IMPORT_S = 120.0
REQUEST_S = 30.0
SHORTAGE = "real vLLM is not installed"


def until(condition: Callable[[], Any], *, within_s: float, last: Callable[[], str]) -> Any:
    """Wait until the condition holds; past the deadline fail with what `last` says."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:g} s; last seen:\n{last()}")
        time.sleep(0.02)
    return value


class Program:
    """A process group that writes to a log, JSON lines among the rest."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name, self.pid, self.log_path = name, pid, log
        self._read = 0

    def text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log(self) -> str:
        return f"--- {self.name}\n{self.text()[-6000:]}"

    def running(self) -> bool:
        """Not ended; a child nobody has waited for counts as ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def wait_for(self, text: str, *, within_s: float) -> None:
        until(lambda: text in self.text(), within_s=within_s, last=lambda: f"no {text!r} in\n{self.log()}")

    def messages(self) -> list[dict[str, Any]]:
        """Everything it has said so far."""
        lines = self.text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def message(self, key: str, *, within_s: float) -> Any:
        """The value of the first JSON line with this key; an `error` line or the program's end fails the test."""

        def look() -> list[Any]:
            ended = not self.running()
            messages = self.messages()
            for message in messages:
                if "error" in message:
                    pytest.fail(f"{message['error']}\n{message.get('trace', '')}\n{self.log()}")
            found = [message[key] for message in messages if key in message]
            if ended and not found:
                pytest.fail(f"ended without {key!r}\n{self.log()}")
            return found

        return until(look, within_s=within_s, last=lambda: f"no {key!r}\n{self.log()}")[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGKILL for the whole process group: what was started here and nothing else."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def inherited() -> dict[str, str]:
    """The environment of what a test starts.

    Unbuffered, Python writes a line and its end one after the other, and messages of processes that share a log mix.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


class Bed:
    """What one test starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[Program] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def log_path(self, name: str) -> Path:
        return self.directory / f"{len(self.started)}-{name}.log"

    def start(self, name: str, argv: list[str], env: dict[str, str]) -> Program:
        log = self.log_path(name)
        with log.open("wb") as file:
            popen = subprocess.Popen(
                argv,
                env=inherited() | env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._children.append(popen)
        program = Program(" ".join(argv), popen.pid, log)
        self.started.append(program)
        return program

    def engine(self, *argv: str, version: str, name: str = "engine") -> Program:
        """`dp-engine serve`, as its image runs it."""
        sockets = self.directory / "s"
        sockets.mkdir(exist_ok=True)
        own = ("--load-seconds", "0.05", "--emulate-version", version)
        return self.start(
            name,
            [sys.executable, "-m", "dp_engine", "serve", "m", *own, *argv],
            {"PYTHONPATH": str(REPOSITORY / "engine_image"), "TMPDIR": str(sockets)},
        )

    def logs(self) -> str:
        return "\n".join(program.log() for program in self.started)

    def exit_code(self, program: Program, *, within_s: float) -> int:
        """Status of a program that `start` has started."""
        popen = next(popen for popen in self._children if popen.pid == program.pid)
        until(lambda: popen.poll() is not None, within_s=within_s, last=program.log)
        return popen.returncode

    def stop(self) -> None:
        for program in reversed(self.started):
            program.stop()
        for popen in self._children:
            popen.wait()


class Api:
    """An OpenAI-compatible server on this machine."""

    def __init__(self, bed: Bed, port: int) -> None:
        self._bed, self.port = bed, port

    def call(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """(status, body); status 0 while nobody listens."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self, *, within_s: float) -> None:
        until(lambda: self.call("/health")[0] == 200, within_s=within_s, last=self._bed.logs)

    def complete(self, *, tokens: int, rank: int | None = None) -> int:
        """How many tokens came."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"model": "m", "prompt": "hi", "max_tokens": tokens, "ignore_eos": True}
        status, text = self.call("/v1/completions", body, headers)
        assert status == 200, f"{text}\n{self._bed.logs()}"
        return int(json.loads(text)["usage"]["completion_tokens"])

    def open_stream(self) -> Any:
        """A long answer of which the first bytes have come."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps({"model": "m", "prompt": "hi", "max_tokens": 4000, "stream": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        stream = urllib.request.urlopen(request, timeout=REQUEST_S)
        stream.read(1)
        return stream


class Release:
    """One release of vLLM, imported once; cases are forks of it."""

    def __init__(self, python: Path, name: str, env: dict[str, str], directory: Path) -> None:
        self.name = name
        self.emulated = RELEASES[name]
        self._popen = subprocess.Popen(
            [str(python), str(DRIVERS / "release.py")],
            env=inherited() | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(directory / f"{name}.log").open("w"),
            text=True,
        )
        self._log = directory / f"{name}.log"
        self.version = str(self._answer()["version"])

    def _answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        pytest.fail(f"vLLM {self.name} does not import:\n{self._log.read_text()[-6000:]}")

    def case(self, bed: Bed, kind: str, **settings: Any) -> Program:
        """Run a case in a fork."""
        log = bed.log_path(f"vllm-{self.name}-{kind}")
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"kind": kind, "log": str(log), **settings}) + "\n")
        self._popen.stdin.flush()
        program = Program(f"vLLM {self.name} {kind} {settings}", int(self._answer()["pid"]), log)
        bed.started.append(program)
        return program

    def stop(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:  # an interpreter with torch in it may take its time on a busy machine
            self._popen.kill()
            self._popen.wait()


class Vllm:
    """The cached environment with real vLLM."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self._directory = root, directory
        self.python = root / "venv" / "bin" / "python"
        self._release: Release | None = None

    def env(self, release: str, scratch: Path) -> dict[str, str]:
        paths = [] if release == WHOLE else [str(self.root / "releases" / release)]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "HOME": str(self._directory),
            "TMPDIR": str(scratch),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "TOKENIZERS_PARALLELISM": "false",
            # Virtual machines may announce matrix instructions that they then refuse.
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
        }

    def release(self, release: str) -> Release:
        """This release, imported; at most one is kept in memory."""
        if self._release is not None and self._release.name != release:
            self.stop()
        if self._release is None:
            self._release = Release(self.python, release, self.env(release, self._directory), self._directory)
        return self._release

    def stop(self) -> None:
        if self._release is not None:
            self._release.stop()
            self._release = None


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    root = environment.place()
    if not root.exists():
        reason = environment.shortage() or "run `python3 -m tests.conformance.environment`"
        pytest.skip(f"{SHORTAGE}: {reason}")
    vllm = Vllm(root, tmp_path_factory.mktemp("v"))
    yield vllm
    vllm.stop()


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest, vllm: Vllm) -> Release:
    """Each release in turn; pytest runs all tests of one before it goes on, so each is imported once."""
    return vllm.release(request.param)


@pytest.fixture
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    # Paths of unix sockets are short: pytest's folder named after the test would be too long.
    bed = Bed(tmp_path_factory.mktemp("c"))
    yield bed
    bed.stop()


class Run:
    """The table of this run, and what did not run or pass."""

    def __init__(self) -> None:
        self.table = report.Table()
        self.counts: Counter[str] = Counter()
        self.words: list[str] = []

    def saw(self, report: pytest.TestReport) -> None:
        """Tests that skip a case which another one covers are no shortfall: what they leave open would be a hole."""
        if "tests/conformance/" in report.nodeid and (report.failed or SHORTAGE in str(report.longrepr)):
            self.counts[report.outcome] += 1

    def part(self) -> dict[str, Any]:
        """What one of several workers saw, in plain types."""
        return {"cells": self.table.cells(), "deselected": self.counts["deselected"]}

    def add(self, part: dict[str, Any]) -> None:
        """Take in what a worker saw. Outcomes of tests are reported here in any case."""
        self.table.add(part["cells"])
        self.counts["deselected"] = max(self.counts["deselected"], part["deselected"])

    def end(self, status: int) -> int:
        """Write the table if it is whole. Returns the exit status."""
        shortfalls = [f"{count} tests {what}" for what, count in self.counts.items() if count]
        if status and not shortfalls:
            shortfalls = ["the run was interrupted"]
        try:
            reason = self.table.save(shortfalls)
        except ValueError as failure:
            reason, status = str(failure), status or 1
        if reason is not None:
            self.words = [f"docs/compatibility.md is as it was: {reason}"]
        return status


RUN = Run()


def pytest_deselected(items: list[pytest.Item]) -> None:
    RUN.counts["deselected"] += len(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    RUN.saw(report)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run all tests of a release, so that each is imported once."""
    for item in items:
        if isinstance(item, pytest.Function) and "vllm" in item.fixturenames:
            name = item.callspec.params.get("release", WHOLE) if hasattr(item, "callspec") else WHOLE
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that died tells nothing, and its tests have failed."""
    if "conformance" in getattr(node, "workeroutput", {}):
        RUN.add(node.workeroutput["conformance"])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["conformance"] = RUN.part()
    else:
        session.exitstatus = RUN.end(int(exitstatus))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in RUN.words:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def compatibility() -> report.Table:
    return RUN.table
