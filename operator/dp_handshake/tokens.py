"""Whether ranks with running requests make tokens: what /metrics shows from one look to the next. Pure.

The gauges of a rank come with its outputs, so those of a rank that hangs stay at what they last were (protocol notes
§8): requests run, and the count of tokens stands still.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dp_handshake.addresses import endpoint
from dp_handshake.messages import LaunchPlan, Stall

MAX_STALLS = 16
# Prompt tokens are counted once a prompt has been read, which for a long one is the only progress for a while.
_LINE = re.compile(
    r"^vllm:(num_requests_running|generation_tokens_total|prompt_tokens_total)\{([^}]*)\} (\S+)", re.MULTILINE
)
_ENGINE = re.compile(r'(?:^|,)engine="(\d+)"')


class Counts(NamedTuple):
    """One rank at one look."""

    running: float
    tokens: float


def counts(page: str) -> dict[int, Counts]:
    """Rank -> what a page of /metrics says of it. Raises ValueError where a value is no number."""
    found: dict[int, Counts] = {}
    for name, labels, value in _LINE.findall(page):
        engine = _ENGINE.search(labels)
        if engine is None:
            continue
        rank, amount = int(engine.group(1)), float(value)
        before = found.get(rank, Counts(0.0, 0.0))
        if name == "num_requests_running":
            found[rank] = before._replace(running=before.running + amount)
        else:
            found[rank] = before._replace(tokens=before.tokens + amount)
    return found


def urls(plan: LaunchPlan, head_ip: str, ips: list[str]) -> list[str]:
    """Where to look: an Internal head shows all ranks; elsewhere every pod shows its own, under a supervisor by port."""
    ports = range(plan.api_port, plan.api_port + (plan.size_local if plan.health_port else 1))
    hosts = [head_ip] if plan.load_balancing == "Internal" else ips
    return [f"{endpoint(host, port, plan.api_scheme.lower())}/metrics" for host in hosts for port in ports]


class Watch:
    """Since when each busy rank has made no token."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, float]] = {}  # rank -> (tokens, when they were first seen)
        self.stalls: list[Stall] = []  # by time, the oldest MAX_STALLS

    def take(self, seen: dict[int, Counts], *, now: float) -> None:
        """Take in one look. Of a rank whose page could not be read nothing is told, until a look shows it again."""
        for rank, (running, tokens) in seen.items():
            if not running:
                self._since.pop(rank, None)
            elif self._since.get(rank, (None, now))[0] != tokens:
                self._since[rank] = (tokens, now)
        found = [
            Stall(rank=rank, since=since) for rank, (_, since) in self._since.items() if rank in seen and since < now
        ]
        self.stalls = sorted(found, key=lambda stall: (stall.since, stall.rank))[:MAX_STALLS]
