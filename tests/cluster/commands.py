"""Running other programs: their whole output in the error when they fail."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import BedError


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a program to its end and return its standard output; BedError with its output if it fails."""
    done = attempt(argv, env=env, cwd=cwd, stdin=stdin)
    if done.returncode != 0:
        words = " ".join(str(a) for a in argv)
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise BedError(f"`{words}` failed with exit code {done.returncode}:\n{said}")
    return done.stdout


def attempt(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program whose failure is an answer."""
    return subprocess.run(
        [str(a) for a in argv],
        env=env,
        cwd=cwd,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
    )
