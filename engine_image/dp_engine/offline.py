"""Offline data parallelism: `python -m dp_engine.offline MODEL --prompts FILE -dp N`, without any server.

As with vLLM, every rank is a process of its own that reads VLLM_DP_RANK, _RANK_LOCAL, _SIZE, _MASTER_IP and _MASTER_PORT, has
one engine over ipc and no coordinator, and takes its share of the prompts (one a line). Ranks of a lock-stepped group
meet at the master's address and step until nobody has work; a rank without a prompt gets one to keep it in step.
Results come back as JSON lines in the order of the prompts: {"rank", "index", "prompt", "text", "finish_reason"}.
Several nodes: --nnodes and --node-rank, and the same master on all; each node writes the results of its own ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from dp_engine import launcher, logs, processes
from dp_engine.client import EngineClient, EngineDeadError
from dp_engine.front_end import StartError
from dp_engine.modes import Launch, is_moe, resolve
from dp_engine.options import Options, parse_options
from dp_engine.processes import Child, Stopper
from dp_engine.tokens import END_OF_TEXT, Detokenizer, encode_text
from dp_engine.versions import wire_of
from dp_engine.wire import FINISH_NAMES

FILLER = "Placeholder"  # a rank without prompts must step with the others


class Work(Struct, frozen=True, kw_only=True):
    """What every rank of one run has in common."""

    options: Options
    prompts: list[str]
    size: int
    max_tokens: int
    folder: str  # where ranks leave their results


class Result(Struct, frozen=True, kw_only=True):
    """One answer. `index` is the prompt's line, from 0."""

    rank: int
    index: int
    prompt: str
    text: str
    finish_reason: str


