from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.cluster import kind


def test_two_checkouts_never_share_a_kind_cluster() -> None:
    one, other = kind.cluster_name(Path("/a")), kind.cluster_name(Path("/b"))
    assert one != other
    assert re.fullmatch(r"[a-z0-9][-a-z0-9]{0,40}", one)
    assert kind.cluster_name(Path("/a")) == one


def test_up_and_down_name_this_checkouts_cluster_only(monkeypatch: Any, tmp_path: Path) -> None:
    said: list[list[str]] = []

    def run(argv: Any, **_: Any) -> str:
        said.append([str(word) for word in argv])
        return f"dp-operator\n{kind.cluster_name(Path('/another/checkout'))}\n"

    monkeypatch.setattr(kind, "run", run)
    monkeypatch.setattr(kind, "STATE", tmp_path)
    monkeypatch.setattr(kind, "AUDIT_LOG", tmp_path / "audit.log")
    monkeypatch.setattr(kind.KindCluster, "_link_clients", lambda _: None)
    cluster = kind.KindCluster("docker")
    cluster.up()
    cluster.down()
    named = [words[words.index("--name") + 1] for words in said if "--name" in words]
    assert [words[1] for words in said if "--name" in words] == ["create", "delete"]
    assert set(named) == {kind.cluster_name(kind.CHECKOUT)}
