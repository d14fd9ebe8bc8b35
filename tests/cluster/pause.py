"""The pause image, from a few lines of C: nothing can be pulled on the bed."""

import hashlib
import os
from pathlib import Path

from . import containers, oci
from .commands import run
from .paths import SOURCES, cache_dir

PAUSE_IMAGE = "localhost/dp-pause:1"


def ensure(node: str, image: Path) -> None:
    """Load it on the node unless it is there."""
    if PAUSE_IMAGE not in containers.ctr(node, "images", "ls", "-q").split():
        containers.ctr(node, "images", "import", image)


def archive() -> Path:
    """The image as an archive in the cache, compiled when its source is new."""
    source = SOURCES / "pause.c"
    target = cache_dir() / "pause" / f"{hashlib.sha256(source.read_bytes()).hexdigest()[:20]}.tar"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        program = target.with_suffix(f".{os.getpid()}")
        run(["gcc", "-Os", "-static", "-s", "-o", program, source])
        unfinished = target.with_suffix(f".{os.getpid()}.tar")
        unfinished.write_bytes(oci.single_file_image(PAUSE_IMAGE, "pause", program.read_bytes()))
        program.unlink()
        unfinished.rename(target)
    return target
