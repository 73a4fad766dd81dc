"""Rates are foretold from what a batch takes of a core, and measured on what is deployed."""

import json
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from acclimate_bench.cost import replicas
from acclimate_bench.cost.load import Connection
from acclimate_bench.cost.replicas import Found, Point, Spent, foretell, mean, spare

SPENT: Final = Spent(replica=0.008, redis=0.001, nginx=0.0005, callers=0.0005)


@pytest.mark.parametrize(
    ("shares", "cores", "rate", "limit"),
    [
        ([1.0], 2, 125, "replicas"),
        ([0.5, 0.5], 2, 200, "all cores"),
        ([0.25] * 4, 2, 200, "all cores"),
        ([1 / 7] * 7, 8, 500, "all else"),  # one core is left for the others
        ([0.8, 0.2], 2, 156.25, "replicas"),  # the one that has most of the clients
        ([0.4, 0.1, 0.4, 0.1], 2, 156.25, "replicas"),  # the first and the third share a core
        ([0.4, 0.4, 0.1, 0.1], 2, 200, "all cores"),
    ],
)
def test_what_is_as_busy_as_can_be_foretells_the_rate(shares: list[float], cores: int, rate: float, limit: str) -> None:
    foretold, by = foretell(SPENT, shares, cores)
    assert foretold == pytest.approx(rate)
    assert by == limit


def test_a_replica_takes_as_many_times_more_of_a_core_as_a_bare_step() -> None:
    known = Point(100.0, [0.01], SPENT, 1.0, 1.0, 0.0)
    foretold, _ = Found(known, 1.25, [0.5, 0.5], known).foretell(cores=2)
    assert foretold == pytest.approx(2 / (1.25 * 0.008 + 0.002))


def test_what_was_measured_in_turn_is_averaged() -> None:
    first = Point(100.0, [0.01], Spent(0.5, 0.25, 0.125, 0.25), 40.0, 1000.0, 0.0)
    second = Point(50.0, [0.02, 0.03], Spent(1.0, 0.75, 0.375, 0.25), 60.0, 3000.0, 0.5)
    assert mean([first, second]) == Point(75.0, [0.01, 0.02, 0.03], Spent(0.75, 0.5, 0.25, 0.25), 50.0, 2000.0, 0.25)


def test_a_connection_that_the_server_ends_is_opened_anew() -> None:
    accepted = list[object]()

    class Ending(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            accepted.append(self.client_address)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            if len(accepted) == 2:
                self.send_header("Connection", "close")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Ending) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        connection = Connection(server.server_port, ["/clients/a/predict"], (1, 2, 2))
        for _ in range(3):
            connection.exchange()
        connection.close()
        server.shutdown()
    first, second, third = accepted
    assert first == second != third


def test_replicas_have_cores_of_their_own_while_there_are_any() -> None:
    assert [spare([0, 1, 2], count) for count in (1, 2, 3, 4)] == [[1, 2], [2], [0, 1, 2], [0, 1, 2]]


@pytest.mark.slow
@pytest.mark.usefixtures("integration")
def test_points_are_measured_behind_nginx_on_one_redis_and_on_a_cluster(
    bench: Callable[..., int], program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program("nginx")
    monkeypatch.setattr(replicas, "ADAPTERS", ("fedcal",))
    monkeypatch.setattr(replicas, "REPLICAS", (2,))
    assert bench("replicas", "--quick", "--json", str(tmp_path / "told.json")) == 0
    points, redis, planned = json.loads((tmp_path / "told.json").read_text()).values()
    assert [row["name"] for row in points] == ["2 replicas, one Redis", "2 replicas, a cluster of 3"]
    for row in points:
        assert row["rows/s"] > 0
        assert row["p50 ms"] <= row["p99 ms"]
        assert row["off by"] == pytest.approx(abs(row["foretold"] / row["rows/s"] - 1))
        assert row["replica ms"] > 0
        assert row["one replica ms"] > 0
        assert row["bare step x"] > 0
        assert 0.5 <= row["largest share"] < 1, "nginx gives some clients to each"
        cores = len(os.sched_getaffinity(0))
        busiest = row["one replica ms"] * row["bare step x"] / 1000 * (row["largest share"] if cores > 1 else 1)
        assert row["foretold"] <= 20 / busiest * 1.001, "no core works more than a second in one"
    for row in redis:
        assert row["bytes received"] > 28 * 28, "a batch leaves a state in Redis"
        assert row["commands"] > 2
    assert [row["name"] for row in planned] == ["1,000", "10,000", "100,000", "1,000,000", "10,000,000"]
    most = planned[-1]
    assert most["batches/s"] == pytest.approx(1e7 * 24 * 3 / 86_400)
    assert most["replicas"] == pytest.approx(most["batches/s"] * points[0]["replica ms"] / 1000 / 0.6, abs=1)
    assert planned[0]["replicas"] == 1
