"""Rates are foretold from what a batch takes of a core, and measured on what is deployed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_bench.cost import replicas
from acclimate_bench.cost.replicas import Spent, foretell, limit, spare


def test_what_is_as_busy_as_can_be_foretells_the_rate() -> None:
    spent = Spent(replica=0.008, redis=0.001, nginx=0.0005, callers=0.0005)
    assert foretell(spent, replicas=1, cores=2) == pytest.approx(125)
    assert limit(spent, replicas=1, cores=2) == "replicas"
    assert foretell(spent, replicas=2, cores=2) == foretell(spent, replicas=4, cores=2) == pytest.approx(200)
    assert limit(spent, replicas=4, cores=2) == "all cores"
    assert foretell(spent, replicas=7, cores=8) == pytest.approx(500), "one core is left for the others"
    assert limit(spent, replicas=7, cores=8) == "all else"


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
    for row in redis:
        assert row["bytes received"] > 28 * 28, "a batch leaves a state in Redis"
        assert row["commands"] > 2
    assert [row["name"] for row in planned] == ["1,000", "10,000", "100,000", "1,000,000", "10,000,000"]
    most = planned[-1]
    assert most["batches/s"] == pytest.approx(1e7 * 24 * 3 / 86_400)
    assert most["replicas"] == pytest.approx(most["batches/s"] * points[0]["replica ms"] / 1000 / 0.6, abs=1)
    assert planned[0]["replicas"] == 1
