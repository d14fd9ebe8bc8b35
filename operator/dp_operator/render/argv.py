"""The command line of the engine container, as a list. No shell, nothing to expand but address and first rank.

Four rules are easy to get wrong and each is tested by name:

* an Internal head never gets `--data-parallel-start-rank`: vLLM 0.28 and newer read any given value, 0 included, as
  hybrid load balancing (and as external where the local size is 1);
* `--headless` is for Internal workers alone: Hybrid and External pods serve, and vLLM ends if one says otherwise;
* `--data-parallel-hybrid-lb` stands on every Hybrid pod: before 0.28 a first node with start rank 0 was not taken for
  a hybrid one without it;
* the number of API servers is always given: 0.15 and newer would start one per rank.
"""

from __future__ import annotations

from dp_handshake import launch
from dp_handshake.messages import Fill, Versioned
from dp_operator import naming
from dp_operator.api import Spec
from dp_operator.render.shape import api_server_count, head_ranks, ranks_of, serves, supervised

ArgvItem = str | Fill | Versioned


def engine_argv(spec: Spec, role: str) -> list[ArgvItem]:
    """Command line of the engine container. Version-dependent items carry their range; the launcher decides."""
    argv: list[ArgvItem] = [*spec.engine.command, spec.model.name, "--port", str(spec.engine.port)]
    argv += _group(spec, role)
    argv += _mode(spec, role)
    if serves(spec, role):
        argv += ["--api-server-count", str(api_server_count(spec))]
    if spec.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.pipeline_parallel_size > 1:
        argv += ["--pipeline-parallel-size", str(spec.pipeline_parallel_size)]
    if spec.enable_expert_parallel:
        argv.append("--enable-expert-parallel")
    argv.append(Versioned(items=["--shutdown-timeout", str(spec.drain.timeout_seconds)], since="0.18"))
    if spec.model.architecture == "MoE" and spec.data_parallel.size > 1:
        timeout = ["--cpu-distributed-timeout-seconds", str(spec.startup.timeout_seconds)]
        argv.append(Versioned(items=list(timeout), since="0.22"))
    return [*argv, *spec.engine.args]


def _group(spec: Spec, role: str) -> list[ArgvItem]:
    """Size of the group, ranks of this pod, and where the group meets."""
    dp = spec.data_parallel
    argv: list[ArgvItem] = []
    if dp.size > 1:
        argv += ["--data-parallel-size", str(dp.size)]
        if dp.load_balancing != "External" or supervised(spec):
            argv += ["--data-parallel-size-local", str(ranks_of(spec, role))]
    in_one_process_tree = dp.load_balancing != "External" and dp.size == dp.size_local and head_ranks(spec) > 0
    if not in_one_process_tree:
        # The relay owns rpcPort; the engine's own ROUTER is one above it, on the head's pod IP. A supervisor's servers
        # in the head pod are remote to vLLM and go to that ROUTER too, past the relay.
        port = dp.rpc_port + 1 if role == naming.HEAD else dp.rpc_port
        argv += ["--data-parallel-address", Fill(fill="headIP"), "--data-parallel-rpc-port", str(port)]
    return argv


def _mode(spec: Spec, role: str) -> list[ArgvItem]:
    """Load balancing, and the first rank of this pod where the mode wants it."""
    first: str | Fill = "0" if role == naming.HEAD else Fill(fill="startRank")
    if spec.data_parallel.load_balancing == "Hybrid":
        return ["--data-parallel-hybrid-lb", "--data-parallel-start-rank", first]
    if supervised(spec):
        port = str(spec.data_parallel.supervisor_port)
        return [
            *("--data-parallel-multi-port-external-lb", "--data-parallel-start-rank", first),
            *("--data-parallel-supervisor-port", port),
        ]
    if spec.data_parallel.load_balancing == "External":
        return ["--data-parallel-rank", first]
    return [] if role == naming.HEAD else ["--headless", "--data-parallel-start-rank", first]


def resolve(
    argv: list[ArgvItem], *, version: str | None, start_rank: int | None = None, head_ip: str = "HEAD_IP"
) -> list[str]:
    """Spell a command line as the launcher will: for one installed version, None for an unknown one.

    The first rank stays the word START_RANK where none is given, so that a table shows what all workers share.
    """
    fills = {"headIP": head_ip, "startRank": "START_RANK" if start_rank is None else str(start_rank)}
    words: list[str] = []
    for item in argv:
        if isinstance(item, Fill):
            words.append(fills[item.fill])
        elif isinstance(item, Versioned):
            if launch.within(version, item.since, item.until):
                words += resolve(list(item.items), version=version, start_rank=start_rank, head_ip=head_ip)
        else:
            words.append(item)
    return words
