"""A process is its pid and its start time; nothing else may ever be stopped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cluster.processes import Owner, Started, is_alive, parse_owner, parse_stat, start_ticks, stop_started


@pytest.fixture
def sleeper() -> Iterator[Started]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        yield Started(child.pid, ticks, "")
        child.kill()


def test_the_start_time_is_read_behind_a_name_with_brackets_and_spaces() -> None:
    fields = ["S", *(str(number) for number in range(4, 30))]

    assert parse_stat(f"42 (a) S (b c) {' '.join(fields)}\n") == 22


def test_a_zombie_is_dead() -> None:
    assert parse_stat(f"42 (sleep) Z {' '.join(str(number) for number in range(4, 30))}\n") is None


def test_a_process_of_the_same_pid_but_another_start_time_is_not_stopped(sleeper: Started) -> None:
    reused = replace(sleeper, start_ticks=sleeper.start_ticks - 1)

    assert not is_alive(reused)
    stop_started([reused], grace_s=0)

    assert is_alive(sleeper)


def test_stopping_waits_until_the_process_is_gone(sleeper: Started) -> None:
    stop_started([sleeper], grace_s=5)

    assert not is_alive(sleeper)


def test_a_record_survives_the_way_through_its_file_and_a_cut_one_is_no_record() -> None:
    text = f'{{"checkout": "/a", "boot_id": "b", "processes": {{"etcd": {{"pid": {os.getpid()}, "start_ticks": 1, "command": "c"}}}}}}'

    assert parse_owner(text) == Owner("/a", "b", {"etcd": Started(os.getpid(), 1, "c")})
    assert parse_owner(text[:40]) is None
