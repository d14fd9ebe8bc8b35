"""When an image is stale, and which layers a node gets."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.cluster import oci
from tests.cluster.images import ENGINE, inputs_digest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "engine_image" / "dp_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / ".dockerignore").write_text("*\n")
    for name in ("Dockerfile", "requirements.lock"):
        (tmp_path / "engine_image" / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", ["Dockerfile", "requirements.lock", "dp_engine/__init__.py", "dp_engine/new.py"])
def test_a_change_of_any_input_makes_the_image_stale(checkout: Path, name: str) -> None:
    before = inputs_digest(ENGINE, checkout)

    (checkout / "engine_image" / name).write_text("changed")

    assert inputs_digest(ENGINE, checkout) != before


def test_bytecode_and_other_files_do_not_make_the_image_stale(checkout: Path) -> None:
    before = inputs_digest(ENGINE, checkout)

    cache = checkout / "engine_image" / "dp_engine" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_text("")
    (checkout / "README.md").write_text("")

    assert inputs_digest(ENGINE, checkout) == before


def test_an_archive_leaves_out_the_blobs_that_the_node_has(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(oci.single_file_image("localhost/a:1", "a", b"program"))) as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    blobs = {f"sha256:{path.name}" for path in (tmp_path / "layout" / "blobs" / "sha256").iterdir()}
    manifest = oci.manifest_of(tmp_path / "layout")["digest"]

    oci.write_archive(tmp_path / "layout", "localhost/a:2", blobs - {manifest}, tmp_path / "thin.tar")

    with tarfile.open(tmp_path / "thin.tar") as thin:
        names = set(thin.getnames())
        index = thin.extractfile("index.json")
        assert index is not None
        assert b'"io.containerd.image.name": "localhost/a:2"' in index.read()
    assert names == {"oci-layout", "index.json", f"blobs/sha256/{manifest.removeprefix('sha256:')}"}
