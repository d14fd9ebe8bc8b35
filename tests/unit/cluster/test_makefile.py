"""Which cluster the targets of the Makefile act on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OWN = str(ROOT / ".cluster/kubeconfig")
SHOW = "show: ; @echo $$KUBECONFIG"


def make(*words: str, **environment: str) -> str:
    env = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "KUBECONFIG"))}
    argv = ["make", "--no-print-directory", "-C", str(ROOT), *words]
    return subprocess.run(argv, env={**env, **environment}, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("given", ["/prod/config", ""])
def test_nothing_but_install_sees_the_kubeconfig_of_the_shell(given: str) -> None:
    assert make("--eval", SHOW, "show", KUBECONFIG=given).strip() == OWN
    for target in ("demo", "e2e", "chart", "survival", "bench", "test"):
        assert "/prod" not in make("-n", target, KUBECONFIG=given)
    assert make("--eval", SHOW, "show", "KUBECONFIG=/prod/config").strip() == OWN


def test_install_goes_to_the_cluster_of_the_shell_if_it_has_one_and_names_it() -> None:
    assert 'export KUBECONFIG="/prod/config"' in make("-n", "install", KUBECONFIG="/prod/config")
    assert f'export KUBECONFIG="{OWN}"' in make("-n", "install", KUBECONFIG="")
    recipe = make("-n", "install")
    assert recipe.index("installing the operator in $server") < recipe.index("helm upgrade")


def test_help_lists_every_command_of_the_readme() -> None:
    listed = make("help")
    for target in ("up", "down", "demo", "test", "lint", "unit", "component", "e2e", "install", "survival"):
        assert f"make {target} " in listed
