"""The Kubernetes manifests: each by itself, and what they say about one another and about the service."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from acclimate_service.settings import Settings

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
BASE = KUBERNETES / "base"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
MANIFESTS = [
    path.parent / name
    for path in KUSTOMIZATIONS
    for name in yaml.safe_load(path.read_text())["resources"]
    if name.endswith(".yaml")
]
Resource = dict[str, Any]


def documents(path: Path) -> list[Resource]:
    return list(yaml.safe_load_all(path.read_text()))


def size(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi|mb|gb)", quantity).groups()
    return int(number) * 2 ** {"Mi": 20, "mb": 20, "Gi": 30, "gb": 30}[unit]


def container(workload: Resource) -> Resource:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, str], Resource]:
    """Everything in all manifests, by kind and name."""
    found = itertools.chain.from_iterable(map(documents, MANIFESTS))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.fixture(scope="module")
def workloads(resources) -> dict[str, Resource]:
    return {name: one for (kind, name), one in resources.items() if kind in {"Deployment", "StatefulSet"}}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The settings of every replica."""
    return dict(line.split("=", 1) for line in (BASE / "settings.env").read_text().splitlines())


@pytest.fixture(scope="module")
def settings(environment) -> Settings:
    given = {name.removeprefix("ACCLIMATE_").lower(): value for name, value in environment.items()}
    return Settings(redis_url="redis://redis", **given)


