"""Time the handshake of N ranks through the relay beside the same ranks straight at the head.

    python tests/bench/handshake_bench.py [--ranks 1024 4096] [--rounds 3]

Each round runs both, one after the other, in alternating order. Ranks are DEALERs in one process, the head is
vLLM's loop (own words) in another, the relay is the sidecar's process; all share this machine. A rank sends HELLO,
waits for INIT, sends READY and closes. Time runs from the first HELLO until the head has all READY; every process is
up and, with the relay, its port open before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2] / "operator")]

import zmq  # noqa: E402

from dp_handshake.messages import LaunchPlan, WorkerSet  # noqa: E402
from tests.bench.ranks import be_all_ranks  # noqa: E402
from tests.component.handshake.play import (  # noqa: E402
    RelayProcess,
    address_of,
    head_loop,
    init_message,
    make_plan,
    many_sockets,
)
from tests.ports import free_ports  # noqa: E402

RANKS_PER_POD = 64


def head(pipe: Connection, port: int, size: int) -> None:
    """Be the head of a Dedicated group: every rank is remote."""
    with many_sockets() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.SNDHWM, 0)
        router.set(zmq.RCVHWM, 0)
        router.bind(f"tcp://127.0.0.1:{port}")
        pipe.send("listening")
        head_loop(router, size=size, head_ranks=0, init=init_message())
        pipe.send(time.monotonic())


def measure(size: int, *, relay: bool) -> float:
    """Give the seconds of one handshake."""
    pods = size // RANKS_PER_POD
    plan = make_plan(
        size=size,
        size_local=RANKS_PER_POD,
        head_placement="Dedicated",
        workers=[WorkerSet(name="g-w", replicas=pods, first_rank=0, rank_stride=RANKS_PER_POD)],
        rpc_port=free_ports(2),
    )
    spawn = multiprocessing.get_context("spawn")
    head_pipe, head_end = spawn.Pipe()
    rank_pipe, rank_end = spawn.Pipe()
    processes = [
        spawn.Process(target=head, args=(head_end, plan.rpc_port + 1, size)),
        spawn.Process(
            target=be_all_ranks, args=(rank_end, plan.rpc_port if relay else plan.rpc_port + 1, size, RANKS_PER_POD)
        ),
    ]
    sidecar: RelayProcess | None = None
    with tempfile.TemporaryDirectory() as directory:
        try:
            for process in processes:
                process.start()
            head_pipe.recv()
            rank_pipe.recv()
            if relay:
                sidecar = _open_relay(plan, Path(directory), pods)
            rank_pipe.send("go")
            started = float(rank_pipe.recv())
            if not head_pipe.poll(120):
                raise SystemExit("the handshake did not end within 120 s")
            elapsed = float(head_pipe.recv()) - started
            if sidecar is not None and os.environ.get("VERBOSE"):
                memory = Path(f"/proc/{sidecar.worker_pid()}/status").read_text()
                print([line for line in memory.splitlines() if line.startswith(("VmHWM", "VmRSS"))])
        finally:
            if sidecar is not None:
                sidecar.close()
            rank_pipe.send("end")
            for process in processes:
                process.join(10)
                process.kill()
    return elapsed


def _open_relay(plan: LaunchPlan, directory: Path, pods: int) -> RelayProcess:
    sidecar = RelayProcess(plan, directory)
    addresses = {f"g-w-{pod}": address_of(pod) for pod in range(pods)}
    sidecar.check_in_all({**addresses, plan.head_pod: "127.0.0.1"})
    sidecar.until(lambda snapshot: snapshot.listening_at is not None)
    return sidecar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'ranks':>6} {'direct s':>9} {'relay s':>9} {'ratio':>6}   (median of {options.rounds} paired rounds)")
    for size in options.ranks:
        direct, relayed = [], []
        for number in range(options.rounds):
            for relay in (False, True) if number % 2 == 0 else (True, False):
                (relayed if relay else direct).append(measure(size, relay=relay))
        ratio = statistics.median(one / other for one, other in zip(relayed, direct, strict=True))
        print(
            f"{size:>6} {statistics.median(direct):>9.2f} {statistics.median(relayed):>9.2f} {ratio:>6.2f}", flush=True
        )


if __name__ == "__main__":
    main()
