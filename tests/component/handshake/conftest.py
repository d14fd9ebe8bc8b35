from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.component.handshake.play import Group, many_sockets


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """Sockets of the ranks."""
    with many_sockets() as context:
        yield context


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Make groups that end with the test."""
    made: list[Group] = []

    def make(**options: Any) -> Group:
        made.append(Group(tmp_path / f"group{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
