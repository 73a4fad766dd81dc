"""Alerts, dashboard and PodMonitor: checked by promtool, and against what a Prometheus has scraped of real replicas."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from acclimate_client import Client, LabelledRow
from acclimate_service.http.access import NEEDS

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]
METRIC = re.compile(r"\b(?:acclimate|process)_[a-z_]+")
MAY_BE_EMPTY = ('!="', "== ", "> ", 'lease="stolen"')
"""What leaves out series, so that a replica without faults has none for it."""


@pytest.fixture(scope="module")
def promtool(program: Callable[[str], str]) -> Callable[..., str]:
    """What promtool prints; it fails the test where it fails."""
    path = program("promtool")

    def run(*words: str) -> str:
        done = subprocess.run([path, *words], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_alerts_are_sound_and_fire_when_they_should_and_not_else(promtool):
    assert f"SUCCESS: {len(RULES)} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yaml")


def test_every_alert_is_tried_when_all_is_well_and_when_nothing_is():
    names = [rule["alert"] for rule in RULES]
    for tried in yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())["tests"]:
        assert [each["alertname"] for each in tried["alert_rule_test"]] == names
        assert {bool(each["exp_alerts"]) for each in tried["alert_rule_test"]} == {tried["name"] == "nothing is well"}


def test_a_promtool_that_finds_nothing_would_be_noticed(promtool, tmp_path):
    text = (MONITORING / "alerts.test.yaml").read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("[alerts.yaml]", f"[{MONITORING / 'alerts.yaml'}]").replace("15% of", "16% of"))
    with pytest.raises(AssertionError, match="15% of the requests fail"):
        promtool("test", "rules", str(wrong))


def test_the_pod_monitor_finds_the_replicas_and_brings_a_key():
    (monitor,) = yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text())
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes/base/replicas.yaml").read_text()))
    template = deployment["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert NEEDS[f"GET {endpoint['path']}"] == "admin"
    assert endpoint["authorization"]["type"] == "Bearer"


def test_the_dashboard_is_one_that_grafana_lays_out():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used <= variables


@pytest.fixture(scope="module")
def scraped(replicas, program, tmp_path_factory, wait) -> Iterator[str]:
    """URL of a Prometheus that has scraped two replicas, which answered batches and were told labels."""
    folder = tmp_path_factory.mktemp("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    targets = [f"127.0.0.1:{one.port}" for one in replicas]
    job = {"job_name": "acclimate", "scrape_interval": "500ms", "scrape_timeout": "400ms"}
    config = {"scrape_configs": [{**job, "static_configs": [{"targets": targets}]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for one in replicas:
        work_with(one.url)
    command = [
        program("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
    ]
    process = subprocess.Popen([*command, f"--web.listen-address={listen}"], stderr=subprocess.DEVNULL)
    url = f"http://{listen}"

    def looked_often_enough() -> bool:
        try:
            found = instant(url, "count_over_time(up[1m]) > 3 and up == 1")
        except httpx.TransportError:
            return False
        return len(found) == len(targets)

    try:
        wait(looked_often_enough)
        for one in replicas:
            work_with(one.url)
        time.sleep(2)  # two more scrapes, which have more than those before
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_every_metric_that_a_query_names_is_scraped(replicas):
    families = [family for one in replicas for family in families_of(one.url)]
    names = {sample.name for family in families for sample in family.samples}
    declared = names | {family.name + "_total" * (family.type == "counter") for family in families}
    for query in QUERIES:
        assert set(METRIC.findall(query)) <= declared, query


@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_answered(scraped, promtool, replicas, query):
    asked = re.sub(r"\$__rate_interval|\b\d+[mh](?=\])", "1m", query).replace("$instance", ".*").replace("$job", ".*")
    promtool("query", "instant", scraped, asked)
    have = {sample.name for one in replicas for family in families_of(one.url) for sample in family.samples}
    if set(METRIC.findall(query)) <= have and not any(words in query for words in MAY_BE_EMPTY):
        assert instant(scraped, asked), f"{asked} finds nothing"


def families_of(url: str) -> list[Any]:
    return list(text_string_to_metric_families(httpx.get(f"{url}/metrics").text))


def instant(url: str, query: str) -> list[Any]:
    reply = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    found: list[Any] = reply.get("data", {}).get("result", [])
    return found


def work_with(url: str) -> None:
    """Batches of two adapters, and labels of them."""
    images = np.random.default_rng(0).integers(0, 256, (8, 1, 28, 28), np.uint8)
    with Client(url) as client:
        client.configure("other", "fedcal")
        for name in ("cam", "other"):
            prediction = client.predict(name, images)
            client.feedback(name, [LabelledRow(prediction.request_id, row, 1) for row in range(8)])
