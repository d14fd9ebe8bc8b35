"""The launcher: what it makes of a plan, an environment and the monitor's answers."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dp_handshake.messages import CheckIn, Fill, LaunchPlan, Versioned, WorkerSet

SOURCE = Path(__file__).resolve().parents[3] / "operator" / "dp_handshake" / "launch.py"
STDLIB_39 = {
    "os",
    "select",
    "sys",
    "json",
    "re",
    "importlib",
    "http",
    "random",
    "time",
    "shlex",
    "signal",
    "socket",
    "tempfile",
    "typing",
    "__future__",
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_under_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launch = load()


def plan(**changes: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "name": "g",
        "group": 0,
        "incarnation": "abc12",
        "size": 6,
        "size_local": 2,
        "load_balancing": "Internal",
        "head_placement": "Colocated",
        "architecture": "Dense",
        "head_pod": "g-head",
        "workers": [WorkerSet(name="g-w", replicas=2, first_rank=2, rank_stride=2)],
        "monitor_host": "127.0.0.1",
        "monitor_port": 1,
        "rpc_port": 13345,
        "api_port": 8000,
        "head_argv": [sys.executable, "-c", "print('head')"],
        "worker_argv": ["sh", "-c", 'echo "started $0 $1 $DPD_HEAD_IP"', Fill(fill="headIP"), Fill(fill="startRank")],
    }
    return LaunchPlan(**{**fields, **changes})


def as_json(message: LaunchPlan) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(message))


class Monitor:
    """Answers check-ins from a list; the last one repeats."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers, self.asked = list(answers), []
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                monitor.asked.append(msgspec.json.decode(body, type=CheckIn))
                status, data = monitor.answers.pop(0) if len(monitor.answers) > 1 else monitor.answers[0]
                if status == 0:
                    self.connection.close()
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                ready = self.path == "/v1/ready/g-w-0"
                self.send_response(200 if ready else 503)
                self.end_headers()
                self.wfile.write(b"ready\n" if ready else b"rank 4-5 connected, loading\n")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def monitor() -> Iterator[Callable[..., Monitor]]:
    started: list[Monitor] = []

    def start(*answers: tuple[int, bytes]) -> Monitor:
        started.append(Monitor(*answers))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


RELEASED = (200, b'{"state":"released","headIp":"10.0.0.1","arrived":3,"expected":3}')
WAITING = (200, b'{"state":"waiting","arrived":1,"expected":3,"message":"waiting for 2 of 3 pods: g-head, g-w-1"}')
REFUSED = (409, b'{"state":"refused","message":"pod g-w-0 started again"}')


def start(directory: Path, message: LaunchPlan, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    (directory / "launch.py").write_bytes(SOURCE.read_bytes())
    (directory / "plan.json").write_bytes(msgspec.json.encode(message))
    variables = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(directory),
        "DPD_POD_NAME": "g-w-0",
        "DPD_POD_IP": "10.0.0.2",
        "DPD_ROLE": "worker",
        "DPD_WORKER_SET": "g-w",
        "DPD_TERMINATION_LOG": str(directory / "termination-log"),
        **environ,
    }
    options = ["-I", "-S"] if arguments == ("ready",) else []
    return subprocess.Popen(
        [sys.executable, *options, str(directory / "launch.py"), *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], *, within_s: float = 20) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=within_s)
    return process.returncode, output, errors


def test_it_runs_on_python_3_9_with_nothing_but_the_standard_library_and_fits_a_config_map() -> None:
    text = SOURCE.read_text()
    tree = ast.parse(text, feature_version=(3, 7))  # older than it runs on, so that it can say so
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        assert not isinstance(node, ast.Match)
    assert imported <= STDLIB_39
    assert len(text.encode()) < 30_000


