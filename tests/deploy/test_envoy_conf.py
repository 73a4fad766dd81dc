"""Envoy's configuration in Kubernetes, as Envoy itself reads it, and as the service needs it."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from acclimate_service.settings import Settings

BASE = Path(__file__).parents[2] / "deploy/kubernetes/base"
CONF = BASE / "envoy.yaml"


@pytest.fixture(scope="module")
def manager():
    """The connection manager, which all requests go through."""
    (listener,) = yaml.safe_load(CONF.read_text())["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load(CONF.read_text())["static_resources"]["clusters"][0]


@pytest.fixture(scope="module")
def balancer():
    """The Deployment of Envoy."""
    return only("balancer", "Deployment")


def only(name, kind):
    (found,) = (one for one in yaml.safe_load_all((BASE / f"{name}.yaml").read_text()) if one["kind"] == kind)
    return found


def seconds(duration):
    return float(duration.removesuffix("s"))


def validate(envoy, path):
    command = [envoy, "--mode", "validate", "--disable-hot-restart", "--config-path", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_envoy_accepts_the_file_and_finds_nothing_in_it_deprecated(envoy):
    verdict = validate(envoy, CONF)
    assert verdict.returncode == 0, verdict.stderr
    assert "eprecated" not in verdict.stderr


def test_envoy_refuses_a_misspelt_field(envoy, tmp_path):
    (tmp_path / "envoy.yaml").write_text(CONF.read_text().replace("retry_on:", "retry_when:"))
    assert "retry_when" in validate(envoy, tmp_path / "envoy.yaml").stderr


def test_the_image_is_the_version_that_is_tested(envoy, balancer):
    image = balancer["spec"]["template"]["spec"]["containers"][0]["image"]
    shown = subprocess.run([envoy, "--version"], capture_output=True, text=True, check=True).stdout
    assert image.rpartition(":v")[2].split(".")[:2] == re.search(r"/(\d+\.\d+)\.", shown)[1].split(".")


def test_envoy_asks_the_replicas_at_their_service_and_port(cluster):
    service = only("replicas", "Service")
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert address == {"address": service["metadata"]["name"], "port_value": service["spec"]["ports"][0]["port"]}
    assert service["spec"]["clusterIP"] == "None"


def test_only_what_was_never_sent_is_sent_to_another_replica(manager):
    (host,) = manager["route_config"]["virtual_hosts"]
    assert host["retry_policy"]["retry_on"] == "connect-failure,refused-stream"
    assert not any("retry_policy" in route.get("route", {}) for route in host["routes"])


def test_envoy_and_the_service_take_equally_large_bodies(manager):
    limit = Settings().max_body_bytes
    (buffer,) = (one for one in manager["http_filters"] if one["name"].endswith("buffer"))
    assert buffer["typed_config"]["max_request_bytes"] == limit
    (state,) = (
        route["typed_per_filter_config"][buffer["name"]]["buffer"]["max_request_bytes"]
        for route in manager["route_config"]["virtual_hosts"][0]["routes"]
        if "typed_per_filter_config" in route
    )
    assert state == Settings().max_state_bytes
    assert f"may have {limit} bytes" in CONF.read_text()
    assert f"may have {state} bytes" in CONF.read_text()


def test_envoy_outwaits_the_longest_request_so_that_the_service_says_what_became_of_it(manager):
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    timeouts = [seconds(route["route"]["timeout"]) for route in routes if "route" in route]
    assert min(*timeouts, seconds(manager["stream_idle_timeout"])) * 1000 > Settings().request_timeout_ms


def test_a_draining_replica_is_noticed_and_its_idle_connections_are_closed_before_it_ends(cluster):
    lead = Settings(redis_url="redis://redis").lead_s
    (check,) = cluster["health_checks"]
    (protocol,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(check["interval"]) + seconds(check["timeout"]) < lead
    assert seconds(check["no_traffic_interval"]) == seconds(check["interval"])
    assert seconds(protocol["common_http_protocol_options"]["idle_timeout"]) < lead


def test_a_new_replica_is_known_to_envoy_before_an_old_one_goes(cluster):
    coredns_ttl = 5
    dns = seconds(cluster["cluster_type"]["typed_config"]["dns_refresh_rate"])
    noticed = coredns_ttl + dns + seconds(cluster["health_checks"][0]["interval"])
    assert only("replicas", "Deployment")["spec"]["minReadySeconds"] > noticed


def test_envoy_outlasts_the_longest_request_before_it_is_ended(balancer):
    pod = balancer["spec"]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    pause = int(re.search(r"sleep (\d+)", command[-1])[1])
    assert Settings().request_timeout_ms / 1000 < pause < pod["terminationGracePeriodSeconds"]
