"""The modules that pyproject.toml calls pure have no clock, no chance, no socket, no process and no file.

import-linter keeps them from harness and clients, through everything that they import. Of the standard library only what
a module imports itself matters: a module that is imported for its pure half may have another one.
"""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMPURE = {
    "asyncio",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
NOW = {"now", "utcnow", "today"}


def pure_modules():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (names,) = [contract["source_modules"] for contract in contracts if contract["name"].startswith("pure modules")]
    for name in names:
        path = ROOT / "operator" / Path(*name.split("."))
        yield from sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def impurities(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in IMPURE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in IMPURE:
            yield node.module
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in NOW
            and ast.unparse(node.value).endswith(("datetime", "date"))
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield "open()"


@pytest.mark.parametrize("path", list(pure_modules()), ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_pure_module_has_no_clock_no_chance_and_no_outside(path):
    assert list(impurities(path.read_text())) == []


def test_what_is_impure_is_noticed():
    source = "import time\nfrom random import choice\nimport os.path\nx = datetime.now(UTC)\nopen('f')\nimport json\n"
    assert sorted(impurities(source)) == ["datetime.now", "open()", "os.path", "random", "time"]
    assert len(list(pure_modules())) > 20