@pytest.mark.parametrize(
    ("installed", "since", "until", "kept"),
    [
        ("0.11.0", "0.9", None, True),
        ("0.9.2", "0.11", None, False),
        ("0.18.0", "0.18", "0.29", True),
        ("0.18", "0.18.0", None, True),
        ("0.29.0", "0.18", "0.29", False),
        ("0.28.9.post2", "0.18", "0.29", True),
        ("0.11.0.post2", None, "0.11", False),
        ("0.29.0rc1.dev12+gabc", "0.29", None, True),
        ("v0.33.0+cpu", "0.33", None, True),
        ("0.33.0", None, None, True),
        (None, "0.18", "0.29", True),
        ("nightly", "0.18", "0.29", True),
    ],
)
def test_items_are_kept_by_the_installed_version(installed: str, since: str, until: str, kept: bool) -> None:
    items = [{"items": ["--new", {"fill": "headIP"}], "since": since, "until": until}]
    argv = launch.resolve(items, fills={"headIP": "10.0.0.1"}, installed=installed)
    assert argv == (["--new", "10.0.0.1"] if kept else [])


def test_an_argv_of_the_operator_becomes_strings() -> None:
    message = plan(
        worker_argv=["vllm", Fill(fill="startRank"), Versioned(items=["--x", Fill(fill="headIP")], since="0.18"), "a b"]
    )
    fills = {"headIP": "fd00::1", "startRank": "4"}
    argv = launch.resolve(as_json(message)["workerArgv"], fills=fills, installed="0.32.0")
    assert argv == ["vllm", "4", "--x", "fd00::1", "a b"]


@pytest.mark.parametrize("item", [{"fill": "podName"}, 7, {"other": 1}, None])
def test_an_item_that_it_does_not_know_is_an_error(item: object) -> None:
    with pytest.raises(ValueError, match="in the launch plan"):
        launch.resolve([item], fills={"headIP": "", "startRank": ""}, installed=None)


def test_the_first_rank_follows_from_the_pods_ordinal_in_its_own_set() -> None:
    sets = [
        WorkerSet(name="g-s0", replicas=2, first_rank=0, rank_stride=2, ordinal_start=1),
        WorkerSet(name="g-s1", replicas=3, first_rank=1, rank_stride=2),
    ]
    message = as_json(plan(size_local=1, workers=sets))
    assert launch.first_rank(message, role="worker", pod="g-s0-2", worker_set="g-s0") == (4, 1)
    assert launch.first_rank(message, role="worker", pod="g-s1-2", worker_set="g-s1") == (5, 1)
    assert launch.first_rank(message, role="head", pod="g-head", worker_set="") == (0, 1)
    assert launch.first_rank(as_json(plan(head_placement="Dedicated")), role="head", pod="h", worker_set="") == (0, 0)
    with pytest.raises(ValueError, match="ordinal"):
        launch.first_rank(message, role="worker", pod="g-s0", worker_set="g-s0-x")
    with pytest.raises(ValueError, match="not in the launch plan"):
        launch.first_rank(message, role="worker", pod="g-w-1", worker_set="g-w")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("GPU-1a,GPU-2b", 2), ("3", 1), ("", None), ("all", None), (None, None), ("void", None)],
)
def test_devices_are_counted_where_the_variable_lists_them(visible: str | None, count: int | None) -> None:
    assert launch.device_count(visible) == count


def test_it_waits_through_everything_that_is_no_answer_and_then_becomes_the_engine(
    tmp_path: Path, monitor: Callable[..., Monitor]
) -> None:
    server = monitor(
        (500, b"boom"),
        (0, b""),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"state":"released"}'),
        (503, b""),
        WAITING,
        RELEASED,
    )
    message = plan(monitor_port=server.port, visible_devices_env_name="CUDA_VISIBLE_DEVICES")
    code, output, errors = finish(start(tmp_path, message, DP_ENGINE_VERSION="0.32.0", CUDA_VISIBLE_DEVICES="2,3"))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[-1] == "started 10.0.0.1 2 10.0.0.1"
    assert lines[-2] == (
        "launch: engine 0.32.0, 2 ranks from 2: sh -c 'echo \"started $0 $1 $DPD_HEAD_IP\"' 10.0.0.1 2"
    )
    assert "does not answer yet" in lines[0]
    assert len({check_in.launch for check_in in server.asked}) == 1
    told = server.asked[-1]
    assert (told.pod, told.ip, told.first_rank, told.ranks, told.role) == ("g-w-0", "10.0.0.2", 2, 2, "worker")
    assert (told.visible_devices, told.device_count, told.engine_version) == ("2,3", 2, "0.32.0")
    assert told.shared_memory_bytes is None or told.shared_memory_bytes > 0
    assert not (tmp_path / "termination-log").exists()


