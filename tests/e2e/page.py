"""Figures of docs/lifecycle.md, measured by the tests that prove what the page says."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conformance.report import replace_region

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md"
WRITE_ENV = "LIFECYCLE_WRITE"


def show(region: str, table: str) -> None:
    """Print a table, and write it into its region of the page where the run was asked to."""
    print(f"\n{table}")
    if os.environ.get(WRITE_ENV):
        PAGE.write_text(replace_region(PAGE.read_text(), region, table))
