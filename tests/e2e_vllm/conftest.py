"""Real vLLM 0.32 on the cluster: the environment of `make conformance`, mounted into the pods from this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.kind import KindCluster
from tests.conformance import environment
from tests.e2e.conftest import _namespaces, bed, cluster, pytest_runtest_makereport, space
from tests.e2e.kube import Object, dpd

__all__ = ["_namespaces", "bed", "cluster", "pytest_runtest_makereport", "space"]

HERE = Path(__file__).resolve().parent
DRIVERS = HERE.parent / "conformance" / "drivers"
# Two ranks of 1 GiB of cache and 0.6 GiB of their own, two front ends, a coordinator; measured 5 GiB at the most.
NEEDED_MIB = 6 * 1024

SETTINGS = {
    # Two cores for two ranks and two front ends: no pools of threads.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Virtual machines may announce matrix instructions that they then refuse.
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
ARGS = (
    *("--served-model-name", "example/tiny", "--load-format", "dummy", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "256", "--max-num-seqs", "8"),
)


class Vllm:
    """Writes deployments of real vLLM and tiny models: another image would do, here it is another template."""

    def __init__(self, root: Path, assets: Path) -> None:
        self.root, self._assets = root, assets
        python = root / "venv" / "bin" / "python"
        ask = [python, "-c", "import sys; print(sys.base_prefix)"]
        base = subprocess.run(ask, check=True, text=True, capture_output=True).stdout.strip()
        self._folders = list(dict.fromkeys(["/usr", base, str(root), str(assets)]))

    def deployment(
        self, name: str, kind: str, *, version: str | None = None, python_path: tuple[Path, ...] = (), **changes: Any
    ) -> Object:
        """Two ranks of a model of this kind, Dense or MoE."""
        paths = [*python_path, self._assets / "plugin"]
        env = SETTINGS | {
            "PATH": f"{self.root}/venv/bin:/usr/bin:/bin",
            "PYTHONPATH": ":".join(str(path) for path in paths),
        }
        manifest = dpd(
            name,
            size=2,
            model={"name": str(self._assets / f"tiny-{kind.lower()}"), "architecture": kind},
            engine={
                # `vllm serve`, whose script has the path in it at which the environment was built.
                "command": ["python3", "-m", "vllm.entrypoints.cli.main", "serve"],
                "sharedMemory": "256Mi",
                "resources": {"requests": {"cpu": "1500m"}},
                "env": [{"name": key, "value": value} for key, value in env.items()],
            },
            startup={"timeoutSeconds": 600},
            failurePolicy={"backoffSeconds": 1},
            template=_mounting(self._folders),
            **changes,
        )
        engine = manifest["spec"]["engine"]
        engine["args"] = list(ARGS)
        engine["version"] = version
        return manifest


def _mounting(folders: list[str]) -> Object:
    """A pod template that shows these folders of the node to an engine that is root, as in vLLM's own images."""
    named = [(f"machine-{number}", folder) for number, folder in enumerate(folders)]
    engine = {
        "name": "engine",
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": name, "mountPath": folder, "readOnly": True} for name, folder in named],
    }
    volumes = [{"name": name, "hostPath": {"path": folder, "type": "Directory"}} for name, folder in named]
    return {"spec": {"containers": [engine], "volumes": volumes}}


@pytest.fixture(scope="session")
def vllm(bed: Bed | KindCluster, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    if isinstance(bed, KindCluster):
        pytest.skip("kind's nodes do not see the environment with real vLLM on this machine")
    root = environment.place()
    if not root.exists():
        reason = environment.shortage() or "run `python3 -m tests.conformance.environment`"
        pytest.skip(f"real vLLM is not installed: {reason}")
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available_mib = int(found[1]) // 1024 if found else 0
    if available_mib < NEEDED_MIB:
        pytest.skip(f"{available_mib} MiB of memory are available, two ranks of real vLLM need {NEEDED_MIB}")
    return Vllm(root, _assets(root, tmp_path_factory.mktemp("assets")))


def _assets(root: Path, folder: Path) -> Path:
    """Two tiny models, and the plugin as if pip had installed it."""
    metadata = folder / "plugin" / "cpu_plugin-0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy2(HERE / "cpu_plugin.py", folder / "plugin")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-plugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu = cpu_plugin:register\n")
    make = [root / "venv" / "bin" / "python", DRIVERS / "tiny_models.py", folder]
    subprocess.run(make, check=True, timeout=120, capture_output=True)
    return folder