def test_it_says_whom_it_waits_for(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    _, output, _ = finish(start(tmp_path, plan(monitor_port=monitor(WAITING, RELEASED).port)))
    assert output.splitlines()[0] == "launch: waiting for 2 of 3 pods: g-head, g-w-1"


def test_it_waits_for_a_monitor_that_is_not_there_yet_and_ends_at_once_when_told_to(tmp_path: Path) -> None:
    """The head is resolved and waited for before the engine exists, not in its lifetime.

    aws-samples/aws-do-eks PR#70.
    """
    process = start(tmp_path, plan(monitor_port=1))
    assert process.stdout is not None
    assert "does not answer yet (ConnectionRefusedError" in process.stdout.readline()
    started = time.monotonic()
    process.terminate()
    assert process.wait(5) == 143
    assert time.monotonic() - started < 2


def test_a_refused_launcher_does_not_start_the_engine_and_says_why(
    tmp_path: Path, monitor: Callable[..., Monitor]
) -> None:
    code, output, errors = finish(start(tmp_path, plan(monitor_port=monitor(REFUSED).port)))
    assert code == 1
    assert "started" not in output
    assert errors == "launch: not started: pod g-w-0 started again\n"
    assert (tmp_path / "termination-log").read_text() == "not started: pod g-w-0 started again\n"


def test_a_command_that_the_image_lacks_is_named(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    message = plan(monitor_port=monitor(RELEASED).port, worker_argv=["no-such-engine", "serve"])
    code, _, errors = finish(start(tmp_path, message))
    assert code == 127
    assert "no-such-engine: command not found in the image" in errors
    assert "no-such-engine" in (tmp_path / "termination-log").read_text()


@pytest.mark.parametrize("missing", ["DPD_POD_NAME", "DPD_ROLE"])
def test_a_broken_environment_ends_it_with_a_message(tmp_path: Path, missing: str) -> None:
    (tmp_path / "launch.py").write_bytes(SOURCE.read_bytes())
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan()))
    environ = {"DPD_POD_NAME": "g-w-0", "DPD_ROLE": "worker", "DPD_POD_IP": "10.0.0.2", "DPD_WORKER_SET": "g-w"}
    del environ[missing]
    environ["DPD_TERMINATION_LOG"] = str(tmp_path / "log")
    process = subprocess.run(
        [sys.executable, str(tmp_path / "launch.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert process.returncode == 1
    assert missing in (tmp_path / "log").read_text()


def test_the_probe_gives_the_monitors_word_and_starts_fast(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    message = plan(monitor_port=monitor(RELEASED).port)
    assert finish(start(tmp_path, message, "ready"))[:2] == (0, "ready\n")
    assert finish(start(tmp_path, message, "ready", DPD_POD_NAME="g-w-1"))[:2] == (1, "rank 4-5 connected, loading\n")
    text = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", str(tmp_path / "launch.py"), "ready"],
        env={"DPD_POD_NAME": "g-w-0", "DPD_ROLE": "worker"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stderr
    imported = {line.rpartition("|")[2].strip() for line in text.splitlines()}
    assert "json" in imported
    assert imported.isdisjoint({"http.client", "email", "importlib.metadata", "urllib.parse", "ssl", "tempfile"})


def test_the_probe_fails_with_a_reason_while_there_is_no_monitor(tmp_path: Path) -> None:
    code, output, _ = finish(start(tmp_path, plan(), "ready"))
    assert code == 1
    assert output.startswith("the monitor does not answer: ")


def test_a_worker_outlives_the_head_which_closes_its_api_first_and_no_longer_than_it_is_given(
    tmp_path: Path, monitor: Callable[..., Monitor]
) -> None:
    """The group drains as one, the head first: gpustack-operator `shutdown.md`, llm-d#927/PR#2444."""
    server = monitor(RELEASED)
    (tmp_path / "dpd-head-ip").write_text("127.0.0.1")
    message = plan(monitor_port=server.port, api_port=1)
    started = time.monotonic()
    assert finish(start(tmp_path, message, "prestop", "1.5"))[0] == 0
    assert 1.4 < time.monotonic() - started < 5
    process = start(tmp_path, message, "prestop", "60")
    time.sleep(0.3)
    assert process.poll() is None
    server.server.shutdown()
    server.server.server_close()
    assert finish(process, within_s=10)[0] == 0


def head_answers(monkeypatch: pytest.MonkeyPatch, connections: list[socket.socket | None]) -> None:
    """What comes of one try after the other to reach the head; None and all further ones: nobody says anything."""
    tries = iter(connections)

    def connect(_: object, timeout: float) -> socket.socket:
        connection = next(tries, None)
        if connection is None:
            time.sleep(timeout)
            raise TimeoutError
        return connection

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(launch, "remembered_head", lambda: "192.0.2.1")
    monkeypatch.setattr(launch, "read_plan", lambda: {"monitorHost": "192.0.2.2"})


@pytest.mark.parametrize("seen", [True, False], ids=["ends meanwhile", "was gone before"])
def test_a_worker_does_not_wait_long_for_a_head_whose_address_is_gone_with_it(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Nobody says no there: a connection is simply never made. A node that was lost takes more than its own pods' time."""
    ours, theirs = socket.socketpair()
    head_answers(monkeypatch, [ours] if seen else [])
    threading.Timer(0.2, theirs.close).start()
    started = time.monotonic()
    assert launch.prestop(60) == 0
    assert 0.2 <= time.monotonic() - started < 2.5


def test_packets_that_are_lost_for_a_moment_do_not_end_a_worker_before_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    head_answers(monkeypatch, [None, ours])
    threading.Timer(launch.PRESTOP_CONNECT_S + 0.3, theirs.close).start()
    started = time.monotonic()
    assert launch.prestop(60) == 0
    assert time.monotonic() - started >= launch.PRESTOP_CONNECT_S + 0.3, "the head ran until then"


def test_a_worker_that_was_never_released_stops_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    assert finish(start(tmp_path, plan(), "prestop", "60"))[0] == 0
    assert time.monotonic() - started < 5


def needing(**changes: Any) -> LaunchPlan:
    fields: dict[str, Any] = {"visible_devices_env_name": "CUDA_VISIBLE_DEVICES", "worker_devices": 2}
    return plan(**(fields | changes))


def test_too_few_devices_end_it_before_the_group_waits_for_it(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    """Said before the engine loads, in one line, where people look: vllm PR#53743, #54694, #22677, #44556."""
    server = monitor(WAITING)
    code, output, errors = finish(start(tmp_path, needing(monitor_port=server.port), CUDA_VISIBLE_DEVICES="3"))
    said = (tmp_path / "termination-log").read_text()
    assert code == 1
    assert said == (
        "not started: 1 devices are visible (CUDA_VISIBLE_DEVICES=3), but 2 ranks here need 2: "
        "does the node give this container all of them?\n"
    )
    assert said.strip() in errors
    assert "started" not in output
    assert server.asked[-1].warnings == [said.strip().removeprefix("not started: ")], "the operator can show it"


def test_more_devices_than_needed_are_a_warning(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    server = monitor(RELEASED)
    code, output, _ = finish(start(tmp_path, needing(monitor_port=server.port), CUDA_VISIBLE_DEVICES="0,1,2,3"))
    assert code == 0
    assert "launch: 4 devices are visible, 2 are needed" in output
    assert server.asked[-1].warnings == ["4 devices are visible, 2 are needed"]


def test_devices_of_the_nvidia_runtime_are_counted_where_the_engines_variable_is_not_set() -> None:
    assert launch.devices_here(None, {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == 2
    assert launch.devices_here("0", {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}) == 1


@pytest.mark.parametrize(("version", "fits"), [("0.21.2", False), ("0.22.0", True), ("", True)])
def test_an_engine_that_is_too_old_for_the_mode_is_not_started(
    tmp_path: Path, monitor: Callable[..., Monitor], version: str, fits: bool
) -> None:
    server = monitor(RELEASED)
    message = plan(monitor_port=server.port, needs_version="0.22", needs_version_for="External with several ranks")
    code, _, _ = finish(start(tmp_path, message, DP_ENGINE_VERSION=version))
    assert (code == 0) == fits
    if not fits:
        said = (tmp_path / "termination-log").read_text()
        assert "the image has vLLM 0.21.2, and External with several ranks needs 0.22 or newer" in said


def test_a_python_that_is_too_old_is_named_instead_of_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 10, "final", 0))
    monkeypatch.setenv("DPD_TERMINATION_LOG", str(tmp_path / "termination-log"))
    assert launch.main([]) == 1
    said = "not started: python3 of the image is Python 3.8, and 3.9 or newer is needed"
    assert (tmp_path / "termination-log").read_text() == said + "\n"
    assert said in capsys.readouterr().err


def test_the_monitor_hears_which_python_the_image_has(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    server = monitor(RELEASED)
    finish(start(tmp_path, plan(monitor_port=server.port)))
    assert server.asked[-1].python_version == "{}.{}.{}".format(*sys.version_info)


def test_where_the_image_does_not_tell_its_version_the_operators_idea_counts(
    tmp_path: Path, monitor: Callable[..., Monitor]
) -> None:
    server = monitor(RELEASED)
    argv = ["echo", "run", Versioned(items=["--new"], since="0.18")]
    message = plan(monitor_port=server.port, worker_argv=argv, assumed_version="0.17")
    _, output, _ = finish(start(tmp_path, message))
    assert output.splitlines()[-1] == "run"
    assert server.asked[-1].engine_version is None


def test_shared_memory_that_is_smaller_than_asked_is_told(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    """Bus errors in the middle of the night otherwise: kserve/kserve PR#5155."""
    server = monitor(RELEASED)
    _, output, _ = finish(start(tmp_path, plan(monitor_port=server.port, shared_memory_bytes=2**60)))
    assert "in /dev/shm: is the memory limit too low?" in output
    assert "shared memory" in server.asked[-1].warnings[0]


def test_a_head_of_another_address_family_is_named(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    server = monitor((200, b'{"state":"released","headIp":"fd00::1"}'))
    code, _, errors = finish(start(tmp_path, plan(monitor_port=server.port)))
    assert code == 1
    assert "the head's address is fd00::1 and this pod's is 10.0.0.2: one is IPv6 and one IPv4" in errors


def test_what_a_service_named_vllm_does_is_undone(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    """vLLM ends on VLLM_PORT=tcp://…: vllm#34199, #15613, PR#18209."""
    server = monitor(RELEASED)
    message = plan(monitor_port=server.port, worker_argv=["sh", "-c", "echo port=$VLLM_PORT"])
    _, output, _ = finish(start(tmp_path, message, VLLM_PORT="tcp://10.96.0.7:8000"))
    assert output.splitlines()[-1] == "port="
    assert "VLLM_PORT=tcp://10.96.0.7:8000 removed: a Service named vllm put it there" in output


def test_segments_of_an_engine_that_was_killed_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in ("psm_1a2b", "sem.mp-x", "nccl-abc", "other", "psm"):
        (tmp_path / name).write_text("")
    assert launch.remove_stale_segments(str(tmp_path)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "psm"]
    assert launch.remove_stale_segments(str(tmp_path / "none")) == 0


def test_neighbours_learn_head_and_start_rank_from_a_file(tmp_path: Path, monitor: Callable[..., Monitor]) -> None:
    server = monitor(RELEASED)
    message = plan(monitor_port=server.port, worker_argv=["sh", "-c", "echo rank=$DPD_START_RANK"])
    _, output, _ = finish(start(tmp_path, message, DPD_GROUP_DIR=str(tmp_path)))
    assert (tmp_path / "env").read_text() == "DPD_HEAD_IP=10.0.0.1\nDPD_START_RANK=2\n"
    assert output.splitlines()[-1] == "rank=2"
