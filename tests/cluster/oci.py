"""Image archives in the OCI layout, written so that a node gets only the layers it lacks."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_INDEX = "application/vnd.oci.image.index.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def architecture() -> str:
    """This machine's architecture in the words of OCI."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def digest(data: bytes) -> str:
    """Name of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def single_file_image(reference: str, name: str, content: bytes) -> bytes:
    """An archive with an image that holds one executable and starts it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.mode, entry.size = 0o755, len(content)
        tar.addfile(entry, io.BytesIO(content))
    body = layer.getvalue()
    config = _json(
        {
            "architecture": architecture(),
            "os": "linux",
            "config": {"Entrypoint": [f"/{name}"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [digest(body)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [_descriptor(_LAYER, body)],
        }
    )
    blobs = {digest(one): one for one in (body, config, manifest)}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _add_frame(tar, reference, _descriptor(_MANIFEST, manifest))
        for blob_name, data in blobs.items():
            _add(tar, _blob_path(blob_name), data)
    return archive.getvalue()


def manifest_of(layout: Path) -> dict[str, Any]:
    """Descriptor of the one image in an OCI layout directory."""
    (found,) = json.loads((layout / "index.json").read_text())["manifests"]
    descriptor: dict[str, Any] = found
    return descriptor


def write_archive(layout: Path, reference: str, present: AbstractSet[str], target: Path) -> int:
    """Pack the image of a layout for `ctr images import`, without the blobs that are `present` on the node.

    containerd looks a blob up in its store whether it came with this archive or not. Returns the bytes of blobs
    that were packed.
    """
    descriptor = manifest_of(layout)
    manifest = json.loads(_blob(layout, descriptor["digest"]).read_bytes())
    wanted = [descriptor["digest"], manifest["config"]["digest"], *(one["digest"] for one in manifest["layers"])]
    packed = 0
    with tarfile.open(target, mode="w") as tar:
        _add_frame(tar, reference, {key: descriptor[key] for key in ("mediaType", "digest", "size")})
        for name in dict.fromkeys(wanted):
            if name not in present:
                packed += _blob(layout, name).stat().st_size
                tar.add(_blob(layout, name), arcname=_blob_path(name))
    return packed


def _add_frame(tar: tarfile.TarFile, reference: str, descriptor: Mapping[str, object]) -> None:
    named = {**descriptor, "annotations": {"io.containerd.image.name": reference}}
    _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    _add(tar, "index.json", _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size = 0o644, len(data)
    tar.addfile(entry, io.BytesIO(data))


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest(data), "size": len(data)}


def _blob(layout: Path, name: str) -> Path:
    return layout / _blob_path(name)


def _blob_path(name: str) -> str:
    return "blobs/" + name.replace(":", "/")


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
