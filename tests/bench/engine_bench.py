"""Our front end and our handshake beside vLLM's, with the same stand-in ranks, in one run.

    python tests/bench/engine_bench.py [--ranks 8] [--requests 400] [--rounds 7] [--only handshake] [--write]

Requests: two groups of `--ranks` dense stand-in ranks that answer as fast as they can, one led by `dp-engine serve`, one
by vLLM 0.32's `serve` (one API server each, a tiny model's tokenizer at vLLM's). Both stay up; one client process asks
one of them at a time for completions of eight tokens, one at a time (latency) and 32 at a time (throughput). Handshake:
ranks are DEALERs in one process that say HELLO, wait for INIT, say READY and close; time runs from the first HELLO to
the last READY at the head. In both, heads take turns for `--rounds` rounds, the first of a round by turns too; a ratio is
the median of the rounds' ratios. Everything shares this machine. Prints Markdown; `--write` puts it into
docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "operator"), str(REPOSITORY / "engine_image")]

import aiohttp  # noqa: E402
import zmq  # noqa: E402

from dp_engine.front_end import run_handshake  # noqa: E402
from dp_engine.handshake import Addresses, Expected, FrontEndHandshake, Init  # noqa: E402
from dp_engine.processes import Stopper  # noqa: E402
from tests.bench.ranks import be_all_ranks  # noqa: E402
from tests.conformance import environment, report  # noqa: E402
from tests.conformance.conftest import DRIVERS, WHOLE, Api, Bed, Vllm  # noqa: E402
from tests.ports import free_port  # noqa: E402

TOKENS = 8
AT_ONCE = 32
PAGE = REPOSITORY / "docs" / "performance.md"
SIZES = (1024, 4096)
Heads = dict[str, Callable[[Bed, int, int], None]]
Load = tuple[float, float, float]


# --- Requests ---------------------------------------------------------------------------------------------------------
async def _ask(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds until the answer was complete."""
    body = {"model": "m", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True}
    started = time.perf_counter()
    async with session.post(url, json=body) as response:
        answer = await response.json()
    if answer["usage"]["completion_tokens"] != TOKENS:
        raise SystemExit(f"an answer of another length: {answer}")
    return time.perf_counter() - started


