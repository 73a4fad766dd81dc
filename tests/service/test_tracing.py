"""One request followed by its id through the access log, its trace, Server-Timing and metrics; a collector is real."""

import gzip
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from acclimate_service.keys import create
from acclimate_service.logs import hashed
from acclimate_service.tracing import open_tracing

proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MILLISECOND = 1_000_000


class Collector(ThreadingHTTPServer):
    """Takes what OTLP exporters send over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.came = threading.Condition()
        self.spans: list = []
        self.resources: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        with self.came:
            for each in proto.ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append({item.key: item.value.string_value for item in each.resource.attributes})
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
            self.came.notify_all()

    def of_request(self, request_id: str) -> tuple:
        """The span of a request, and those below it, once they are here."""

        def found() -> list:
            return [span for span in self.spans if attributes(span).get("acclimate.request_id") == request_id]

        with self.came:
            assert self.came.wait_for(found, timeout=20), "no such span came"
            (span,) = found()
            return span, [each for each in self.spans if each.parent_span_id == span.span_id]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.server.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def attributes(span) -> dict:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector
        collector.shutdown()
        thread.join()


def test_one_request_is_followed_by_its_id_through_log_trace_timing_and_metrics(
    run_service, tmp_path, stream, post, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "acclimate.access")
    (key, line), (images,) = create("acme", ["predict", "admin"]), stream(0, 1)
    (tmp_path / "keys").write_text(line)
    authorization = {"Authorization": f"Bearer {key}"}
    settings = {"keys_file": tmp_path / "keys", "data_dir": tmp_path / "data", "replica": "r-1", "adapter": "fedcal"}
    with collecting(monkeypatch) as collector, run_service(**settings) as replica:
        asked = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "of-the-caller"}
        post(replica, "cam-7", images, **authorization)
        reply = post(replica, "cam-7", images, **authorization, **asked)
        request_id = reply.headers["x-request-id"]
        span, below = collector.of_request(request_id)

        (logged,) = [each for each in caplog.records if getattr(each, "request_id", "") == request_id]
        assert (logged.trace_id, logged.caller_request_id, logged.tenant) == (TRACE, "of-the-caller", "acme")
        assert (logged.status, logged.model) == (200, "fashion-cnn")

        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.name == "POST /clients/{client_id}/predict"
        assert attributes(span) == {
            "http.request.method": "POST",
            "http.route": "/clients/{client_id}/predict",
            "http.response.status_code": 200,
            "acclimate.request_id": request_id,
            "acclimate.caller_request_id": "of-the-caller",
            "acclimate.client": hashed(replica.service.settings.secret, "acme/cam-7"),
            "acclimate.tenant": "acme",
            "acclimate.key": logged.key,
            "acclimate.model": "fashion-cnn",
        }
        assert "cam-7" not in str(span) + str(below)
        assert key not in str(span)
        service = {
            "service.name": "acclimate",
            "service.instance.id": "r-1",
            "service.version": replica.process.version,
        }
        assert service.items() <= collector.resources[0].items()

        timing = dict(re.findall(r"(\w+);dur=([0-9.]+)", reply.headers["server-timing"]))
        whole = (span.end_time_unix_nano - span.start_time_unix_nano) / MILLISECOND
        assert abs(whole - logged.milliseconds) < 5
        assert whole >= float(timing.pop("total")) - 1
        assert {each.name for each in below} == timing.keys() == {"parse", "decode", "queue", "compute", "store"}
        for phase, milliseconds in timing.items():
            spells = [each for each in below if each.name == phase]
            assert all(span.start_time_unix_nano <= each.start_time_unix_nano + MILLISECOND for each in spells)
            assert all(each.end_time_unix_nano <= span.end_time_unix_nano + MILLISECOND for each in spells)
            longest = max(each.end_time_unix_nano - each.start_time_unix_nano for each in spells) / MILLISECOND
            assert longest <= float(milliseconds) + 0.1 <= whole + 1

        scraped = replica.http.get("/metrics", headers=authorization).text
        route = 'method="POST",model="fashion-cnn",route="/clients/{client_id}/predict"'
        assert f'acclimate_requests_total{{{route},status="200"}} 2.0' in scraped
        assert 'acclimate_phase_seconds_count{phase="compute"} 2.0' in scraped
        assert 'acclimate_rows_total{adapter="fedcal",model="fashion-cnn"} 20.0' in scraped


def test_a_failure_is_an_error_of_its_span_and_begins_a_trace_of_its_own(make_replica, monkeypatch, post):
    with collecting(monkeypatch) as collector:
        replica = make_replica()
        replica.redis.shutdown(nosave=True)
        reply = replica.http.get("/clients/cam", headers={"traceparent": "nonsense"})
        assert reply.status_code == 503
        span, _ = collector.of_request(reply.headers["x-request-id"])
        assert (span.status.code, span.parent_span_id) == (2, b"")


def test_the_standard_variables_name_the_service_and_turn_it_off(monkeypatch, caplog):
    assert open_tracing("1", "r") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cameras")
    tracing = open_tracing("1", "r")
    assert tracing is not None
    assert tracing._provider.resource.attributes["service.name"] == "cameras"
    tracing.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("1", "r") is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert open_tracing("1", "r") is None
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is grpc; accepted is http/protobuf" in caplog.text
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_tracing("1", "r") is None
    assert 'pip install "acclimate[otel]"' in caplog.text


def test_a_collector_that_is_away_costs_no_request(make_replica, monkeypatch, stream, post):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    replica = make_replica()
    for _ in range(3):
        assert post(replica, "cam", stream(0, 1)[0]).status_code == 200
