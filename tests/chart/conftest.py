from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "dp-operator"

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Run helm; its result is the caller's to judge."""
    own = ROOT / ".cluster/bin/helm"
    binary = os.environ.get("HELM") or (str(own) if own.exists() else shutil.which("helm"))
    if binary is None:
        pytest.fail("these tests need helm: set HELM, or run `make up`, which leaves .cluster/bin/helm")

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([binary, *args], capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., list[dict[str, Any]]]:
    """Objects of the chart, with the given `--set` values."""

    def objects(*values: str, release: str = "dp-operator") -> list[dict[str, Any]]:
        settings = [part for value in values for part in ("--set-json", value)]
        done = helm("template", release, str(CHART), "--namespace", "dp-system", *settings)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return objects
