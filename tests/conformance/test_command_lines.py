"""Which command lines start something: vLLM's own `serve` of four releases, and our engine emulating each.

`data/command_lines.txt` holds a line for each: what 0.11, 0.17, 0.32 and 0.33 do (+ starts, - refused), the kind of
model, the arguments. Without vLLM our engine is held against the table, with it the table against vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from dp_engine.modes import resolve
from dp_engine.options import parse_options
from tests.conformance.conftest import IMPORT_S, RELEASES, Bed, Release
from tests.conformance.report import Table

PATH = Path(__file__).parent / "data" / "command_lines.txt"
# Lines in which we differ on purpose, and why.
DIFFERENT = json.loads((PATH.parent / "command_lines_different.json").read_text())


class Line(NamedTuple):
    started_by: dict[str, bool]
    kind: str
    arguments: str


def read_table() -> list[Line]:
    lines = []
    for text in PATH.read_text().splitlines():
        if not text.startswith("#"):
            marks, kind, arguments = text[:7].split(), text[8:14].strip(), text[14:].strip()
            lines.append(Line(dict(zip(RELEASES, [mark == "+" for mark in marks], strict=True)), kind, arguments))
    return lines


LINES = read_table()


def we_start(line: Line, version: str) -> bool:
    own = ["--emulate-version", version, "--moe" if line.kind == "moe" else "--no-moe"]
    try:
        resolve(parse_options(["m", *line.arguments.split(), *own]), moe=line.kind == "moe")
    except (ValueError, SystemExit):
        return False
    return True


@pytest.mark.parametrize("name", RELEASES)
def test_our_engine_starts_and_refuses_what_the_release_does(
    name: str, compatibility: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    with compatibility.cell(f"{len(LINES)} command lines at our parser", name, moe=None):
        wrong = [
            f"{line.kind} {line.arguments}: vLLM {'starts' if line.started_by[name] else 'refuses'}"
            for line in LINES
            if we_start(line, RELEASES[name]) != line.started_by[name]
            and f"{line.kind} {line.arguments}" not in DIFFERENT
        ]
        capsys.readouterr()
        assert not wrong, "\n".join(wrong)


def test_every_difference_is_one() -> None:
    for line in LINES:
        if f"{line.kind} {line.arguments}" in DIFFERENT:
            assert any(we_start(line, RELEASES[name]) != line.started_by[name] for name in RELEASES), line


def test_the_table_says_what_vllm_does(release: Release, bed: Bed) -> None:
    case = release.case(
        bed, "command_lines", lines=[[line.kind, line.arguments] for line in LINES], folder=str(bed.directory)
    )
    case.message("done", within_s=2 * IMPORT_S)
    said = {message["line"]: message for message in case.messages() if "line" in message}
    wrong = [
        f"{line.kind} {line.arguments}: {said[number]}"
        for number, line in enumerate(LINES)
        if said[number]["accepted"] != line.started_by[release.name]
    ]
    assert not wrong, "\n".join(wrong)
