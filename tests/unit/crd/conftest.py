from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dp_operator import api

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def crd_path() -> Path:
    return ROOT / "crds" / "dataparallel.io_dataparalleldeployments.yaml"


@pytest.fixture(scope="session")
def schema(crd_path: Path) -> dict[str, Any]:
    """The OpenAPI schema of the committed CRD."""
    return yaml.safe_load(crd_path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.fixture
def spec_of() -> Callable[[str], api.Spec]:
    """Build a spec with one way of assigning devices."""

    def build(assignment: str) -> api.Spec:
        spec = {
            "model": {"name": "m", "architecture": "Dense"},
            "engine": {"image": "i"},
            "dataParallel": {"size": 8},
            "devices": {"assignment": assignment},
        }
        return msgspec.convert(spec, api.Spec)

    return build
