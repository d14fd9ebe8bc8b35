"""Which command lines start something: vLLM's own `serve` of four releases, and our engine emulating each.

`data/command_lines.txt` holds a line for each: what 0.11, 0.17, 0.32 and 0.33 do (+ starts, else the exit status), the
kind of model, the arguments. Without vLLM our engine is held against the table, with it the table against vLLM. The
operator's own command lines, of every example, go through vLLM's parsers as well.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dp_engine import __main__ as program
from dp_engine import launcher
from dp_engine.modes import is_moe, resolve
from dp_engine.options import Options
from tests.conformance.conftest import IMPORT_S, RELEASES, REPOSITORY, Bed, Release
from tests.conformance.report import Table

PATH = Path(__file__).parent / "data" / "command_lines.txt"
EXAMPLES = [*sorted((REPOSITORY / "examples").glob("*/*.yaml")), REPOSITORY / "examples" / "quickstart.yaml"]
# The stand-in's own flags in examples that run it: vLLM knows none of them.
OWN_FLAGS = {"--moe": 1, "--load-seconds": 2, "--fault": 2}
NOT_ON_CPU = {"--enable-eplb": 1}
# Examples whose author asks for something that the release does not have, and which the operator hands on unread.
ARGS_TOO_NEW = {("moe-deepep", "0.11.0.post2")}
# What a release cannot do, in the words in which the operator refuses it.
PLAN_REFUSES = {
    ("external-supervised", "0.11.0.post2"): "needs vLLM 0.22 or newer",
    ("external-supervised", "0.17.1"): "needs vLLM 0.22 or newer",
    ("internal-dedicated", "0.11.0.post2"): "0.14",
    ("dense-autoscaled", "0.11.0.post2"): "0.14",
}


class Line(NamedTuple):
    exits: dict[str, int | None]  # None: it starts something
    kind: str
    arguments: str


def read_table() -> list[Line]:
    lines = []
    for text in PATH.read_text().splitlines():
        if not text.startswith("#"):
            marks, kind, arguments = text[:7].split(), text[8:14].strip(), text[14:].strip()
            exits = [None if mark == "+" else int(mark) for mark in marks]
            lines.append(Line(dict(zip(RELEASES, exits, strict=True)), kind, arguments))
    return lines


LINES = read_table()


def our_exit(line: Line, version: str, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Exit status of `dp-engine serve`, or None when it would start something."""
    started: list[Options] = []

    def serve(options: Options) -> int:
        resolve(options, moe=is_moe(options))
        started.append(options)
        return 0

    own = ["--emulate-version", version, "--moe" if line.kind == "moe" else "--no-moe", "--platform", "cpu"]
    monkeypatch.setattr(launcher, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["dp-engine", "serve", "m", *line.arguments.split(), *own])
    try:
        status = program.main()
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    return None if started else status


@pytest.mark.parametrize("name", RELEASES)
def test_our_engine_starts_and_refuses_with_the_releases_exit_status(
    name: str, compatibility: Table, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with compatibility.cell(f"{len(LINES)} command lines at our parser", name, moe=None):
        ours = [our_exit(line, RELEASES[name], monkeypatch) for line in LINES]
        capsys.readouterr()
        wrong = [
            f"{line.kind} {line.arguments}: vLLM {line.exits[name]}, ours {status}"
            for line, status in zip(LINES, ours, strict=True)
            if status != line.exits[name]
        ]
        assert not wrong, "\n".join(wrong)


def judged(release: Release, bed: Bed, lines: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What this release does with each line."""
    case = release.case(bed, "command_lines", lines=lines, folder=str(bed.directory))
    case.message("done", within_s=2 * IMPORT_S)
    said = {message["line"]: message for message in case.messages() if "line" in message}
    return [said[number] for number in range(len(lines))]


def test_the_table_says_what_vllm_does(release: Release, bed: Bed) -> None:
    said = judged(release, bed, [(line.kind, line.arguments) for line in LINES])
    wrong = [
        f"{line.kind} {line.arguments}: {found}"
        for line, found in zip(LINES, said, strict=True)
        if found["exit"] != line.exits[release.name]
    ]
    assert not wrong, "\n".join(wrong)


def rendered(example: Path, version: str) -> tuple[int, str, list[list[str]]]:
    """(status, what it said, command lines from `serve MODEL` on) of `plan -o argv`."""
    result = subprocess.run(
        [sys.executable, "-m", "dp_operator", "plan", "-f", str(example), "-o", "argv", "--version", version],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY / "operator",
    )
    lines = []
    for text in result.stdout.splitlines():
        if not text.startswith("#") and text.strip():
            argv = shlex.split(text)
            lines.append(argv[argv.index("serve") + 2 :])
    return result.returncode, result.stderr, lines


def for_vllm_on_cpu(argv: list[str]) -> list[str]:
    kept, skip = [], 0
    for item in argv:
        skip = skip or {**OWN_FLAGS, **NOT_ON_CPU}.get(item, 0)
        if skip:
            skip -= 1
        else:
            kept.append(item)
    return kept


def test_vllm_starts_with_every_command_line_of_the_operator(release: Release, bed: Bed, compatibility: Table) -> None:
    with compatibility.cell("the operator's command lines, all examples, at vLLM's parser", release.name, moe=None):
        lines, names = [], []
        examples = [example for example in EXAMPLES if (example.stem, release.name) not in ARGS_TOO_NEW]
        for example in examples:
            status, said, argvs = rendered(example, release.name)
            if (refusal := PLAN_REFUSES.get((example.stem, release.name))) is not None:
                assert (status, refusal in said) == (1, True), said
                continue
            assert status == 0, f"{example}: {said}"
            kind = "moe" if "architecture: MoE" in example.read_text() else "dense"
            for argv in argvs:
                local = (
                    argv[argv.index("--data-parallel-size-local") + 1] if "--data-parallel-size-local" in argv else 1
                )
                told = {"HEAD_IP": "127.0.0.1", "START_RANK": str(local)}
                lines.append((kind, shlex.join(told.get(item, item) for item in for_vllm_on_cpu(argv))))
                names.append(example.stem)
        assert len(set(names)) + len([key for key in PLAN_REFUSES if key[1] == release.name]) == len(examples)
        wrong = [
            f"{name}: {line[1]}: {found}"
            for name, line, found in zip(names, lines, judged(release, bed, lines), strict=True)
            if found["exit"] is not None
        ]
        assert not wrong, "\n".join(wrong)
