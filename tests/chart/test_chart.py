import json
import re
from pathlib import Path

import pytest
import yaml

from dp_operator.api import KIND
from dp_operator.cache import NODE, WATCHED
from dp_operator.client import RESOURCES, Client
from dp_operator.render import gang

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "dp-operator"
CRD = ROOT / "crds" / "dataparallel.io_dataparalleldeployments.yaml"


def one(objects, kind, name=None):
    (found,) = [item for item in objects if item["kind"] == kind and name in {None, item["metadata"]["name"]}]
    return found


def pod_of(objects):
    return one(objects, "Deployment")["spec"]["template"]


def rules_of(objects):
    return [
        (item["metadata"]["name"], rule)
        for item in objects
        if item["kind"] in {"ClusterRole", "Role"}
        for rule in item["rules"]
    ]


def test_helm_finds_nothing_to_complain_about(helm):
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\[(WARNING|ERROR)\]", done.stdout)


def test_a_release_has_these_objects_and_no_others(render):
    assert {(item["kind"], item["metadata"]["name"]) for item in render()} == {
        ("ServiceAccount", "dp-operator"),
        ("CustomResourceDefinition", "dataparalleldeployments.dataparallel.io"),
        ("ClusterRole", "dp-operator"),
        ("ClusterRole", "dp-operator-admin"),
        ("ClusterRole", "dp-operator-edit"),
        ("ClusterRole", "dp-operator-view"),
        ("ClusterRoleBinding", "dp-operator"),
        ("Deployment", "dp-operator"),
    }


def test_another_release_name_keeps_the_objects_apart(render):
    assert one(render(release="west"), "Deployment")["metadata"]["name"] == "west-dp-operator"
    assert one(render('fullnameOverride="x"'), "Deployment")["metadata"]["name"] == "x"


def resource_of(kind, *, below=""):
    version, plural = RESOURCES[kind]
    group, slash, _ = version.rpartition("/")
    return (group if slash else ""), f"{plural}{below}"


def needed(*, nodes):
    """What the operator's code can ask the API server for, by resource. A right more or less is a mistake."""
    verbs = {resource_of(kind): "get list watch" for kind in (KIND, *WATCHED)}
    for kind in WATCHED:
        # What differs from the intent is applied anew; of pods, sets and launch plans nothing is ever changed.
        repaired = " patch" if kind in ("Service", "PodDisruptionBudget", "NetworkPolicy") else ""
        verbs[resource_of(kind)] += f" create{repaired} delete"
    verbs[resource_of(KIND, below="/status")] = "update"
    verbs[resource_of(KIND, below="/finalizers")] = "update"  # for blockOwnerDeletion
    verbs[resource_of("Pod", below="/log")] = "get"
    verbs[resource_of("Event")] = "create"
    for version in (gang.VOLCANO_API, gang.COSCHEDULING_API):
        verbs[version.split("/")[0], RESOURCES["PodGroup"][1]] = "create"
    if nodes:
        verbs[resource_of(NODE)] = "list watch"
    return verbs


def granted(role):
    rules = role["rules"]
    return {(group, name): " ".join(r["verbs"]) for r in rules for group in r["apiGroups"] for name in r["resources"]}


def test_the_operator_has_exactly_the_rights_its_code_uses(render):
    assert granted(one(render(), "ClusterRole", "dp-operator")) == needed(nodes=True)


def test_every_kind_the_client_knows_is_in_the_table():
    """A kind that is added to the client needs a line above, and rights in the chart."""
    listed = {plural for _, plural in needed(nodes=True)} | {"leases"}
    assert {plural for _, plural in RESOURCES.values()} <= listed
    calls = {name for name in vars(Client) if not name.startswith("_")}
    assert calls == {
        *("request", "list", "get", "create", "apply", "take_over", "delete", "log"),
        *("replace", "put_status"),  # PUT: of the Lease and of the status only
    }


