"""The table of docs/compatibility.md. Needs no vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tests.conformance import report
from tests.conformance.conftest import SHORTAGE, Run
from tests.conformance.report import RELEASES, Table
from tests.conformance.test_command_lines import LINES
from tests.conformance.test_recorded_verdicts import ENGINE_CASES, HEAD_CASES

MODES, RELAY = ("hybrid", "external"), ("", ", behind our relay,")
COLUMNS = [(release, kind) for release in RELEASES for kind in ("dense", "MoE")]


def page_with(rows: dict[str, list[str]]) -> str:
    table = Table()
    for role, words in rows.items():
        for (release, kind), word in zip(COLUMNS, words, strict=True):
            with table.cell(role, release, moe=kind == "MoE", seen=word):
                pass
    return report.replace_region("<!-- table -->\n<!-- /table -->", "table", table.markdown())


Lay = Callable[..., Path]


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lay:
    """Make this text the page, which a run is asked to write: `1` all of it, `part` a part."""

    def to(text: str, *, asked: str = "1") -> Path:
        path = tmp_path / "page.md"
        path.write_text(text)
        monkeypatch.setattr(report, "PAGE", path)
        monkeypatch.setenv(report.WRITE_ENV, asked)
        return path

    return to


# Rows by what their tests are parametrized with or read.
ROWS = {
    *(
        f"{size} engines of vLLM, led by our head with {servers}"
        for size in (2, 4)
        for servers in ("1 API server", "2 API servers")
    ),
    *(f"{size} of our engines{where}, led by vLLM's head" for size in (2, 4) for where in ("", " behind our relay")),
    *(f"{mode}: our ranks{where} in pods of vLLM" for mode in MODES for where in RELAY),
    *(f"{mode}: ranks of vLLM{where} in our pods" for mode in MODES for where in RELAY),
    *(f"deaf on all inputs after a malformed request, process up: {whose}" for whose in ("our rank", "a rank of vLLM")),
    "our coordinator and engines, vLLM's handshake and client",
    "our engines behind a whole `vllm serve`",
    "a whole headless vLLM behind our head",
    "the operator's command lines, all examples, at vLLM's parser",
    "20000 injured frames at our head, engine and coordinator",
    f"{len(HEAD_CASES)} recorded handshakes at our head",
    f"{len(ENGINE_CASES)} recorded INITs at our engine",
    f"{len(LINES)} command lines at our parser",
}


def test_the_committed_page_shows_every_row_of_today_and_no_other() -> None:
    cells = report.read_cells(report.PAGE.read_text())
    assert {role for role, _, _ in cells} == ROWS
    assert set(cells.values()) <= {"yes", "neither"}


def test_what_was_written_is_read_again() -> None:
    page = page_with({"a role": ["yes", "neither", *["yes"] * 6]})
    assert "| a role | yes | neither (3) | yes |" in page
    assert report.NOTES[3] in page
    assert report.read_cells(page)["a role", "0.11", "MoE"] == "neither"
    assert len(report.read_cells(page)) == 8


def test_a_part_of_the_suite_keeps_the_other_cells(lay: Lay) -> None:
    path = lay(page_with({"old": ["yes"] * 8, "both": ["yes"] * 8}), asked="part")
    table = Table()
    with pytest.raises(AssertionError), table.cell("both", "0.33.0", moe=True):
        raise AssertionError
    table.save()
    cells = report.read_cells(path.read_text())
    assert [cells["both", "0.33", kind] for kind in ("dense", "MoE")] == ["yes", "fails"]
    assert cells["old", "0.11", "dense"] == "yes"


def test_a_hole_that_nothing_explains_fails_a_whole_run(lay: Lay) -> None:
    lay("<!-- table -->\n<!-- /table -->")
    table = Table()
    with table.cell("a role", "0.33.0", moe=True):
        pass
    with pytest.raises(ValueError, match=r"a role, 0\.11 dense: no run filled this cell"):
        table.save()


@pytest.mark.parametrize("shortfall", ["skipped", "failed", "deselected", None])
def test_a_whole_run_of_which_something_is_missing_leaves_the_page_as_it_was(lay: Lay, shortfall: str | None) -> None:
    path = lay(page := page_with({"whole": ["yes"] * 8, "other": ["yes"] * 8}))
    run = Run()
    with run.table.cell("whole", "0.11.0", moe=None, seen="neither"):
        pass
    if shortfall:
        run.counts[shortfall] += 2
    status = 2 if shortfall is None else 0  # Ctrl-C
    assert run.end(status) == status
    assert (shortfall or "interrupted") in run.words[0]
    assert path.read_text() == page


@pytest.mark.parametrize(
    ("outcome", "words", "counts"),
    [("skipped", SHORTAGE, True), ("skipped", "0.11 serves them", False), ("failed", "", True)],
)
def test_only_what_was_short_or_failed_is_missing_from_a_run(
    outcome: Literal["skipped", "failed"], words: str, counts: bool
) -> None:
    run = Run()
    nodeid = "tests/conformance/test_pods.py::test"
    run.saw(pytest.TestReport(nodeid, ("", 1, ""), {}, outcome, ("", 1, f"Skipped: {words}"), "setup"))
    assert run.counts == ({outcome: 1} if counts else {})


def test_a_whole_run_without_a_row_of_the_page_fails_and_leaves_it(lay: Lay) -> None:
    path = lay(page := page_with({"kept": ["yes"] * 8, "lost": ["yes"] * 8}))
    run = Run()
    for release in RELEASES:
        with run.table.cell("kept", release, moe=None):
            pass
    assert run.end(0) == 1
    assert "lost" in run.words[0]
    assert path.read_text() == page
    with run.table.cell("lost", "0.11", moe=None):
        pass
    for release in RELEASES[1:]:
        with run.table.cell("lost", release, moe=None, seen="neither"):
            pass
    assert run.end(0) == 0
    assert report.read_cells(path.read_text())["lost", "0.33", "MoE"] == "neither"


def test_what_two_workers_saw_becomes_one_page_with_its_rows_where_they_were(lay: Lay) -> None:
    path = lay(page := page_with({"first": ["yes"] * 8, "second": ["yes"] * 8}))
    run = Run()
    for role in ("second", "first"):
        worker = Run()
        for release in RELEASES:
            with worker.table.cell(role, release, moe=None):
                pass
        run.add(json.loads(json.dumps(worker.part())))
    assert run.end(0) == 0
    assert path.read_text() == page


def test_what_a_worker_left_out_is_missing_from_the_run(lay: Lay) -> None:
    lay(page_with({"a role": ["yes"] * 8}))
    worker, run = Run(), Run()
    with worker.table.cell("a role", "0.11.0", moe=None):
        pass
    worker.counts["deselected"] = 3
    run.add(worker.part())
    assert run.end(0) == 0
    assert "3 tests deselected" in run.words[0]
