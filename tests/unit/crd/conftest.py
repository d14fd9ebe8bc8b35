from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def crd_path() -> Path:
    return ROOT / "crds" / "dataparallel.io_dataparalleldeployments.yaml"


@pytest.fixture(scope="session")
def schema(crd_path: Path) -> dict[str, Any]:
    """The OpenAPI schema of the committed CRD."""
    return yaml.safe_load(crd_path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
