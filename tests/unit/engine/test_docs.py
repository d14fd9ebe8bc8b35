"""docs/engine.md names what is there: functions, fault kinds, flags and variables."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import dp_engine
from dp_engine import faults
from dp_engine.options import build_parser

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "engine.md").read_text()
MODULES = {found.name for found in pkgutil.iter_modules(dp_engine.__path__)}
SOURCES = "\n".join(path.read_text() for path in Path(dp_engine.__path__[0]).glob("*.py"))


def section(title):
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_column(text):
    """Names in backquotes in the first column of the section's tables."""
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def exists(dotted):
    module, *names = dotted.split(".")
    found = importlib.import_module(f"dp_engine.{module}")
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_every_function_of_the_page_exists():
    dotted = [name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE) if name.partition(".")[0] in MODULES]
    assert len(dotted) > 30
    assert [name for name in dotted if not exists(name)] == []
    methods = re.findall(r"\b([A-Z]\w+)\.([a-z_]+)", section("One request through the code").partition("```\n\n")[0])
    assert len(methods) > 15
    classes = {
        name: item
        for module in MODULES - {"__main__"}
        for name, item in inspect.getmembers(importlib.import_module(f"dp_engine.{module}"), inspect.isclass)
    }
    assert [f"{name}.{method}" for name, method in methods if not hasattr(classes[name], method)] == []


def test_the_page_lists_every_module_once_as_pure_or_not():
    listed = section("One request through the code").partition("Pure, and tested")[2]
    names = {name.partition(".")[0] for name in re.findall(r"`([a-z_.A-Z]+)`", listed)}
    small = {"__main__", "data_sockets", "endpoints", "environment", "logs", "metrics", "options"}
    assert names - {"tests"} == MODULES - small


def test_the_page_has_every_fault_once():
    assert first_column(section("Faults")) == set(faults.KINDS)


def test_the_page_has_every_flag_of_the_engine_itself():
    group = next(one for one in build_parser("x", "0.33")._action_groups if one.title == "stand-in engine")
    flags = {flag for action in group._group_actions for flag in action.option_strings}
    listed = {name.split()[0] for name in first_column(section("Flags of its own"))}
    assert listed - {"--no-moe"} == {flag for flag in flags if not flag.startswith("--no-")}


def test_every_variable_of_the_page_is_read_somewhere():
    names = set(re.findall(r"`((?:VLLM|DP_ENGINE)_[A-Z_]+[A-Z])`", section("Environment")))
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in SOURCES] == []
