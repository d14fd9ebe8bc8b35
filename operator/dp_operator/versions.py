"""Which vLLM release is inside an image, as far as it can be known without running it."""

from __future__ import annotations

import functools
import re

from dp_operator.api import Spec

NEWEST_KNOWN = "0.33"

# Repositories whose tags are vLLM versions, wherever they are mirrored. Other images carry version numbers of their own
# products, those of the same organisation and those that are called after vLLM too.
_VLLM_REPOSITORIES = re.compile(r"(^|/)vllm-(openai(-rocm|-cpu|-xpu)?|cpu|(arm64-)?cpu-release-repo)$")
_VERSION_TAG = re.compile(r"^v?(\d+\.\d+(?:\.\d+)?)(?:[.-]?(?:post|rc)\d+)?(?:-.*)?$")


@functools.lru_cache(maxsize=1024)
def from_image(image: str) -> str | None:
    """Version that the tag of a vllm/vllm-openai-like image names ("0.32.0"), or None.

    None for digests, for tags such as nightly or latest, and for images of other products.
    """
    if "@" in image:
        image = image.split("@", 1)[0]
    repository, separator, tag = image.rpartition(":")
    if not separator or "/" in tag:  # a colon before a slash is a registry's port
        return None
    if not _VLLM_REPOSITORIES.search(repository):
        return None
    match = _VERSION_TAG.match(tag)
    return match.group(1) if match else None


def known(spec: Spec) -> str | None:
    """Version that a spec names, by field or by the tag of its image; None where it has to be assumed."""
    return spec.engine.version or from_image(spec.engine.image)


def order(version: str) -> tuple[int, ...]:
    """Sort key of a version string; one that cannot be read sorts last."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match.group(1).split(".")) if match else (1_000_000,)


def parse(version: str) -> tuple[int, int]:
    """(major, minor) of a version string that begins with two numbers; ValueError otherwise."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        raise ValueError(f"{version!r} is not a version such as 0.32 or 0.32.1")
    return int(match.group(1)), int(match.group(2))
