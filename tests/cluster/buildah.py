"""buildah with a store of its own in the cache, so that it never touches the user's images."""

from pathlib import Path

from .commands import run
from .paths import RUN, cache_dir

# Every build of changed sources leaves a few small images that hold the cached layers.
_TOO_MANY_IMAGES = 400


def buildah(*words: str | Path) -> list[str]:
    """The command line of a buildah command."""
    store = ["--root", cache_dir() / "buildah", "--runroot", RUN / "buildah", "--storage-driver", "overlay"]
    # chroot needs no privileges beyond root's ordinary ones.
    return ["env", "BUILDAH_ISOLATION=chroot", "buildah", *(str(word) for word in [*store, *words])]


def tidy() -> None:
    """Empty the store when it has grown too large; the next build fills it anew."""
    if len(run(buildah("images", "-a", "-q")).split()) > _TOO_MANY_IMAGES:
        run(buildah("rmi", "--all", "--force"))
