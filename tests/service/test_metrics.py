"""What a scrape says of requests, and what each reply says of its own time."""

import re
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from acclimate_service.metrics import PHASES

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
MODEL = {"model": "fashion-cnn"}


def spent(reply):
    """The header Server-Timing, in seconds."""
    found = re.findall(r"(\w+);dur=([0-9.]+)(?:, |$)", reply.headers["server-timing"])
    return {name: float(milliseconds) / 1000 for name, milliseconds in found}


def scrape(replica):
    text = replica.http.get("/metrics").text
    return {family.name: family for family in read_text(text)}


def value(replica, name, **labels):
    samples = [each for family in scrape(replica).values() for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_a_batch_is_counted_by_method_route_model_and_adapter(make_replica, stream, post):
    replica = make_replica(adapter="fedcal")
    replica.http.put("/clients/other", json={"adapter": "atp"})
    for client in ("cam", "cam", "other"):
        assert post(replica, client, stream(0, 1)[0]).status_code == 200
    route = {"route": "/clients/{client_id}/predict", "method": "POST", **MODEL}
    assert value(replica, "acclimate_requests_total", status="200", **route) == 3
    assert value(replica, "acclimate_request_duration_seconds_count", **route) == 3
    assert value(replica, "acclimate_requests_total", method="PUT", status="200") == 1
    for adapter, batches in (("fedcal", 2), ("atp", 1)):
        assert value(replica, "acclimate_rows_total", adapter=adapter, **MODEL) == 10 * batches
        assert value(replica, "acclimate_step_seconds_count", adapter=adapter, **MODEL) >= batches
    for phase in PHASES:
        assert value(replica, "acclimate_phase_seconds_count", phase=phase) >= 3
    assert value(replica, "acclimate_redis_seconds_count") > 3
    assert 0 < value(replica, "acclimate_redis_seconds_sum") < 10


def test_a_reply_says_on_what_its_time_was_spent(replica, stream, post):
    post(replica, "timed", stream(0, 1)[0])
    reply = post(replica, "timed", stream(0, 1)[0])
    times = spent(reply)
    assert times.keys() == {*PHASES, "total"}
    assert times["decode"] <= times["parse"] + 0.0001
    for phase in PHASES:
        assert 0 <= times[phase] <= times["total"]
    assert times["compute"] > 0
    assert times["store"] > 0
    described = spent(replica.http.get("/clients/timed"))
    assert described.keys() >= {"parse", "store", "total"}
    assert "compute" not in described
    assert spent(replica.http.get("/nowhere")).keys() == {"total"}


def test_who_waits_for_others_is_told_so(make_replica, gate, pool, stream, post):
    gate.shut = False
    replica, (images,) = make_replica(adapter="gated"), stream(0, 1)
    gate.shut = True
    first = pool.submit(post, replica, "one", images)
    gate.wait_for_a_step()
    second = pool.submit(post, replica, "two", images)
    replica.await_waiting(2)
    time.sleep(0.3)
    gate.open()  # of the worker's one thread
    at_work, waited = spent(first.result()), spent(second.result())
    assert at_work["compute"] > 0.3 > at_work["queue"]
    assert waited["queue"] > 0.2 > waited["compute"]
    assert value(replica, "acclimate_phase_seconds_sum", phase="queue") > 0.2


def test_the_scrape_is_openmetrics_where_that_is_asked_for(replica, stream, post):
    post(replica, "scraped", stream(0, 1)[0])
    plain = replica.http.get("/metrics", headers={"Accept": "*/*"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    negotiated = replica.http.get("/metrics", headers={"Accept": f"{OPEN_METRICS},text/plain;version=0.0.4;q=0.5"})
    assert negotiated.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert negotiated.text.endswith("# EOF\n")
    families = {family.name: family.type for family in read_open_metrics(negotiated.text)}
    assert families["acclimate_requests"] == "counter"
    assert families["acclimate_build"] == "info"
    assert families.keys() >= {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"}


def test_it_is_said_what_is_running(replica):
    (sample,) = scrape(replica)["acclimate_build_info"].samples
    assert sample.labels.keys() == {"version", "torch", "device", "python"}
    assert (sample.value, sample.labels["version"]) == (1, replica.process.version)


def test_no_gauge_only_grows(replica):
    """Each can fall; what only grows is a counter, of which rates can be taken over restarts."""
    gauges = {name for name, family in scrape(replica).items() if family.type == "gauge"}
    assert {name for name in gauges if name.startswith("acclimate_")} == {
        "acclimate_background_failing",
        "acclimate_build_info",
        "acclimate_ready",
        "acclimate_state_cache_bytes",
        "acclimate_state_journal_bytes",
        "acclimate_state_journal_entries",
        "acclimate_state_sessions",
        "acclimate_version_share",
        "acclimate_waiting",
    }
    assert not any(name.endswith("_created") for name in gauges)


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_what_nobody_serves_has_no_label_of_its_own(replica, method):
    replica.http.request(method, "/some/path/of/a/scanner")
    assert value(replica, "acclimate_requests_total", method=method, route="unknown", status="404", model="") >= 1