async def _load(port: int, requests: int) -> Load:
    """(median seconds alone, 95th percentile alone, requests per second at AT_ONCE)."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(_ask(session, url) for _ in range(AT_ONCE)))  # warm
        alone = sorted([await _ask(session, url) for _ in range(requests // 4)])
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                await _ask(session, url)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        rate = requests / (time.perf_counter() - started)
    return statistics.median(alone), alone[len(alone) * 95 // 100], rate


def start_group(bed: Bed, start_head: Callable[[Bed, int, int], None], ranks: int) -> Api:
    """A head and its ranks; its API may not listen yet."""
    api, rpc = Api(bed, free_port()), free_port()
    start_head(bed, api.port, rpc)
    group = ("-dp", str(ranks), "-dpl", str(ranks), "-dpr", "0", "-dpa", "127.0.0.1", "-dpp", str(rpc))
    bed.engine("--headless", *group, "--no-moe", "--tokens-per-second", "0", version=WHOLE)
    return api


def measure_requests(start_heads: Heads, *, ranks: int, requests: int, rounds: int) -> list[dict[str, Load]]:
    """What each head did under load, round by round."""
    with tempfile.TemporaryDirectory(prefix="b") as directory:
        bed = Bed(Path(directory))
        try:
            ports = {name: start_group(bed, start, ranks) for name, start in start_heads.items()}
            end = time.monotonic() + 240
            while any(api.call("/health")[0] != 200 for api in ports.values()):
                if time.monotonic() > end:
                    raise SystemExit(bed.logs())
                time.sleep(0.2)
            found = []
            for number in range(rounds):
                order = list(ports) if number % 2 == 0 else list(reversed(ports))
                found.append({name: asyncio.run(_load(ports[name].port, requests)) for name in order})
            return found
        finally:
            bed.stop()


def heads(vllm: Vllm, model: Path, ranks: int) -> Heads:
    def common(api: int, rpc: int) -> tuple[str, ...]:
        group = ("-dp", str(ranks), "-dpl", "0", "-dpa", "127.0.0.1", "-dpp", str(rpc))
        return (*group, "--host", "127.0.0.1", "--port", str(api), "--api-server-count", "1")

    def ours(bed: Bed, api: int, rpc: int) -> None:
        bed.engine(*common(api, rpc), "--no-moe", "--disable-uvicorn-access-log", version=WHOLE, name="head")

    def theirs(bed: Bed, api: int, rpc: int) -> None:
        command = [str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        flags = ("--served-model-name", "m", "--load-format", "dummy", "--disable-uvicorn-access-log")
        bed.start("vllm", [*command, *flags, *common(api, rpc)], vllm.env(WHOLE, bed.directory))

    return {"ours": ours, "vLLM": theirs}


def compare_requests(vllm: Vllm, *, ranks: int, requests: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = [str(vllm.python), str(DRIVERS / "tiny_models.py"), folder]
        subprocess.run(script, check=True, env=vllm.env(WHOLE, Path(folder)), capture_output=True)
        start_heads = heads(vllm, Path(folder) / "tiny-dense", ranks)
        found = measure_requests(start_heads, ranks=ranks, requests=requests, rounds=rounds)
    what = f"{ranks} stand-in ranks, completions of {TOKENS} tokens, median of {rounds} pairs"
    lines = [f"| {what} | our front end | vLLM {WHOLE}'s | ours / vLLM's |", "|---|---|---|---|"]
    rows = (
        ("one at a time, median", 1000, ".2f", "ms"),
        ("one at a time, 95th percentile", 1000, ".2f", "ms"),
        (f"{AT_ONCE} at a time", 1, ".0f", "requests/s"),
    )
    for column, (name, factor, form, unit) in enumerate(rows):
        one, other = (statistics.median(pair[side][column] for pair in found) * factor for side in ("ours", "vLLM"))
        ratio = statistics.median(pair["ours"][column] / pair["vLLM"][column] for pair in found)
        lines.append(f"| {name} | {one:{form}} {unit} | {other:{form}} {unit} | {ratio:.2f} |")
    return "\n".join(lines)


# --- Handshake --------------------------------------------------------------------------------------------------------
def our_head(pipe: Connection, port: int, size: int) -> None:
    machine = FrontEndHandshake(
        expected=[Expected(rank=rank, local=False) for rank in range(size)],
        init=Init(addresses=Addresses(inputs=["tcp://127.0.0.1:1"], outputs=["tcp://127.0.0.1:2"]), parallel_config={}),
        remote_headless=True,
        config_hash=None,
    )
    begun_s = time.process_time()
    pipe.send("listening")
    run_handshake(
        machine,
        context=zmq.Context(),
        address=f"tcp://127.0.0.1:{port}",
        children=[],
        stopper=Stopper(),
        fault_list=(),
    )
    pipe.send((time.monotonic(), time.process_time() - begun_s))


def measure_handshake(vllm: Vllm | None, size: int) -> tuple[float, float]:
    """(seconds from the first HELLO to the last READY, CPU seconds of the head meanwhile); None is our head."""
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    rank_pipe, rank_end = spawn.Pipe()
    processes = [spawn.Process(target=be_all_ranks, args=(rank_end, port, size))]
    with tempfile.TemporaryDirectory(prefix="b") as directory:
        bed = Bed(Path(directory))
        try:
            if vllm is None:
                head_pipe, head_end = spawn.Pipe()
                processes.append(spawn.Process(target=our_head, args=(head_end, port, size)))
                processes[1].start()
                head_pipe.recv()
            else:
                case = vllm.release(WHOLE).case(bed, "handshake_cost", size=size, port=port)
                case.message("listening", within_s=120)
            processes[0].start()
            rank_pipe.recv()
            rank_pipe.send("go")
            started = float(rank_pipe.recv())
            ended, cpu_s = head_pipe.recv() if vllm is None else case.message("done", within_s=120)
            rank_pipe.send("end")
            return ended - started, cpu_s
        finally:
            bed.stop()
            for process in processes:
                if process.pid is not None:
                    process.join(10)
                    process.kill()


def compare_handshakes(vllm: Vllm, *, rounds: int) -> str:
    lines = [
        f"| handshake, median of {rounds} pairs | our loop | vLLM {WHOLE}'s loop | ours / vLLM's |",
        "|---|---|---|---|",
    ]
    for size in SIZES:
        pairs = []
        for number in range(rounds):
            order = (None, vllm) if number % 2 == 0 else (vllm, None)
            found = {one: measure_handshake(one, size) for one in order}
            pairs.append((found[None], found[vllm]))
        for column, what in enumerate(("HELLO to last READY", "CPU of the head")):
            one, other = (statistics.median(pair[side][column] for pair in pairs) for side in (0, 1))
            ratio = statistics.median(ours[column] / theirs[column] for ours, theirs in pairs)
            lines.append(f"| {size:,} ranks, {what} | {one:.2f} s | {other:.2f} s | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["handshake", "requests"])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    root = environment.place()
    if not root.exists():
        print("skipped: real vLLM is not installed; run `python3 -m tests.conformance.environment`")
        return
    with tempfile.TemporaryDirectory(prefix="b") as directory:
        vllm = Vllm(root, Path(directory))
        try:
            measures = {
                "handshake": lambda: compare_handshakes(vllm, rounds=options.rounds),
                "requests": lambda: compare_requests(
                    vllm, ranks=options.ranks, requests=options.requests, rounds=options.rounds
                ),
            }
            for name, measure in measures.items():
                if options.only in {None, name}:
                    table = measure()
                    print(f"{table}\n", flush=True)
                    if options.write:
                        PAGE.write_text(report.replace_region(PAGE.read_text(), f"bench {name}", table))
        finally:
            vllm.stop()


if __name__ == "__main__":
    main()