def rendered(folder: Path) -> list[Resource]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", folder]
    return list(yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@pytest.fixture(scope="module")
def schemas(module):
    """The schemas of Kubernetes, of every version."""
    return module("kubernetes_validate")


@pytest.mark.parametrize("version", ["1.30", "newest"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_obeys_the_schema_of_kubernetes(schemas, path, version):
    for document in documents(path):
        schemas.validate(document, schemas.latest_version() if version == "newest" else version, strict=True)


def test_a_misspelt_key_is_against_the_schema(schemas, workloads):
    misspelt = workloads["acclimate"] | {"spec": workloads["acclimate"]["spec"] | {"minReadySecond": 1}}
    with pytest.raises(schemas.ValidationError, match="minReadySecond"):
        schemas.validate(misspelt, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_names_files_that_exist_and_leaves_none_out(path):
    kustomization = yaml.safe_load(path.read_text())
    generated = kustomization.get("configMapGenerator", [])
    files = [name for one in generated for name in (*one.get("envs", ()), *one.get("files", ()))]
    named = {*kustomization["resources"], *files, *(one["path"] for one in kustomization.get("patches", ()))}
    assert all((path.parent / name).exists() for name in named)
    assert {one.name for one in path.parent.iterdir()} - {"kustomization.yaml"} <= named


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_kustomize_builds_valid_resources(schemas, path):
    for document in rendered(path.parent):
        schemas.validate(document, schemas.latest_version(), strict=True)


def test_the_overlay_points_the_replicas_to_the_redis_it_brings():
    built = {(one["kind"], one["metadata"]["name"]): one for one in rendered(KUBERNETES / "overlays/redis")}
    variables = {one["name"]: one for one in container(built["Deployment", "acclimate"])["env"]}
    (redis,) = (name for kind, name in built if kind == "Service" and name.endswith("redis"))
    assert variables["ACCLIMATE_REDIS_URL"] == {"name": "ACCLIMATE_REDIS_URL", "value": f"redis://{redis}:6379/0"}
    assert "valueFrom" in variables["ACCLIMATE_SECRET"]


def test_the_names_that_pods_mount_or_read_are_generated(workloads):
    generated = {one["name"] for one in yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]}
    read = {one["configMapRef"]["name"] for one in container(workloads["acclimate"])["envFrom"]}
    volumes = workloads["acclimate-envoy"]["spec"]["template"]["spec"]["volumes"]
    assert read | {one["configMap"]["name"] for one in volumes} == generated


def test_every_variable_of_a_replica_is_a_setting(environment, workloads):
    given = {*environment, *(one["name"] for one in container(workloads["acclimate"])["env"])}
    assert {name.removeprefix("ACCLIMATE_").lower() for name in given} <= Settings.model_fields.keys()


def test_a_replica_does_not_start_without_the_redis_and_the_secret_it_shares_with_the_others(workloads):
    references = [one["valueFrom"]["secretKeyRef"] for one in container(workloads["acclimate"])["env"]]
    assert [one["key"] for one in references] == ["ACCLIMATE_REDIS_URL", "ACCLIMATE_SECRET"]
    assert not any(one.get("optional") for one in references)


def test_every_replica_has_the_keys_of_a_secret_and_follows_it(workloads, settings):
    pod = workloads["acclimate"]["spec"]["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if "secret" in one)
    assert volume["secret"]["secretName"] == "acclimate-keys"
    assert "optional" not in volume["secret"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]  # who may read it
    (mount,) = (one for one in container(workloads["acclimate"])["volumeMounts"] if one["name"] == volume["name"])
    assert (mount["mountPath"], mount.get("subPath")) == (str(settings.keys_file.parent), None)
    assert not settings.allow_anonymous


def test_kubernetes_adds_no_variables_of_services_which_would_be_taken_for_settings(workloads):
    assert all(one["spec"]["template"]["spec"]["enableServiceLinks"] is False for one in workloads.values())


def test_every_workload_selects_its_own_pods_and_every_service_one_workload_and_its_port(resources, workloads):
    pods = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads.items()}
    assert all(one["spec"]["selector"]["matchLabels"] == pods[name] for name, one in workloads.items())
    for service in (one for (kind, _), one in resources.items() if kind == "Service"):
        (name,) = (name for name, labels in pods.items() if service["spec"]["selector"] == labels)
        ports = {one["name"] for one in container(workloads[name])["ports"]}
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports


def test_disruption_budgets_policies_and_the_autoscaler_speak_of_workloads_that_exist(resources, workloads):
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in workloads.values()]
    for (kind, _), one in resources.items():
        if kind in {"PodDisruptionBudget", "NetworkPolicy"}:
            assert one["spec"].get("selector", one["spec"].get("podSelector"))["matchLabels"] in labels
    autoscaler = resources["HorizontalPodAutoscaler", "acclimate"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] in workloads
    assert autoscaler["minReplicas"] >= 2
    assert "replicas" not in workloads["acclimate"]["spec"]


def test_all_replicas_but_the_new_one_stay_while_a_rollout_waits_for_it(workloads):
    for name in ("acclimate", "acclimate-envoy"):
        assert workloads[name]["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_a_replica_may_drain_finish_its_batches_and_write_its_snapshots_before_it_is_killed(workloads, settings):
    grace = workloads["acclimate"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.lead_s + settings.grace_s + settings.drain_budget_s


def test_liveness_never_asks_redis_and_readiness_does(workloads):
    probes = container(workloads["acclimate"])
    paths = {name: probes[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    ready, live = "/v2/health/ready", "/v2/health/live"
    assert paths == {"startup": ready, "readiness": ready, "liveness": live}


def test_the_memory_of_a_replica_holds_its_cache_and_every_body_that_may_wait(workloads, settings):
    limit = size(container(workloads["acclimate"])["resources"]["limits"]["memory"])
    model = 2**30
    assert limit > model + settings.cache_bytes + settings.max_waiting * settings.max_body_bytes


def test_every_container_is_confined(workloads):
    for workload in workloads.values():
        security = container(workload)["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert workload["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


async def test_the_service_entrusts_its_states_to_the_redis_of_the_overlay(workloads, entrust):
    facts = await entrust(container(workloads["acclimate-redis"])["command"][:-2])  # the last two name its directory
    assert (facts.maxmemory_policy, facts.durability) == ("noeviction", "always")


def test_the_redis_of_the_overlay_may_double_while_it_rewrites_its_file(workloads):
    redis = container(workloads["acclimate-redis"])
    maxmemory = size(redis["command"][redis["command"].index("--maxmemory") + 1])
    assert size(redis["resources"]["limits"]["memory"]) >= 2 * maxmemory