def share(prompts: int, *, rank: int, size: int) -> range:
    """Indexes of one rank's prompts: contiguous, and the first ranks take one more when it does not come out even."""
    each, more = divmod(prompts, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@contextlib.contextmanager
def _rank_variables(*, rank: int, local_rank: int, size: int, master_ip: str, master_port: int) -> Iterator[None]:
    names = {
        "VLLM_DP_RANK": rank,
        "VLLM_DP_RANK_LOCAL": local_rank,
        "VLLM_DP_SIZE": size,
        "VLLM_DP_MASTER_IP": master_ip,
        "VLLM_DP_MASTER_PORT": master_port,
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_rank(work: Work) -> int:
    """One rank's process: its engine, its prompts, its results. Returns the exit code."""
    options = work.options
    launch = resolve(options, moe=is_moe(options), env=os.environ)
    rank = launch.start_rank
    children: list[Child] = []
    try:
        local_rank = int(os.environ.get("VLLM_DP_RANK_LOCAL") or 0)
        node = launcher.start_node(options, launch, children, listener=None, first_local_rank=local_rank)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = launcher.bind_sockets(context, launch, wire_of(options.version))
        stopper = Stopper()
        if launcher.shake_hands(node, [sockets.endpoints], context, stopper) is None:
            return 1
        client = EngineClient(
            ranks=launch.managed_ranks,
            client=0,
            clients=1,
            waves=launch.coordinated,
            family=wire_of(options.version),
            inputs=sockets.inputs,
            outputs=sockets.outputs,
            stats=None,
            metrics=node.metrics.writer(0),
        )
        results = asyncio.run(_answer_unless_stopped(_answer_all(work, launch, client, node.engines), stopper))
        if results is None:
            logs.info(f"DP rank {rank}: told to stop")
            return 1
        with open(os.path.join(work.folder, str(rank)), "wb") as file:
            file.write(msgspec.json.encode(results))
    except (StartError, EngineDeadError) as failure:
        logs.error(str(failure))
        return 1
    else:
        return 0
    finally:
        processes.stop(children)


async def _answer_unless_stopped(answering: Coroutine[Any, Any, list[Result]], stopper: Stopper) -> list[Result] | None:
    """None when a signal comes first."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(answering)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    if stopper.requested:
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _answer_all(work: Work, launch: Launch, client: EngineClient, engines: list[Child]) -> list[Result]:
    loop = asyncio.get_running_loop()
    for engine in engines:
        loop.add_reader(engine.pidfd, client.die, "the rank's engine ended")
    await client.connect(timeout_s=600)
    rank = launch.start_rank
    mine = share(len(work.prompts), rank=rank, size=work.size)
    logs.info(f"DP rank {rank} needs to process {len(mine)} prompts")

    async def answer(index: int, prompt: str) -> Result:
        sampling: dict[str, Any] = {"max_tokens": work.max_tokens, "output_kind": 1, "_eos_token_id": END_OF_TEXT}
        detokenizer, text, finish = Detokenizer(), "", "abort"
        async for delta in client.generate(f"offline-{index}", encode_text(prompt), sampling, position=None):
            text += detokenizer.feed(delta.token_ids, final=delta.finish is not None)
            if delta.finish is not None:
                finish = FINISH_NAMES[delta.finish]
        return Result(rank=rank, index=index, prompt=prompt, text=text, finish_reason=finish)

    results = await asyncio.gather(*(answer(index, work.prompts[index]) for index in mine))
    if not mine:
        await answer(-1, FILLER)
    # A rank that left now would break the others' last common steps.
    while launch.coordinated and not client.finished_waves:
        client.check_alive()
        await asyncio.sleep(0.01)
    for engine in engines:
        loop.remove_reader(engine.pidfd)
    client.close()
    return results


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Options]:
    parser = argparse.ArgumentParser(prog="dp-engine offline", add_help=False, allow_abbrev=False)
    parser.add_argument("--prompts", required=True, help="a file with one prompt a line")
    parser.add_argument("--output", help="JSON lines; default: standard output")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--dp-master-ip", default="127.0.0.1")
    parser.add_argument("--dp-master-port", type=int)
    own, rest = parser.parse_known_args(argv)
    return own, parse_options(rest, prog="dp-engine offline")


def run(argv: list[str]) -> int:
    """Start this node's ranks, gather their results. Raises ValueError for what vLLM refuses, OSError for bad files."""
    own, asked = _parse(argv)
    size, nodes = asked.data_parallel_size, asked.nnodes
    if size % nodes or not 0 <= asked.node_rank < nodes:
        raise ValueError(f"--data-parallel-size {size} must be divisible by --nnodes {nodes}, and --node-rank below it")
    if nodes > 1 and own.dp_master_port is None:
        raise ValueError("--nnodes > 1 needs --dp-master-port, the same on every node")
    with open(own.prompts, encoding="utf-8") as file:
        prompts = [line.rstrip("\n") for line in file if line.strip()]
    # To each rank's process the group is known by the variables alone.
    options = msgspec.structs.replace(asked, data_parallel_size=1, data_parallel_size_local=None, nnodes=1, node_rank=0)
    port = own.dp_master_port or launcher.group_ports()[0]
    local = size // nodes
    ranks = range(asked.node_rank * local, (asked.node_rank + 1) * local)
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Work(options=options, prompts=prompts, size=size, max_tokens=own.max_tokens, folder=folder)
        try:
            for local_rank, rank in enumerate(ranks):
                with _rank_variables(
                    rank=rank, local_rank=local_rank, size=size, master_ip=own.dp_master_ip, master_port=port
                ):
                    resolve(options, moe=is_moe(options), env=os.environ)
                    child = processes.fork(
                        f"Offline_DP{rank}",
                        lambda: run_rank(work),
                        title=f"VLLM::Offline_DP{rank}",
                        command=f"VLLM::OFF_{rank}",
                    )
                    children.append(child)
            if not _all_succeed(children):
                logs.error(f"Rank process(es) failed: {processes.finished(children)}")
                return 1
            _write(own.output, [result for rank in ranks for result in _results(folder, rank)])
        finally:
            processes.stop(children)
    return 0


def _all_succeed(children: list[Child]) -> bool:
    """Wait for all; False as soon as one has failed, or when told to stop."""
    stopper = Stopper()
    running = list(children)
    while running:
        processes.wait_for_any(running, wake_fd=stopper.fd)
        codes = [child.exit_code() for child in running]
        if stopper.requested or any(codes):
            return False
        running = [child for child, code in zip(running, codes, strict=True) if code is None]
    return True


def _results(folder: str, rank: int) -> list[Result]:
    with open(os.path.join(folder, str(rank)), "rb") as file:
        return msgspec.json.decode(file.read(), type=list[Result])


def _write(path: str | None, results: list[Result]) -> None:
    lines = b"".join(msgspec.json.encode(result) + b"\n" for result in sorted(results, key=lambda item: item.index))
    if path is None:
        sys.stdout.buffer.write(lines)
        sys.stdout.flush()
        return
    with open(path, "wb") as file:
        file.write(lines)


def main(argv: list[str]) -> int:
    """Entry point. Exit codes: 0, 1 for a refused combination or a failed rank, 2 for bad syntax."""
    try:
        return run(argv)
    except (ValueError, OSError) as failure:
        logs.error(f"{type(failure).__name__}: {failure}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
