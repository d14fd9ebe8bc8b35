"""Kubernetes, etcd and Helm, built from the Go module proxy into a cache keyed by everything that goes in.

Each folder under `binaries/` is a Go module of its own, because the three need different versions of the same
dependencies. A program is built under a temporary name and renamed when it is complete, so a build that was cut
off leaves nothing that looks finished.
"""

import hashlib
import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .commands import run
from .console import step
from .errors import BedError
from .paths import BIN, SOURCES, cache_dir

KUBERNETES_VERSION = "v1.35.4"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = " ".join(
    [
        "-s -w",
        f"-X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}",
        f"-X {_VERSION_PACKAGE}.gitMajor=1",
        f"-X {_VERSION_PACKAGE}.gitMinor=35",
    ]
)


@dataclass(frozen=True)
class Program:
    """One program: its name, the module folder it is built in, its Go package and linker flags."""

    name: str
    module: str
    package: str
    ldflags: str = "-s -w"


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_LDFLAGS)


# In the order in which somebody who waits can use them.
PROGRAMS = (
    _kubernetes("kube-apiserver"),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    _kubernetes("kubectl"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm", "-s -w -X helm.sh/helm/v4/internal/version.version=v4.3.1"),
)
CLIENTS = ("kubectl", "helm")


def cache_key(module_files: Iterable[bytes], go_version: str, program: Program) -> str:
    """Name of the cache folder: every input of the build is in it."""
    digest = hashlib.sha256()
    for part in [*module_files, go_version.encode(), program.package.encode(), program.ldflags.encode()]:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def built(program: Program, go_version: str) -> Path:
    """Where the finished program is, or will be."""
    module = SOURCES / "binaries" / program.module
    files = [(module / name).read_bytes() for name in ("go.mod", "go.sum")]
    return cache_dir() / "bin" / cache_key(files, go_version, program) / program.name


def ensure(names: Sequence[str] = ()) -> dict[str, Path]:
    """Build what is not in the cache yet; returns the path of every program asked for (all by default)."""
    wanted = [one for one in PROGRAMS if not names or one.name in names]
    version = _go_version()
    paths = {one.name: built(one, version) for one in wanted}
    lacking = [one for one in wanted if not paths[one.name].exists()]
    for number, program in enumerate(lacking, start=1):
        with step(f"[{number}/{len(lacking)}] building {program.name}"):
            _build(program, paths[program.name])
    return paths


def link_clients(paths: Mapping[str, Path]) -> None:
    """Put kubectl and helm under `.cluster/bin`."""
    BIN.mkdir(parents=True, exist_ok=True)
    for name in CLIENTS:
        link = BIN / name
        fresh = BIN / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(paths[name])
        fresh.rename(link)


def _go() -> str:
    found = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin")
    if found is None:
        raise BedError("The embedded cluster builds Kubernetes from source: install Go 1.26 or newer (or use kind).")
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false -mod=readonly"}


def _go_version() -> str:
    return f"{run([_go(), 'env', 'GOVERSION'], env=_environment()).strip()} {platform.machine()}"


def _build(program: Program, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    argv = [_go(), "build", "-trimpath", "-ldflags", program.ldflags, "-o", unfinished, program.package]
    try:
        run(argv, env=_environment(), cwd=SOURCES / "binaries" / program.module)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
