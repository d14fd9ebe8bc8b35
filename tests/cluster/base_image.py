"""The base of our images on the bed: Debian with Python and pip, made from Debian's packages.

Nothing can be pulled, so `ARG BASE` of the two Dockerfiles gets this instead of python:3.11-slim.
"""

import hashlib
import os
from pathlib import Path

from . import oci
from .buildah import buildah
from .commands import attempt, run
from .console import step
from .paths import cache_dir

SUITE = "bookworm"
PACKAGES = (
    "base-files",
    "coreutils",
    "dash",
    "findutils",
    "grep",
    "libc-bin",
    "libstdc++6",
    "procps",
    "python3",
    "python3-minimal",
    "python3-pip",
    "sed",
)
EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
    "/usr/lib/*/gconv/*",
    "/usr/lib/python3.11/pydoc_data/*",
)
# "extract" runs no package scripts, so what they would make is made here.
_ACCOUNTS = (
    "--extract-hook=printf 'root:x:0:0:root:/root:/bin/sh\\nnonroot:x:65532:65532::/tmp:/bin/sh\\n' > \"$1/etc/passwd\" && "
    "printf 'root:x:0:\\nnonroot:x:65532:\\n' > \"$1/etc/group\" && "
    'mkdir -p "$1/tmp" && chmod 1777 "$1/tmp"'
)


def key() -> str:
    """Changes with everything that goes in."""
    words = "\0".join([SUITE, *PACKAGES, *EXCLUDED, _ACCOUNTS, oci.architecture()])
    return hashlib.sha256(words.encode()).hexdigest()[:20]


def ensure() -> str:
    """Reference of the base image in buildah's store, made if it is not there."""
    reference = f"localhost/dp-base:{key()}"
    if attempt(buildah("inspect", "--type", "image", reference)).returncode != 0:
        tree = _tree()
        with step("making the base image"):
            container = run(buildah("from", "scratch")).strip()
            run(buildah("add", container, tree, "/"))
            run(buildah("commit", "--rm", container, reference))
    return reference


def _tree() -> Path:
    """The file system as a tar file in the cache."""
    target = cache_dir() / "base" / f"{key()}.tar"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.tar")
        argv: list[str | Path] = [
            "mmdebstrap",
            "--variant=extract",
            f"--include={','.join(PACKAGES)}",
            "--aptopt=Apt::Install-Recommends false",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED),
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            _ACCOUNTS,
            SUITE,
            unfinished,
            *_sources(),
        ]
        with step("Debian packages of the base image"):
            try:
                run(argv)
                unfinished.rename(target)
            finally:
                unfinished.unlink(missing_ok=True)
    return target


def _sources() -> list[Path]:
    """The machine's own package sources if they are of the same Debian; mmdebstrap knows the default ones."""
    if f"VERSION_CODENAME={SUITE}\n" not in Path("/etc/os-release").read_text():
        return []
    apt = Path("/etc/apt")
    candidates = [apt / "sources.list", apt / "sources.list.d" / "debian.sources"]
    return [path for path in candidates if path.exists()]
