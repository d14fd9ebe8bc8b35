"""What the pods of a hybrid or external group are told, whoever plays them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal, NamedTuple

from tests.component.handshake.play import RelayProcess, make_plan
from tests.conformance.conftest import Bed
from tests.ports import free_port

Mode = Literal["hybrid", "external"]
MODES: tuple[Mode, ...] = ("hybrid", "external")


class Pods(NamedTuple):
    """Two pods, of two ranks each (hybrid) or one (external)."""

    mode: Mode
    moe: bool

    @property
    def local(self) -> int:
        return 2 if self.mode == "hybrid" else 1

    @property
    def size(self) -> int:
        return 2 * self.local

    @property
    def firsts(self) -> tuple[int, int]:
        return 0, self.local

    def arguments(self, first: int, port: int, version: str) -> list[str]:
        """What `serve` of the pod with this first rank is given."""
        if self.mode == "external" and self.moe:
            mine = ["--data-parallel-rank", str(first)]
        else:
            # A hybrid pod of one rank is external, also with a dense model, of which newer releases refuse a rank.
            mine = ["--data-parallel-hybrid-lb", "-dpl", str(self.local), "-dpr", str(first)]
        group = ["-dp", str(self.size), "-dpa", "127.0.0.1", "-dpp", str(port)]
        own = ["--moe" if self.moe else "--no-moe", "--parallel-config-hash", "HASH", "--emulate-version", version]
        return ["m", *mine, *group, *own]


class Ports:
    """Where the pods shake hands: with the head, or, off the head's pod, with our relay in front of it."""

    def __init__(self, pods: Pods, *, relay: bool) -> None:
        names = {"hybrid": "Hybrid", "external": "External"}
        self._plan = (
            make_plan(size=pods.size, size_local=pods.local, load_balancing=names[pods.mode]) if relay else None
        )
        self.others = self._plan.rpc_port if self._plan else free_port()
        self.head = self._plan.rpc_port + 1 if self._plan else self.others

    def head_is_up(self, stack: ExitStack, bed: Bed) -> None:
        """Start the relay, if there is one, now that the head listens."""
        if self._plan is None:
            return
        sidecar = RelayProcess(self._plan, bed.directory / "relay")
        stack.callback(sidecar.close)
        sidecar.check_in_all({"g-w-0": "127.0.0.1", self._plan.head_pod: "127.0.0.1"})
        sidecar.until(lambda snapshot: snapshot.listening_at is not None)
