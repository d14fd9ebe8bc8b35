"""A vLLM plugin for machines without a GPU; vLLM itself calls `register` in all of its processes.

MoE ranks exchange their tokens before and after the experts. vLLM 0.32's communicator for CPU lacks the two collectives
for that, so they are here, over gloo. And its processes are forked, as on GPUs, where its CPU platform would start each
anew and import torch once more: nine times ten seconds of processor time for two ranks. With one OpenMP thread that is
safe.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    # A process of its own, which imports everything, would tell what kind of model it is.
    registry._run_in_subprocess = lambda ask: ask()
    CpuPlatform.check_and_update_config = classmethod(_forking(CpuPlatform.check_and_update_config.__func__))


def _forking(check_and_update: Any) -> Any:
    @functools.wraps(check_and_update)
    def wrapped(cls: Any, config: Any) -> None:
        check_and_update(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    return wrapped


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks one after the other; a list of tensors is gathered one by one."""
    assert dim == 0
    tensors = input_ if isinstance(input_, (list, tuple)) else [input_]
    found = [_gathered(self.cpu_group, rows, list(sizes or [len(rows)] * self.world_size)) for rows in tensors]
    return found if isinstance(input_, (list, tuple)) else found[0]


def _gathered(group: Any, rows: Any, sizes: list[int]) -> Any:
    """Ranks have different numbers of rows, and gloo wants equal ones: all are padded to the longest."""
    import torch

    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Sum of the ranks' tensors, and of that the rows of this rank."""
    import torch

    assert dim in (0, -input_.dim())
    total = input_.to(torch.float32, copy=True).contiguous()
    torch.distributed.all_reduce(total, group=self.cpu_group)
    shares = list(sizes or [len(total) // self.world_size] * self.world_size)
    first = sum(shares[: self.rank_in_group])
    return total[first : first + shares[self.rank_in_group]].to(input_.dtype)
