"""The ServingRuntime for KServe: sound as a pod, and of one mind with image, service and the other manifests."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from acclimate_service.http.access import NEEDS
from acclimate_service.settings import Settings, variable

DEPLOY = Path(__file__).parents[2] / "deploy"
RUNTIME, SERVED = yaml.safe_load_all((DEPLOY / "kserve/serving-runtime.yaml").read_text())
(CONTAINER,) = RUNTIME["spec"]["containers"]


def test_what_it_runs_is_a_pod_that_kubernetes_takes(program, tmp_path):
    spec = {"containers": RUNTIME["spec"]["containers"], "volumes": RUNTIME["spec"]["volumes"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "acclimate"}, "spec": spec}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    command = [program("kubernetes-validate"), "--strict", tmp_path / "pod.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_the_container_that_kserve_looks_for_on_the_port_of_the_image():
    assert CONTAINER["name"] == "kserve-container"
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    (port,) = CONTAINER["ports"]
    assert re.search(rf"^EXPOSE {port['containerPort']}$", dockerfile, re.MULTILINE)
    for probe in ("readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert (f"GET {asked['path']}" in NEEDS, asked["port"]) == (True, port["containerPort"])


def test_its_image_and_secrets_are_those_of_the_other_manifests():
    (deployment, *_) = yaml.safe_load_all((DEPLOY / "kubernetes/base/replicas.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert CONTAINER["image"] == pod["containers"][0]["image"]
    referred = [each["valueFrom"] for each in CONTAINER["env"] if "valueFrom" in each]
    assert referred == [
        each["valueFrom"] for each in pod["containers"][0]["env"] if "secretKeyRef" in each["valueFrom"]
    ]
    names = {each["secret"]["secretName"] for each in RUNTIME["spec"]["volumes"] if "secret" in each}
    assert names == {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}


def test_every_variable_is_a_setting():
    known = {variable(name) for name in Settings.model_fields}
    assert {each["name"] for each in CONTAINER["env"]} <= known


def test_what_is_served_names_its_format_and_the_protocol():
    formats = {each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]}
    model = SERVED["spec"]["predictor"]["model"]
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]


@pytest.mark.parametrize("path", ["POST /v2/models/{model}/infer", "GET /v2/models/{model}/ready"])
def test_the_protocol_has_the_routes_that_kserve_asks(path):
    assert path in NEEDS
