"""Progress that a person can follow, and waiting for conditions with a deadline."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import BedError

HEARTBEAT_S = 15.0
POLL_S = 0.2


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a long step, repeat it with its age every 15 s, and print what it took."""
    began = time.monotonic()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            say(f"{text} … {time.monotonic() - began:.0f} s")

    say(f"{text} …")
    beater = threading.Thread(target=beat, daemon=True)
    beater.start()
    try:
        yield
    finally:
        over.set()
        beater.join()
    say(f"{text}: {time.monotonic() - began:.1f} s")


def wait_until(what: str, seen: Callable[[], str | None], deadline_s: float) -> None:
    """Poll until `seen` returns None; it returns what is still missing otherwise.

    Raises BedError with the last thing seen once the deadline is over.
    """
    began = time.monotonic()
    told = began
    while True:
        missing = seen()
        if missing is None:
            return
        now = time.monotonic()
        if now - began > deadline_s:
            raise BedError(f"{what}: not after {deadline_s:.0f} s. Last seen: {missing}")
        if now - told >= HEARTBEAT_S:
            told = now
            say(f"waiting for {what} … {now - began:.0f} s ({missing})")
        time.sleep(POLL_S)
