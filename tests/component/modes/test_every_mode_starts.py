"""Every mode as it runs in pods, without Kubernetes: rendered plan, launchers, relay and stand-in engines.

Each pod is a network namespace with an address of its own on a bridge, which the test makes (root needed). What the
operator renders is what runs: launch plan and environment are taken from it.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dp_handshake.messages import Snapshot
from dp_operator import api, naming, preview, render
from tests.component import namespaces
from tests.component.namespaces import inside, run

ROOT = Path(__file__).parents[3]
SETTINGS = render.Settings(relay_image="relay:1")
START_S = 60.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


class Group:
    """The pods of one rendered group as processes in namespaces."""

    def __init__(self, cr: api.DataParallelDeployment, folder: Path, *, version: str) -> None:
        self.cr = cr
        self.folder = folder
        self.inc = render.Incarnation(cr=cr, group=0, id="abcde", revision="r", settings=SETTINGS)
        self.version = version
        self.addresses: dict[str, str] = {}
        self.namespaces: dict[str, str] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._short: list[str] = []
        self._bridge = f"dpm{os.getpid()}b"

    def start(self) -> None:
        head = naming.head_name(self.inc.base)
        pods = [head, *render.worker_pods(self.cr.spec, self.inc.base)]
        namespaces.add(self._bridge)
        run("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._bridge, "link", "set", "br0", "up")
        for number, pod in enumerate(pods):
            self._add(pod, number)
        plan = render.launch_plan(self.cr, 0, "abcde", self.addresses[head])
        launcher = (ROOT / "operator/dp_handshake/launch.py").read_bytes()
        for pod in pods:
            (self.folder / pod).mkdir()
            (self.folder / pod / "plan.json").write_bytes(msgspec.json.encode(plan))
            (self.folder / pod / "launch.py").write_bytes(launcher)
        relay = [sys.executable, "-m", "dp_handshake", "relay", "--plan", str(self.folder / head / "plan.json")]
        self._run(head, [*relay, "--state-dir", str(self.folder / "state")], "relay", {"POD_IP": self.addresses[head]})
        for pod in pods:
            command = [sys.executable, str(self.folder / pod / "launch.py")]
            self._run(pod, command, pod, self._environment(pod))

    def _add(self, pod: str, number: int) -> None:
        namespace = self.namespaces[pod] = f"dpm{os.getpid()}p{number}"
        self.addresses[pod] = f"10.79.0.{number + 10}"
        namespaces.add(namespace)
        namespaces.connect(self._bridge, f"p{number}", namespace, "eth0")
        run("ip", "-n", self._bridge, "link", "set", f"p{number}", "master", "br0", "up")
        namespaces.address(namespace, "eth0", self.addresses[pod])

    def _environment(self, pod: str) -> dict[str, str]:
        """What the kubelet makes of the rendered environment."""
        templates = {self.head: render.head_pod(self.inc)["spec"]}
        for stateful_set in render.stateful_sets(self.inc):
            templates[stateful_set["metadata"]["name"]] = stateful_set["spec"]["template"]["spec"]
        template = templates.get(pod) or templates[pod.rpartition("-")[0]]
        fields = {"metadata.name": pod, "status.podIP": self.addresses[pod]}
        env = {}
        for item in template["containers"][0]["env"]:
            source = item.get("valueFrom")
            env[item["name"]] = fields[source["fieldRef"]["fieldPath"]] if source else item["value"]
        # Paths of Unix sockets are short: 107 characters.
        tmp = tempfile.mkdtemp(prefix="dpm")
        self._short.append(tmp)
        return env | {
            "TMPDIR": tmp,
            "DPD_TERMINATION_LOG": str(self.folder / pod / "termination"),
            "DP_ENGINE_VERSION": self.version,
        }

    @property
    def head(self) -> str:
        return naming.head_name(self.inc.base)

    def _run(self, pod: str, command: list[str], name: str, env: dict[str, str]) -> None:
        full = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'engine_image'}", **env}
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.namespaces[pod], *command],
                    env=full,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def request(self, pod: str, port: int, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Ask a pod from the head's namespace; status 0 where it does not answer."""
        with inside(self.namespaces[self.head]):
            connection = http.client.HTTPConnection(self.addresses[pod], port, timeout=10)
            try:
                text = json.dumps(body) if body is not None else None
                connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                return 0, str(error)
            finally:
                connection.close()

    def snapshot(self) -> Snapshot | None:
        status, text = self.request(self.head, 13350, "GET", "/v1/handshake")
        return msgspec.json.decode(text, type=Snapshot) if status == 200 else None

    def ready(self, pod: str) -> bool:
        """What the pod's readiness probe says."""
        role = naming.HEAD if pod == self.head else naming.WORKER
        if not render.serves(self.cr.spec, role):
            return self.request(self.head, 13350, "GET", f"/v1/ready/{pod}")[0] == 200
        port, path = render.health(self.cr.spec)
        return self.request(pod, port, "GET", path)[0] == 200

    def wait_ready(self) -> Snapshot:
        end = time.monotonic() + START_S
        while True:
            seen = self.snapshot()
            unready = [pod for pod in self.addresses if not self.ready(pod)]
            if seen and seen.ready_at and not unready:
                return seen
            ended = any(process.poll() is not None for process in self.processes)
            if time.monotonic() > end or ended:
                pytest.fail(f"not ready: {unready}; {seen}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for namespace in [*self.namespaces.values(), self._bridge]:
            # Children that left the process group; nothing but this test's processes lives in its namespaces.
            listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            namespaces.delete(namespace)
        for tmp in self._short:
            shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def started(example: str, folder: Path, *, version: str) -> Iterator[Group]:
    document = yaml.safe_load((ROOT / "examples" / "modes" / f"{example}.yaml").read_text())
    document["spec"]["engine"]["command"] = [sys.executable, "-m", "dp_engine", "serve"]
    document["spec"]["startup"] = {"timeoutSeconds": 120}
    group = Group(preview.check(document, version=version), folder, version=version)
    try:
        group.start()
        yield group
    finally:
        group.close()


CASES = [
    *(
        (example, version)
        for example in ("internal", "internal-dedicated", "hybrid", "external")
        for version in ("0.17.1", "0.33.0")
    ),
    ("external-supervised", "0.22.0"),
    ("external-supervised", "0.33.0"),
]


@pytest.mark.parametrize(("example", "version"), CASES)
def test_a_group_becomes_ready_and_every_rank_answers(tmp_path, example, version):
    """Start-up in every mode, with old and new releases: what the relay accepts, readiness, completions by rank."""
    with started(example, tmp_path, version=version) as group:
        seen = group.wait_ready()
        size = group.cr.spec.data_parallel.size
        assert seen.stages.ready == f"0-{size - 1}"
        assert seen.engine_versions == {version: len(group.addresses)}
        assert seen.violations == []
        assert seen.warnings == []
        served: set[str] = set()
        for pod in group.addresses:
            role = naming.HEAD if pod == group.head else naming.WORKER
            for port in render.api_ports(group.cr.spec) if render.serves(group.cr.spec, role) else []:
                for _ in range(8):
                    status, text = group.request(
                        pod,
                        port,
                        "POST",
                        "/v1/completions",
                        {"model": group.cr.spec.model.name, "prompt": "x", "max_tokens": 2},
                    )
                    assert status == 200, text
                page = group.request(pod, port, "GET", "/metrics")[1]
                for line in page.splitlines():
                    if line.startswith("vllm:generation_tokens_total{") and not line.endswith(" 0.0"):
                        served.add(line.partition('engine="')[2].partition('"')[0])
        assert served == {str(rank) for rank in range(size)}, f"{served}\n{group.logs()}"


def test_a_worker_whose_command_is_overridden_is_refused_with_the_likely_cause(tmp_path):
    """A headless worker would end the head of a Hybrid group; the relay keeps it away and says why.

    gpustack/gpustack#6221, PR#6236, vllm-project/vllm-ascend PR#16204.
    """
    with started("hybrid", tmp_path, version="0.33.0") as group:
        (worker,) = render.worker_pods(group.cr.spec, group.inc.base)
        end = time.monotonic() + START_S
        while (seen := group.snapshot()) is None or seen.listening_at is None:
            assert time.monotonic() < end, group.logs()
            time.sleep(0.1)
        extra = [
            sys.executable,
            "-m",
            "dp_engine",
            "serve",
            "m",
            "--moe",
            "--headless",
            "-dp",
            "4",
            "-dpl",
            "2",
            "-dpr",
            "2",
        ]
        extra += ["-dpa", group.addresses[group.head], "-dpp", "13345"]
        group._run(worker, extra, "overridden", {"TMPDIR": str(tmp_path)})
        while not (seen := group.snapshot()) or not seen.violations:
            assert time.monotonic() < end, group.logs()
            time.sleep(0.1)
        violation = seen.violations[0]
        assert (violation.kind, violation.pod) == ("LocalHeadlessMismatch", worker)
        assert "the group is Hybrid, whose pods all serve" in violation.message
        assert "Is this pod's command overridden?" in violation.message
