"""nginx and Envoy, configured as deployed, in front of servers that fail, or answer bit by bit."""

import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

ENVOY = Path(__file__).parents[2] / "deploy/kubernetes/base/balancer.yaml"


class Server(ThreadingHTTPServer):
    """Ready; answers, or reads a request and hangs up. The second half of a reply waits until the first arrived."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str] = []
        self.bytes_read = 0
        self.hangs_up = False
        self.first_half_arrived = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self.server.bytes_read += len(self.rfile.read(size))
        self.close_connection = True
        if self.path == "/v2/health/ready":
            self.send_response(200)
            self.end_headers()
            return
        self.server.seen.append(self.command)
        if self.server.hangs_up:
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"first")
        if self.server.first_half_arrived.wait(5):
            self.wfile.write(b"second")

    do_GET = do_POST = do_PUT = answer  # noqa: N815 - the names http.server looks up

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    pair = Server(), Server()
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in pair]
    for thread in threads:
        thread.start()
    yield pair
    for one, thread in zip(pair, threads, strict=True):
        one.shutdown()
        one.server_close()
        thread.join()


@pytest.fixture(params=["balance", "balance_by_envoy"], ids=["nginx", "envoy"])
def balancer(servers, request):
    return request.getfixturevalue(request.param)(*(one.server_port for one in servers))


@pytest.fixture
def failing(servers):
    for one in servers:
        one.hangs_up = True
    return servers


def test_a_batch_that_was_sent_is_never_sent_to_another_replica(balancer, failing):
    reply = httpx.post(f"{balancer.url}/clients/phone/predict", content=b"batch")
    assert reply.status_code == 502
    assert failing[0].seen + failing[1].seen == ["POST"]


def test_no_caller_can_ask_for_a_batch_to_be_sent_twice(balancer, failing):
    headers = {"X-Envoy-Retry-On": "5xx,reset", "X-Envoy-Max-Retries": "3"}
    httpx.post(f"{balancer.url}/clients/phone/predict", content=b"batch", headers=headers)
    assert failing[0].seen + failing[1].seen == ["POST"]


def test_nginx_sends_a_read_to_the_other_replica_when_the_first_hangs_up(balance, failing):
    balancer = balance(*(one.server_port for one in failing))
    httpx.get(f"{balancer.url}/clients/phone")
    assert failing[0].seen == failing[1].seen == ["GET"]


@pytest.mark.usefixtures("failing")
def test_what_no_replica_answers_is_a_problem_that_says_what_is_known(balancer):
    reply = httpx.post(f"{balancer.url}/clients/phone/predict", content=b"batch", headers={"X-Request-Id": "trace-1"})
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.headers["Retry-After"] == "1"
    problem = reply.json()
    assert (problem["status"], problem["retryable"], problem["state_committed"]) == (502, True, "unknown")
    assert problem["request_id"] == reply.headers["X-Request-Id"] == "trace-1"


def test_every_batch_goes_to_the_other_replica_when_one_does_not_listen(balancer, servers):
    deaf, listening = servers
    deaf.shutdown()
    deaf.server_close()
    listening.first_half_arrived.set()
    replies = [httpx.post(f"{balancer.url}/clients/phone-{number}/predict", content=b"batch") for number in range(8)]
    assert {reply.text for reply in replies} == {"firstsecond"}
    assert listening.seen == ["POST"] * 8


def test_the_largest_batches_too_go_to_the_other_replica(balancer, servers):
    deaf, listening = servers
    deaf.shutdown()
    deaf.server_close()
    listening.first_half_arrived.set()
    largest = bytes(32 * 2**20)
    replies = [httpx.post(f"{balancer.url}/clients/phone-{number}/predict", content=largest) for number in range(3)]
    assert {reply.text for reply in replies} == {"firstsecond"}
    assert listening.bytes_read == 3 * len(largest)


def test_a_batch_that_is_too_large_is_a_problem_that_says_so(balancer, servers):
    larger = bytes(32 * 2**20 + 1)
    reply = httpx.post(f"{balancer.url}/clients/phone/predict", content=larger, headers={"X-Request-Id": "big"})
    assert (reply.status_code, reply.headers["Content-Type"]) == (413, "application/problem+json")
    assert (reply.json()["code"], reply.json()["request_id"]) == ("body_too_large", "big")
    assert not servers[0].seen + servers[1].seen


def test_the_metrics_of_whichever_replica_are_not_shown(balancer, servers):
    assert httpx.get(f"{balancer.url}/metrics").status_code == 404
    assert not servers[0].seen + servers[1].seen


def test_a_reply_goes_out_as_it_comes(balancer, servers):
    with httpx.stream("GET", f"{balancer.url}/clients/phone") as reply:
        parts = reply.iter_raw()
        assert next(parts) == b"first"
        for one in servers:
            one.first_half_arrived.set()
        assert b"".join(parts) == b"second"


@pytest.fixture
def envoy_balancer(servers, balance_by_envoy):
    for one in servers:
        one.first_half_arrived.set()
    return balance_by_envoy(*(one.server_port for one in servers))


def home(balancer, servers, path):
    """Which of the servers a request meets."""
    before = len(servers[1].seen)
    assert httpx.get(f"{balancer.url}{path}").status_code == 200
    return len(servers[1].seen) - before


def test_envoy_sends_a_client_to_the_same_replica_however_its_id_is_spelt(envoy_balancer, servers):
    paths = "/clients/edge~7", "/clients/edge%7E7", "/clients/edge~7?fresh=1", "/clients/edge~7/timeline"
    assert len({home(envoy_balancer, servers, path) for path in paths}) == 1


def test_envoy_spreads_clients_and_a_second_envoy_agrees(envoy_balancer, balance_by_envoy, servers):
    second = balance_by_envoy(*(one.server_port for one in servers))
    homes = [home(envoy_balancer, servers, f"/clients/phone-{number}") for number in range(24)]
    assert 4 <= sum(homes) <= 20
    assert [home(second, servers, f"/clients/phone-{number}") for number in range(24)] == homes


def test_envoy_about_to_end_is_not_ready_and_closes_connections_but_answers(envoy_balancer):
    ready = f"{envoy_balancer.url}/envoy/ready"
    assert httpx.get(ready).status_code == 200
    (deployment, *_) = yaml.safe_load_all(ENVOY.read_text())
    hook = deployment["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    *shell, script = hook
    script = script.replace("9901", str(envoy_balancer.admin_port)).replace("sleep 35", "")
    assert "OK" in subprocess.run([*shell, script], capture_output=True, text=True, check=True).stdout
    assert httpx.get(ready).status_code == 503
    reply = httpx.post(f"{envoy_balancer.url}/clients/phone/predict", content=b"batch")
    assert (reply.status_code, reply.headers["Connection"]) == (200, "close")


def test_envoy_logs_every_request(envoy_balancer):
    httpx.get(f"{envoy_balancer.url}/clients/phone", headers={"X-Request-Id": "trace-1"})
    entry = envoy_balancer.logged("trace-1")
    assert (entry["status"], entry["path"], entry["attempts"]) == (200, "/clients/phone", 1)


def test_a_state_passes_that_is_larger_than_any_batch(balancer, servers):
    larger = bytes(32 * 2**20 + 1)
    assert httpx.put(f"{balancer.url}/clients/phone/state", content=larger).status_code == 200
    refused = httpx.put(f"{balancer.url}/clients/phone/predict", content=larger)
    assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
    assert "33554432" in refused.json()["detail"]
    assert [*servers[0].seen, *servers[1].seen] == ["PUT"]


def test_it_is_said_how_large_a_state_may_be(balancer):
    too_large = (bytes(2**20) for _ in range(257))
    refused = httpx.put(f"{balancer.url}/clients/phone/state", content=too_large, timeout=60)
    assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
    assert "268435456" in refused.json()["detail"]
