"""The deployed nginx configuration in front of two services that share one Redis."""

import io
import time

import httpx
import numpy as np
import pytest

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 1, 28, 28), dtype=np.uint8)
CLIENTS = [f"phone-{number}" for number in range(24)]


@pytest.fixture(scope="module")
def balancer(replicas, balance):
    return balance(*(one.port for one in replicas))


@pytest.fixture(scope="module")
def http(balancer):
    with httpx.Client(base_url=balancer.url, timeout=30) as client:
        yield client


@pytest.fixture
def predict(http, balancer):
    """Sends a client's next batch; tells the replica that answered, by its port, and the version of the state."""
    body = io.BytesIO()
    np.save(body, IMAGES)

    def send(client, path="/clients/{}/predict"):
        headers = {"Content-Type": "application/x-npy"}
        reply = http.post(path.format(client), content=body.getvalue(), headers=headers)
        assert reply.status_code == 200, reply.text
        served_by = balancer.logged(reply.headers["X-Caller-Request-Id"])["upstream"].rpartition(", ")[2]
        return int(served_by.rpartition(":")[2]), reply.json()["state"]["version"]

    return send


@pytest.fixture(scope="module")
def home(http, balancer):
    """The replica of every client, by its port."""

    def of(client):
        reply = http.get(f"/clients/{client}")
        return int(balancer.logged(reply.headers["X-Caller-Request-Id"])["upstream"].rpartition(":")[2])

    return {client: of(client) for client in CLIENTS}


def test_a_client_always_meets_the_same_replica(predict, home):
    for client in CLIENTS[:4]:
        assert {predict(client)[0] for _ in range(4)} == {home[client]}


def test_a_client_meets_the_same_replica_however_its_id_is_spelt_in_the_path(http, balancer):
    replies = [http.get(path) for path in ("/clients/edge~7", "/clients/edge%7E7", "/clients/edge~7?fresh=1")]
    assert len({balancer.logged(reply.headers["X-Caller-Request-Id"])["upstream"] for reply in replies}) == 1


def test_a_client_of_a_model_by_its_name_meets_the_replica_of_that_id(predict, home):
    for client in CLIENTS[4:8]:
        assert {predict(client, "/models/fashion-cnn/clients/{}/predict")[0] for _ in range(3)} == {home[client]}


def test_different_clients_spread_over_the_replicas(home, replicas):
    shares = [list(home.values()).count(one.port) for one in replicas]
    assert sum(shares) == len(CLIENTS)
    assert min(shares) >= len(CLIENTS) // 6


def test_a_second_nginx_sends_every_client_to_the_same_replica(balance, replicas, home):
    other = balance(*(one.port for one in replicas))
    for client in reversed(CLIENTS):
        reply = httpx.get(f"{other.url}/clients/{client}")
        assert other.logged(reply.headers["X-Caller-Request-Id"])["upstream"] == f"127.0.0.1:{home[client]}"


def test_the_callers_request_id_reaches_the_service_and_comes_back(http):
    reply = http.get("/clients/nobody", headers={"X-Request-Id": "trace-1"})
    assert reply.headers["X-Caller-Request-Id"] == "trace-1"
    assert reply.headers["X-Request-Id"] == reply.json()["request_id"] != "trace-1"


def test_a_request_id_that_could_break_a_log_is_replaced(http, balancer):
    reply = http.get("/clients/nobody", headers={"X-Request-Id": 'x", "status": 200'})
    assert balancer.logged(reply.headers["X-Caller-Request-Id"])["status"] == 404


def test_a_body_of_the_largest_size_reaches_the_service(http):
    reply = http.post("/clients/big/predict", content=bytes(32 * 2**20), headers={"Content-Type": "application/x-npy"})
    assert reply.json()["code"] == "malformed_body"


def test_a_larger_body_is_refused_as_the_service_refuses_it(http, replicas):
    body = bytes(32 * 2**20 + 1)
    by_nginx = http.post("/clients/big/predict", content=body, headers={"X-Request-Id": "big"})
    by_service = httpx.post(f"{replicas[0].url}/clients/big/predict", content=body, headers={"X-Request-Id": "big"})
    assert by_nginx.headers["Content-Type"] == by_service.headers["Content-Type"]
    own = {"request_id": "big"}
    assert by_nginx.json() == by_service.json() | own


def test_the_metrics_of_whichever_replica_are_not_shown(http):
    assert http.get("/metrics").status_code == 404


def test_the_clients_of_a_stopped_replica_move_on_with_their_states_and_return_when_it_is_back(predict, home, replicas):
    stopped, staying = replicas
    moving = next(client for client in CLIENTS if home[client] == stopped.port)
    settled = next(client for client in CLIENTS if home[client] == staying.port)
    _, before = predict(moving)

    assert stopped.stop() == 0
    assert predict(moving) == (staying.port, before + 1)
    assert predict(settled)[0] == staying.port

    stopped.start()
    stopped.wait_until_ready()
    version, deadline = before + 1, time.monotonic() + 60
    served_by = staying.port
    while served_by != stopped.port:
        assert time.monotonic() < deadline
        served_by, answered = predict(moving)
        assert answered == version + 1
        version = answered
        time.sleep(0.1)
