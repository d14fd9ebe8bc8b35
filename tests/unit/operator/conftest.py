"""`--golden` (make golden) writes the golden files anew instead of comparing with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--golden"):
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        assert path.exists(), f"{name} is missing; `make golden` writes it"
        assert text == path.read_text(), f"{name} differs; `make golden` rewrites it, then review the diff"

    return compare
