"""The cache of built programs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import programs
from tests.cluster.errors import BedError
from tests.cluster.programs import PROGRAMS, cache_key

KUBELET = next(one for one in PROGRAMS if one.name == "kubelet")
FILES = (b"module a\n", b"sum\n")


def test_every_input_of_a_build_changes_its_key() -> None:
    keys = {
        cache_key(FILES, "go1.26", KUBELET),
        cache_key((b"module b\n", b"sum\n"), "go1.26", KUBELET),
        cache_key((b"module a\n", b"other\n"), "go1.26", KUBELET),
        cache_key(FILES, "go1.27", KUBELET),
        cache_key(FILES, "go1.26", replace(KUBELET, ldflags="-s")),
        cache_key(FILES, "go1.26", replace(KUBELET, package="k8s.io/kubernetes/cmd/kubectl")),
    }

    assert len(keys) == 6


def test_bytes_moved_from_one_file_to_the_next_change_the_key() -> None:
    assert cache_key((b"ab", b"c"), "v", KUBELET) != cache_key((b"a", b"bc"), "v", KUBELET)


def test_a_build_that_fails_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text(
        '#!/bin/sh\nif [ "$1" = env ]; then echo go1.26; exit; fi\necho half > "$6"; echo broken >&2; exit 1\n'
    )
    go.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(programs, "_go", lambda: str(go))

    with pytest.raises(BedError, match="broken"):
        programs.ensure(["kubelet"])

    assert [path for path in (tmp_path / "dp-operator").rglob("*") if path.is_file()] == []
