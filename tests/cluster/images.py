"""Building our two images and loading them on every node, as little of it as has changed.

Three levels: a node that has the right image is left alone; an image whose inputs were built before is only loaded;
and a build after a change of sources repeats only the layers that hold sources. Nodes get only layers they lack.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import base_image, containers, oci
from .bed import Bed
from .buildah import buildah, tidy
from .commands import attempt, run
from .console import say, step
from .errors import BedError
from .kind import KindCluster
from .paths import CHECKOUT, STATE, cache_dir

# glibc of Debian 12 is 2.36: wheels for anything up to it run there.
_GLIBC = ("2_36", "2_35", "2_34", "2_31", "2_28", "2_26", "2_24", "2_17", "2_12", "2_5")
PYTHON = "3.11"


@dataclass(frozen=True)
class Image:
    """One of our images. Paths are relative to the checkout."""

    reference: str
    folder: str
    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its short name, for folders and messages."""
        return self.reference.split("/")[-1].split(":")[0]


OPERATOR = Image("localhost/dp-operator:dev", "operator", ("dp_operator", "dp_handshake"))
ENGINE = Image("localhost/dp-engine:dev", "engine_image", ("dp_engine",))
IMAGES = (OPERATOR, ENGINE)


def ensure(bed: Bed | KindCluster) -> None:
    """Bring both images to every node."""
    for image in IMAGES:
        _check_complete(image)
    if isinstance(bed, KindCluster):
        for image in IMAGES:
            with step(f"building {image.reference}"):
                run([bed.engine, "build", "-f", f"{image.folder}/Dockerfile", "-t", image.reference, "."], cwd=CHECKOUT)
            archive = STATE / f"{image.name}.tar"
            with step(f"loading {image.reference}"):
                run([bed.engine, "save", "-o", archive, image.reference])
                bed.load(archive)
                archive.unlink()
        return
    there = {name: bed.images_on(name) for name in bed.nodes}
    for image in IMAGES:
        layout = _layout(image)
        wanted = oci.manifest_of(layout)["digest"]
        lacking = [name for name in bed.nodes if there[name].get(image.reference) != wanted]
        if lacking:
            _load(image, layout, lacking)
        else:
            say(f"{image.reference}: all nodes have it")


def ensure_variant(bed: Bed | KindCluster, reference: str, context: Path) -> None:
    """Build the operator anew from a copy of its folder that somebody has changed, and bring it to every node.

    `context` is laid out as the checkout. To be called after `ensure`, so that as a rule only the changed layers are built.
    """
    image = Image(reference, OPERATOR.folder, OPERATOR.packages)
    if isinstance(bed, KindCluster):
        run([bed.engine, "build", "-f", f"{image.folder}/Dockerfile", "-t", reference, "."], cwd=context)
        archive = context / "image.tar"
        run([bed.engine, "save", "-o", archive, reference])
        bed.load(archive)
        return
    layout = context / "layout"
    base = base_image.ensure()
    _provide_wheels(image, context)  # the image in the cache may have been built from another checkout
    _build(image, base, layout, context=context)
    _load(image, layout, bed.nodes)


def inputs_digest(image: Image, checkout: Path) -> str:
    """Digest of everything that the image is made from."""
    folder = checkout / image.folder
    files = [checkout / ".dockerignore", folder / "Dockerfile", folder / "requirements.lock"]
    files += [path for package in image.packages for path in _sources(folder / package)]
    digest = hashlib.sha256(base_image.key().encode())
    for path in files:
        mode = "x" if os.access(path, os.X_OK) else "-"
        digest.update(f"{path.relative_to(checkout)} {mode} {_file_digest(path)}\n".encode())
    return digest.hexdigest()[:20]


def _sources(package: Path) -> Iterator[Path]:
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_complete(image: Image) -> None:
    folder = CHECKOUT / image.folder
    absent = [name for name in ("requirements.lock", *image.packages) if not (folder / name).exists()]
    if absent:
        raise BedError(f"{image.reference} cannot be built: {image.folder} has no {', '.join(absent)}.")


def _layout(image: Image) -> Path:
    """The built image as an OCI layout in the cache; built if its inputs are new."""
    shelf = cache_dir() / "images" / image.name
    target = shelf / inputs_digest(image, CHECKOUT)
    if not target.exists():
        base = base_image.ensure()
        _provide_wheels(image, CHECKOUT)
        shelf.mkdir(parents=True, exist_ok=True)
        unfinished = shelf / f".{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        with step(f"building {image.reference}"):
            tidy()
            _build(image, base, unfinished)
        for old in shelf.iterdir():
            if old != unfinished:
                shutil.rmtree(old, ignore_errors=True)
        unfinished.rename(target)
    return target


def _build(image: Image, base: str, layout: Path, *, context: Path = CHECKOUT) -> None:
    argv = ["bud", "--layers", "--pull-never", "--format", "oci", "-f", f"{image.folder}/Dockerfile"]
    arguments = [f"BASE={base}", "PIP_ARGS=--no-index --find-links /in"]
    options = [word for argument in arguments for word in ("--build-arg", argument)]
    run(buildah(*argv, *options, "-t", image.reference, "."), cwd=context)
    run(buildah("push", image.reference, f"oci:{layout}:latest"))


def _load(image: Image, layout: Path, nodes: Sequence[str]) -> None:
    with step(f"loading {image.reference} on {', '.join(nodes)}"), ThreadPoolExecutor() as pool:
        for done in [pool.submit(_import, name, image, layout) for name in nodes]:
            done.result()


def _import(node: str, image: Image, layout: Path) -> None:
    archive = STATE / f"{image.name}-{node}.tar"
    present = frozenset(containers.ctr(node, "content", "ls", "-q").split())
    try:
        for there in (present, frozenset[str]()):
            oci.write_archive(layout, image.reference, there, archive)
            done = attempt(containers.ctr_argv(node, "images", "import", archive))
            if done.returncode == 0:
                return
        raise BedError(f"{node} does not take {image.reference}: {done.stderr.strip()}")
    finally:
        archive.unlink(missing_ok=True)


def _provide_wheels(image: Image, context: Path) -> None:
    """Put the wheels of the lock file into the build context: the build itself has no network."""
    lock = context / image.folder / "requirements.lock"
    cached = cache_dir() / "wheels" / f"{_file_digest(lock)[:20]}-{oci.architecture()}"
    if not cached.exists():
        unfinished = cached.with_name(f".{cached.name}.{os.getpid()}")
        with step(f"downloading the wheels of {image.reference}"):
            run([*_pip(), "download", *_pip_options(), "--dest", unfinished, "--requirement", lock])
        unfinished.rename(cached)
    folder = context / image.folder / "wheels"
    wanted = {path.name: path for path in cached.iterdir()}
    for stale in folder.glob("*.whl"):
        if stale.name not in wanted:
            stale.unlink()
    for name, path in wanted.items():
        if not (folder / name).exists():
            shutil.copy2(path, folder / name)


def _pip_options() -> Iterable[str]:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[oci.architecture()]
    platforms = [f"manylinux_{version}_{machine}" for version in _GLIBC] + [f"manylinux2014_{machine}"]
    return [
        "--disable-pip-version-check",
        "--quiet",
        "--require-hashes",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
        "--implementation=cp",
        *(f"--platform={platform}" for platform in platforms),
    ]


def _pip() -> list[str]:
    for python in (sys.executable, "python3"):
        if attempt([python, "-m", "pip", "--version"]).returncode == 0:
            return [python, "-m", "pip"]
    raise BedError("The images need wheels, and there is no pip to download them: install python3-pip.")
