"""The cache repairs itself: old news, lost deletions and namesakes do not fool it."""

from __future__ import annotations

from typing import Any

from dp_operator import naming
from dp_operator.api import KIND
from dp_operator.cache import Cache


def pod(name: str, *, uid: str = "u", version: int = 1, owner: str = "cr", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {naming.LABEL_UID: owner, naming.LABEL_NAME: "web"},
            "managedFields": ["large"],
            **more,
        },
        "spec": {"nodeName": "n1", "containers": ["large"]},
        "status": {"phase": "Running", "qosClass": "x"},
    }


def test_an_event_names_the_custom_resource_it_concerns():
    assert Cache().put("Pod", pod("a")) == ("ns", "web")


def test_older_news_never_replaces_newer():
    cache = Cache()
    cache.put("Pod", pod("a", version=5))
    assert cache.put("Pod", pod("a", version=4)) is None
    assert cache.put("Pod", pod("a", version=5)) is None
    assert cache.put("Pod", pod("a", version=6)) == ("ns", "web")


def test_a_deleted_object_does_not_come_back_with_a_late_event():
    cache = Cache()
    cache.put("Pod", pod("a", version=5))
    cache.remove("Pod", pod("a", version=6))
    assert cache.put("Pod", pod("a", version=5)) is None
    assert cache.owned("cr") == []


def test_a_namesake_with_another_uid_replaces_the_old_one_and_a_late_delete_leaves_it_alone():
    cache = Cache()
    cache.put("Pod", pod("a", uid="old", version=9))
    cache.put("Pod", pod("a", uid="new", version=10))
    cache.remove("Pod", pod("a", uid="old", version=11))
    assert [o["metadata"]["uid"] for _, o in cache.owned("cr")] == ["new"]


def test_a_full_list_finds_what_vanished_unseen():
    cache = Cache()
    cache.put("Pod", pod("a", uid="1"))
    cache.put("Pod", pod("b", uid="2"))
    changed = cache.replace("Pod", [pod("b", uid="2")], known_before=cache.uids("Pod"))
    assert changed == {("ns", "web")}
    assert [o["metadata"]["name"] for _, o in cache.owned("cr")] == ["b"]


def test_what_arrived_while_the_list_was_on_its_way_is_kept():
    cache = Cache()
    known = cache.uids("Pod")
    cache.put("Pod", pod("a", uid="1"))
    assert cache.replace("Pod", [], known_before=known) == set()
    assert len(cache.owned("cr")) == 1


def test_only_what_decisions_read_is_kept_in_memory():
    cache = Cache()
    cache.put("Pod", pod("a"))
    [(_, kept)] = cache.owned("cr")
    assert kept["spec"] == {"nodeName": "n1"}
    assert "managedFields" not in kept["metadata"]
    assert "qosClass" not in kept["status"]


def test_a_custom_resource_is_found_by_its_own_name():
    cache = Cache()
    assert cache.put(KIND, {"metadata": {"name": "web", "namespace": "ns", "uid": "cr"}, "spec": {}}) == ("ns", "web")
    assert cache.keys() == [("ns", "web")]
