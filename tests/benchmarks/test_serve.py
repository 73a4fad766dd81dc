import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_adapters.methods.priors import maximise_likelihood
from acclimate_bench.cost.inputs import BUNDLES
from acclimate_bench.cost.peer_em import quapy_em
from acclimate_bench.cost.peers import prepare_litserve
from acclimate_bench.cost.remote import in_blocks, local, remote
from acclimate_bench.cost.replica import Replica, replica
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.serve import price

PREDICT = "/clients/load-{}/predict"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(tmp_path_factory.mktemp("served"), model_store=BUNDLES, adapter="none", threads=1) as running:
        yield running


@pytest.fixture
def load(served: Replica) -> Callable[[str, int], object]:
    port = served.url.rpartition(":")[2]
    return lambda path, connections: remote("load", port, path, "1,28,28", connections)


@pytest.mark.slow
def test_the_price_is_what_the_median_over_http_has_more_than_the_one_in_process(tmp_path: Path) -> None:
    report = Report()
    report.table("fashion-cnn", "p50", "p5", "p95", "minus in process", "target")
    price(report, tmp_path, BUNDLES, "fashion-cnn", "none", repeats=1)
    live, alone, request, by_sdk, loop = report.tables["fashion-cnn"]
    assert 0 < loop["p50"] < request["p50"]
    for row in (request, by_sdk):
        assert row["minus in process"] == row["p50"] - alone["p50"]
        assert 0 < live["p50"] < row["p50"]
    assert request["target"].startswith("<= 3 ")
    assert by_sdk["target"] == ""


@pytest.mark.slow
def test_a_load_sends_as_many_requests_over_each_connection(served: Replica, load: Callable) -> None:
    counted = {"name": "acclimate_rows_total"}
    before = served.metric(**counted)
    with load(PREDICT, 3) as work:
        (seconds,) = work(6)
    assert seconds > 0
    assert served.metric(**counted) - before == 6 * 20
    assert [served.client.get(f"load-{k}").state.version for k in range(3)] == [2, 2, 2]


@pytest.mark.slow
def test_a_load_that_is_refused_ends_in_an_error(load: Callable) -> None:
    with load("/nowhere", 1) as work, pytest.raises(ValueError, match="Expecting value"):
        work(1)


def test_blocks_are_worked_off_in_turn() -> None:
    calls: list[str] = []
    first, second = in_blocks(4, local(lambda: calls.append("a")), local(lambda: calls.append("b")), block=2)
    assert len(first.seconds) == len(second.seconds) == 4
    assert "".join(calls) == "aabb" + 2 * "aaaabbbb"  # a warm-up, then blocks whose first two do not count


def test_litserve_is_not_installed_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((subprocess.CalledProcessError, OSError), match="file"):
        prepare_litserve(tmp_path / "file" / "environment")


def test_the_peer_of_em_finds_the_prior_that_em_finds() -> None:
    pytest.importorskip("quapy")
    posteriors = np.random.default_rng(0).dirichlet([0.3, 0.2, 0.1], 200)
    prior = np.full(3, 1 / 3)
    ours = maximise_likelihood(torch.tensor(posteriors).log(), torch.tensor(prior), steps=1000).prior
    np.testing.assert_allclose(quapy_em(prior)(posteriors), ours, atol=2e-3)