def test_an_operator_for_some_namespaces_has_rights_nowhere_else(render):
    objects = render('watchNamespaces=["a","b"]')
    roles = [item for item in objects if item["kind"] == "Role"]
    assert [(role["metadata"]["name"], role["metadata"]["namespace"]) for role in roles] == [
        ("dp-operator", "a"),
        ("dp-operator", "b"),
    ]
    assert [granted(role) for role in roles] == [needed(nodes=False)] * 2
    bound = [item for item in objects if item["kind"] == "RoleBinding"]
    assert [(item["metadata"]["namespace"], item["roleRef"]["kind"]) for item in bound] == [
        ("a", "Role"),
        ("b", "Role"),
    ]
    assert [item["subjects"][0]["namespace"] for item in bound] == ["dp-system", "dp-system"]
    assert not [item for item in objects if item["kind"] == "ClusterRoleBinding"]
    assert {i["metadata"]["name"] for i in objects if i["kind"] == "ClusterRole"} == {
        *("dp-operator-admin", "dp-operator-edit", "dp-operator-view"),  # aggregated, of people and not of the operator
    }


def test_only_several_replicas_may_use_a_lease_and_only_in_their_own_namespace(render):
    assert not [item for item in render() if item["kind"] == "Role"]
    role = one(render("replicas=2"), "Role")
    assert role["metadata"]["namespace"] == "dp-system"
    assert role["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}
    ]


def test_no_role_has_a_wildcard_or_reads_secrets(render):
    for name, rule in rules_of(render()):
        said = json.dumps(rule)
        assert "*" not in said, name
        assert "secrets" not in said, name
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"]), name


