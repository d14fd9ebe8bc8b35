"""Running other programs: their whole output in the error when they fail."""

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import BedError

# str() is all that is done to them; a list of str and Path is inferred as a list of objects.
Words = Iterable[object]


def run(
    argv: Words,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a program to its end and return its standard output; BedError with its output if it fails."""
    words = [str(word) for word in argv]
    done = attempt(words, env=env, cwd=cwd, stdin=stdin)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise BedError(f"`{' '.join(words)}` failed with exit code {done.returncode}:\n{said}")
    return done.stdout


def attempt(
    argv: Words,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program whose failure is an answer."""
    return subprocess.run(
        [str(word) for word in argv],
        env=env,
        cwd=cwd,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
    )
