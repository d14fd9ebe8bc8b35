"""What the ranks of one pod make of the devices that their container shows them."""

from __future__ import annotations

from dp_operator import versions


def seen_by_rank(visible: str, *, local_rank: int, world: int, version: str, env_name: str) -> list[str]:
    """Devices that one local rank ends up with, as vLLM of that version slices them (protocol notes §6).

    `visible` is the value of the visible-devices variable in the container, empty if it is not set; `world` is tensor x
    pipeline parallel size. Local ranks count from 0 in every pod. Gives device names of the node ("3"), or indices of
    what the container has where the variable is not set.

    * below 0.11.2, and on other platforms than CUDA and ROCm until 0.23: vLLM's launcher sets the variable anew for each
      rank, to the items from local_rank x world on;
    * 0.11.2 to 0.23 on CUDA and ROCm: the variable stays, the worker adds local_rank x world to its own local rank;
    * from 0.24: the list of each rank goes into its configuration.

    All three give the same items; they differ in what they accept. Raises ValueError where vLLM ends: too few items,
    or names where only integers are read.
    """
    first = local_rank * world
    if not visible:
        return [str(index) for index in range(first, first + world)]
    items = [item.strip() for item in visible.split(",")]
    if first + world > len(items):
        raise ValueError(
            f"{env_name}={visible}: local rank {local_rank} needs the devices {first} to {first + world - 1} of it"
        )
    mine = items[first : first + world]
    release = versions.order(version)
    cuda_like = env_name in {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    rewrites = release < (0, 24) and not (cuda_like and release >= (0, 11, 2))
    if rewrites and not all(item.isdigit() for item in mine):
        raise ValueError(f"{env_name}={visible}: vLLM {version} reads integers only")
    return mine