def test_the_bindings_are_for_the_operators_account_alone(render):
    objects = render('serviceAccount.name="robot"', "replicas=2")
    account = {"kind": "ServiceAccount", "name": "robot", "namespace": "dp-system"}
    bindings = [item for item in objects if item["kind"].endswith("Binding")]
    assert [item["subjects"] for item in bindings] == [[account], [account]]
    assert pod_of(objects)["spec"]["serviceAccountName"] == "robot"
    roles = {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert all((item["roleRef"]["kind"], item["roleRef"]["name"]) in roles for item in bindings)


@pytest.mark.parametrize(
    ("role", "writes", "scales"), [("admin", True, True), ("edit", True, True), ("view", False, False)]
)
def test_the_clusters_own_roles_learn_about_the_kind(render, role, writes, scales):
    item = one(render(), "ClusterRole", f"dp-operator-{role}")
    assert item["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
    verbs = {resource: set(rule["verbs"]) for rule in item["rules"] for resource in rule["resources"]}
    assert ({"create", "delete", "patch"} <= verbs["dataparalleldeployments"]) is writes
    assert ("update" in verbs["dataparalleldeployments/scale"]) is scales
    assert "get" in verbs["dataparalleldeployments/scale"]
    assert verbs["dataparalleldeployments/status"] == {"get"}


def test_a_cluster_that_grants_rights_itself_gets_none(render):
    kinds = {item["kind"] for item in render("rbac.create=false")}
    assert kinds == {"ServiceAccount", "CustomResourceDefinition", "Deployment"}
    names = {item["metadata"]["name"] for item in render("rbac.aggregate=false") if item["kind"] == "ClusterRole"}
    assert names == {"dp-operator"}


def test_the_crd_is_that_of_the_repository_and_survives_uninstall(render):
    installed = one(render(), "CustomResourceDefinition")
    assert installed["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    del installed["metadata"]["labels"]
    assert installed == yaml.safe_load(CRD.read_text())


def test_a_crd_managed_elsewhere_is_left_alone(render):
    assert not [item for item in render("crds.install=false") if item["kind"] == "CustomResourceDefinition"]


def test_the_pod_is_restricted_and_writes_nothing(render):
    pod = pod_of(render())["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"] == {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}


def test_the_operator_learns_who_it_is_and_which_image_the_relay_has(render):
    (container,) = pod_of(render('image={"repository":"r.example/op","tag":"1"}'))["spec"]["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert env.keys() == {"POD_NAME", "POD_NAMESPACE", "DP_OPERATOR_IMAGE"}
    assert env["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert env["POD_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    assert env["DP_OPERATOR_IMAGE"]["value"] == container["image"] == "r.example/op:1"


def test_a_digest_wins_over_a_tag_for_operator_and_relay_alike(render):
    digest = "sha256:" + "a" * 64
    (container,) = pod_of(render(f'image.digest="{digest}"'))["spec"]["containers"]
    assert container["image"] == f"localhost/dp-operator@{digest}"
    assert {"name": "DP_OPERATOR_IMAGE", "value": container["image"]} in container["env"]


def test_watched_namespaces_reach_the_operator(render):
    (container,) = pod_of(render('watchNamespaces=["a","b"]'))["spec"]["containers"]
    assert {"name": "WATCH_NAMESPACES", "value": "a,b"} in container["env"]


def test_probes_ask_the_ports_the_operator_serves(render):
    (container,) = pod_of(render())["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"metrics": 8080, "health": 8081}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


def test_selectors_say_only_what_never_changes(render):
    deployment = one(render(), "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector == {"app.kubernetes.io/name": "dp-operator", "app.kubernetes.io/instance": "dp-operator"}
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("replica=2", "replica"),
        ("image.tagg=1", "tagg"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=abc", "digest"),
        ("replicas=many", "replicas"),
        ("crds.keep=false", "keep"),
        ("rbac.create=maybe", "create"),
        ("watchNamespaces={A}", "watchNamespaces"),
        ("resources.claims=1", "claims"),
        ("serviceAccount.create=false", "serviceAccount.name is needed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm, value, says):
    done = helm("template", "dp-operator", str(CHART), "--set", value)
    assert done.returncode != 0
    assert says in done.stderr


def test_every_value_of_the_schema_is_closed():
    def open_objects(node, path):
        if node.get("type") == "object" and "properties" in node and node.get("additionalProperties") is not False:
            yield path
        for name, below in node.get("properties", {}).items():
            yield from open_objects(below, f"{path}.{name}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert list(open_objects(schema, "")) == []
    assert schema["properties"].keys() - {"global"} == yaml.safe_load((CHART / "values.yaml").read_text()).keys()


def documented_values():
    """Rows that the README should have: every value with a `# --` comment, with its default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    path, said = [], None
    for line in (CHART / "values.yaml").read_text().splitlines():
        if comment := re.match(r" *# -- (.*)", line):
            said = comment[1]
        elif key := re.match(r"( *)([A-Za-z]+):", line):
            path[len(key[1]) // 2 :] = [key[2]]
            value = values
            for part in path:
                value = value[part]
            if said:
                yield f"| `{'.'.join(path)}` | `{json.dumps(value)}` | {said} |"
                said = None


def test_the_readme_lists_every_value_with_its_default():
    rows = [line for line in (CHART / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert rows == list(documented_values())


def test_every_value_is_documented():
    documented = [row.split("`")[1] for row in documented_values()]
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def leaves(node, path):
        if path in documented or not isinstance(node, dict):
            yield path
        else:
            for name, below in node.items():
                yield from leaves(below, f"{path}.{name}" if path else name)

    assert [path for path in leaves(values, "") if path not in documented] == []


def test_the_notes_name_three_commands_for_this_release(helm):
    done = helm("install", "dp-operator", str(CHART), "--namespace", "dp-system", "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:")[1]
    assert "kubectl -n dp-system rollout status deployment/dp-operator" in notes
    assert "kubectl explain dataparalleldeployments.spec" in notes
    assert "kubectl get dpd -w" in notes
    assert "kubectl delete crd dataparalleldeployments.dataparallel.io" in notes
