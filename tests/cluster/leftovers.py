"""What an earlier bed left on the machine, whose it is, and how it is cleaned.

There can be one bed on a machine: the addresses and names of its namespaces are fixed.
"""

import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from . import containers, network, processes
from .errors import BedError
from .paths import CHECKOUT, RUN
from .processes import Owner, Started


class Verdict(Enum):
    """What the machine's record says to a checkout that wants to start its bed."""

    NOTHING = "no bed"
    OURS = "our own bed"
    DEAD = "remains to be cleaned"
    OTHERS_ALIVE = "another checkout's running bed"


def judge(owner: Owner | None, checkout: str, boot_id: str, alive: Callable[[Started], bool]) -> Verdict:
    """Decide from the record alone. After a reboot no recorded pid means anything, whatever runs under it now."""
    if owner is None:
        return Verdict.NOTHING
    if owner.boot_id != boot_id:
        return Verdict.DEAD
    if owner.checkout == checkout:
        return Verdict.OURS
    return Verdict.OTHERS_ALIVE if any(alive(one) for one in owner.processes.values()) else Verdict.DEAD


def settle() -> Verdict:
    """Clean what is dead, refuse what is another's and alive."""
    owner = processes.read_owner()
    verdict = judge(owner, str(CHECKOUT), processes.boot_id(), processes.is_alive)
    if verdict is Verdict.OTHERS_ALIVE and owner is not None:
        raise BedError(
            f"The bed of another checkout is running on this machine: {owner.checkout}\n"
            f"Only one fits. Stop it there (`make down`), or from here with `python3 -m tests.cluster down --any`."
        )
    unrecorded = verdict is Verdict.NOTHING and (RUN.exists() or any(map(network.exists, network.NAMESPACES)))
    if verdict is Verdict.DEAD or unrecorded:
        sweep(owner)
    return verdict


def sweep(owner: Owner | None) -> None:
    """Stop the recorded processes and remove all that a bed leaves in the kernel and under /run.

    Nothing gets time to end by itself: a bed must survive that anyway, and it takes seconds instead of half a minute.
    Its files in its checkout stay: the next start there goes on with them.
    """
    if owner is not None and owner.boot_id == processes.boot_id():
        processes.stop_started(owner.processes.values(), grace_s=0)
    containers.kill_all(RUN)
    # A start that was killed right after it made a process had no time to record it.
    processes.stop_started(processes.identified(network.members()), grace_s=0)
    containers.remove_cni_results(RUN)
    containers.remove_cgroups(RUN)
    state = Path(owner.checkout if owner else CHECKOUT) / ".cluster"
    containers.unmount(RUN, state)
    containers.remove_log_links(state)
    network.remove()
    shutil.rmtree(RUN, ignore_errors=True)
