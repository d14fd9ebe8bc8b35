"""The table of docs/compatibility.md. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.report import RELEASES, Table

COLUMNS = [(release, kind) for release in RELEASES for kind in ("dense", "MoE")]


def page_with(rows: dict[str, list[str]]) -> str:
    table = Table()
    for role, words in rows.items():
        for (release, kind), word in zip(COLUMNS, words, strict=True):
            with table.cell(role, release, moe=kind == "MoE", seen=word):
                pass
    return report.replace_region("<!-- table -->\n<!-- /table -->", "table", table.markdown())


def test_what_was_written_is_read_again() -> None:
    page = page_with({"a role": ["yes", "neither", *["yes"] * 6]})
    assert "| a role | yes | neither (3) | yes |" in page
    assert report.NOTES[3] in page
    assert report.read_cells(page)["a role", "0.11", "MoE"] == "neither"
    assert len(report.read_cells(page)) == 8


def test_a_part_of_the_suite_keeps_the_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text(page_with({"old": ["yes"] * 8, "both": ["yes"] * 8}))
    monkeypatch.setattr(report, "PAGE", path)
    monkeypatch.setenv(report.WRITE_ENV, "part")
    table = Table()
    with pytest.raises(AssertionError), table.cell("both", "0.33.0", moe=True):
        raise AssertionError
    table.save()
    cells = report.read_cells(path.read_text())
    assert [cells["both", "0.33", kind] for kind in ("dense", "MoE")] == ["yes", "fails"]
    assert cells["old", "0.11", "dense"] == "yes"


def test_a_hole_that_nothing_explains_fails_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- table -->\n<!-- /table -->")
    monkeypatch.setattr(report, "PAGE", path)
    monkeypatch.setenv(report.WRITE_ENV, "1")
    table = Table()
    with table.cell("a role", "0.33.0", moe=True):
        pass
    with pytest.raises(ValueError, match=r"a role, 0\.11 dense: no run filled this cell"):
        table.save()
