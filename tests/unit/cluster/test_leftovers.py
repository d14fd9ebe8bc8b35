"""Whose bed it is that the machine's record tells of."""

import pytest

from tests.cluster.leftovers import Verdict, judge
from tests.cluster.processes import Owner, Started

ALIVE, DEAD = Started(1, 1, ""), Started(2, 2, "")
MINE, OTHER = "/home/me/project", "/home/you/project"


@pytest.mark.parametrize(
    ("owner", "verdict"),
    [
        (None, Verdict.NOTHING),
        (Owner(MINE, "boot", {"etcd": ALIVE}), Verdict.OURS),
        (Owner(MINE, "boot", {"etcd": DEAD}), Verdict.OURS),
        (Owner(OTHER, "boot", {"etcd": DEAD}), Verdict.DEAD),
        (Owner(OTHER, "boot", {}), Verdict.DEAD),
        (Owner(OTHER, "boot", {"etcd": DEAD, "apiserver": ALIVE}), Verdict.OTHERS_ALIVE),
        (Owner(MINE, "an earlier boot", {"etcd": ALIVE}), Verdict.DEAD),
        (Owner(OTHER, "an earlier boot", {"etcd": ALIVE}), Verdict.DEAD),
    ],
)
def test_the_verdict_follows_from_owner_boot_and_live_processes(owner: Owner | None, verdict: Verdict) -> None:
    assert judge(owner, MINE, "boot", lambda one: one is ALIVE) is verdict
