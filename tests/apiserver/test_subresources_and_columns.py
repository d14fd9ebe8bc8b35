import pytest

STATUS = {
    "observedGeneration": 1,
    "selector": "dataparallel.io/name=qwen,dataparallel.io/role=head",
    "replicas": 1,
    "ranks": {"expected": 8, "ready": 6, "summary": "6/8"},
    "groups": [{"incarnation": "b2c3d", "index": 0, "state": "Starting", "lastFailures": []}],
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "RanksMissing",
            "message": "group 0: 6 of 8 ranks connected",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1,
        }
    ],
}


def test_scale_reads_and_writes_the_number_of_groups(dpds):
    dpds.create({})
    dpds.merge("qwen", {"status": STATUS}, "/status")
    scale = dpds.get("qwen", "/scale")
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": STATUS["selector"]}
    dpds.merge("qwen", {"spec": {"replicas": 3}}, "/scale")
    assert dpds.get("qwen")["spec"]["replicas"] == 3


def test_kubectl_scale_takes_groups_to_none_and_no_further_than_64(dpds):
    dpds.create({})
    resource = f"dataparalleldeployments.{dpds.group}"
    dpds.server.kubectl("-n", dpds.namespace, "scale", resource, "qwen", "--replicas=0")
    assert dpds.get("qwen")["spec"]["replicas"] == 0
    with pytest.raises(Exception, match="less than or equal to 64"):
        dpds.merge("qwen", {"spec": {"replicas": 65}}, "/scale")


def test_status_is_written_apart_from_spec(dpds):
    dpds.create({})
    dpds.merge("qwen", {"status": STATUS})
    assert "status" not in dpds.get("qwen")
    dpds.merge("qwen", {"spec": {"replicas": 9}, "status": STATUS}, "/status")
    stored = dpds.get("qwen")
    assert stored["spec"]["replicas"] == 1
    assert stored["metadata"]["generation"] == 1
    assert stored["status"]["ranks"]["summary"] == "6/8"


def test_status_shows_counts_that_are_nought_and_no_empty_texts(dpds):
    dpds.create({})
    dpds.merge("qwen", {"status": STATUS}, "/status")
    status = dpds.get("qwen")["status"]
    assert status["readyReplicas"] == 0
    assert status["ranks"] == {"expected": 8, "arrived": 0, "connected": 0, "loaded": 0, "ready": 6, "summary": "6/8"}
    assert status["groups"][0] == STATUS["groups"][0] | {"restarts": 0, "served": False}


def test_two_entries_for_one_incarnation_are_refused(dpds):
    dpds.create({})
    with pytest.raises(Exception, match="Duplicate value"):
        dpds.merge("qwen", {"status": STATUS | {"groups": STATUS["groups"] * 2}}, "/status")


def test_kubectl_get_shows_readiness_groups_and_ranks(dpds):
    dpds.create({})
    dpds.merge("qwen", {"status": STATUS | {"readyReplicas": 0}}, "/status")
    resource = f"dataparalleldeployments.{dpds.group}"
    header, row = dpds.server.kubectl("-n", dpds.namespace, "get", resource).splitlines()
    assert header.split() == ["NAME", "READY", "GROUPS", "SERVING", "RANKS", "AGE"]
    assert row.split()[:5] == ["qwen", "False", "1", "0", "6/8"]
    header, row = dpds.server.kubectl("-n", dpds.namespace, "get", resource, "-o", "wide").splitlines()
    assert header.split()[6:] == ["REASON", "SIZE", "IMAGE", "MESSAGE"]
    assert row.split(maxsplit=6)[6].split(maxsplit=3) == [
        "RanksMissing",
        "8",
        "engine:1",
        "group 0: 6 of 8 ranks connected",
    ]


def test_it_is_found_by_its_short_name_and_category(dpds):
    dpds.create({})
    assert "qwen" in dpds.server.kubectl("-n", dpds.namespace, "get", f"dpd.{dpds.group}", "-o", "name")
    assert f"{dpds.group}/qwen" in dpds.server.kubectl("-n", dpds.namespace, "get", "inference", "-o", "name")


def test_kubectl_explain_tells_what_a_field_is_for(dpds):
    resource = f"dataparalleldeployments.{dpds.group}"
    assert "Ranks per pod" in dpds.server.kubectl("explain", f"{resource}.spec.dataParallel.sizeLocal")
