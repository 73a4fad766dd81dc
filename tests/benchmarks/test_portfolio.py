"""The benchmark of choosing among adapters by labels: replays against the adapter itself, and its tables."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from acclimate_adapters import Labelled
from acclimate_adapters.portfolio import NO_OPINION, Portfolio, shrunk
from acclimate_bench.cli import main
from acclimate_bench.data.shift import Shift
from acclimate_bench.guard.portfolio import Predicted, choose, predict, replay

ARMS = ("t3a", "fedcal(estimator=em)")


@pytest.fixture(scope="module")
def some(few: Callable[..., Shift]) -> tuple[Shift, Predicted]:
    """Three clients of the hybrid shift, and what two arms predict of them."""
    shift, done = few("hybrid", 0, 1, 2), list[str]()
    predicted = predict(shift, ARMS, done.append)
    assert done == ["hybrid"] * 3
    return shift, predicted


def by_hand(shift: Shift, predicted: Predicted, share: float, seed: int) -> np.ndarray:
    """The replay with the adapter itself: every client hears of the fleet, steps, and is told labels."""
    adapter, rng = Portfolio(ARMS), np.random.default_rng(seed)
    states = [adapter.init(shift.model) for _ in shift.clients]
    hits, budget = np.empty(shift.labels.shape, bool), rng.random(len(states))
    for start in range(0, shift.labels.shape[1], 20):
        batch = slice(start, start + 20)
        for client in rng.permutation(len(states)):
            told = sum(state.tensors["counts"] for state in states).numpy()  # type: ignore[union-attr]
            state = adapter.informed(states[client], shrunk(told, np.full(3, NO_OPINION)).tolist())
            step = adapter.step(shift.model, state, shift.x(client)[batch])
            labels = shift.labels[client, batch]
            hits[client, batch] = step.logits.argmax(-1).numpy() == labels
            differing = np.flatnonzero((step.by_arm != step.frozen_logits.argmax(-1, keepdim=True)).any(1).numpy())
            budget[client] += 20 * share
            every = torch.cat([step.frozen_logits.argmax(-1, keepdim=True), step.by_arm], 1)
            one, other = adapter.rivals(step.state, 1e9) or (0, 0)
            drawn = sorted(rng.permutation(differing), key=lambda row: bool(every[row, one] == every[row, other]))
            rows = np.array(drawn, int)[: int(budget[client])]
            budget[client] -= len(rows)
            classes = every[rows]
            learned = Labelled(torch.from_numpy(labels[rows]), predicted=classes)
            states[client] = adapter.learn(shift.model, step.state, learned)
    return hits


@pytest.mark.parametrize(("share", "seed"), [(0.05, 0), (0.2, 1)])
def test_replays_answer_as_the_adapter_does(some: tuple[Shift, Predicted], share: float, seed: int) -> None:
    assert np.array_equal(replay(some[1], share, "asked", seed), by_hand(*some, share, seed))


def test_without_labels_the_frozen_model_answers(some: tuple[Shift, Predicted]) -> None:
    chosen = choose(some[1], 0.0, "asked", 2)
    assert (chosen.portfolio, chosen.harmed, chosen.worst) == (pytest.approx(chosen.frozen), 0, 0)


def test_random_rows_tell_less_than_asked_ones(some: tuple[Shift, Predicted]) -> None:
    predicted = some[1]
    differing = (predicted.classes != predicted.classes[..., :1]).any(-1).mean()
    assert 0 < differing < 0.5
    first = predicted.classes[..., 0]
    lucky = Predicted(
        "lucky", predicted.classes[..., 1], ("none", "t3a"), np.stack([first, predicted.classes[..., 1]], -1)
    )
    asked, random = (choose(lucky, 0.02, choice, 5).portfolio for choice in ("asked", "random"))
    assert asked > random


def test_the_command_prints_a_table_for_each_share(folder: object, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["portfolio", "--data", str(folder), "--shifts", "label", "--labels", "0", "0.1", "--seeds", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.findall(r"## (\S+) % of rows labelled", out) == ["0", "10"]
    rows = re.findall(r"^\| label .*", out, re.MULTILINE)
    assert len(rows) == 2
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[1] == cells[4], "without labels the frozen model answers"
    with pytest.raises(SystemExit):
        main(["portfolio", "--labels", "2"])
    assert "use a share of the rows from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(("lost", "harmed"), [(2, 0.0), (3, 100.0)])
def test_a_client_that_loses_exactly_two_points_is_not_harmed(lost: int, harmed: float) -> None:
    """The arm is right in the first half, where its labels are told, and errs in some rows of the second."""
    labels, classes = np.zeros((1, 200), np.int64), np.zeros((1, 200, 2), np.int64)
    labels[0, :100] = classes[0, :100, 1] = classes[0, 100 : 100 + lost, 1] = 1
    chosen = choose(Predicted("exact", labels, ("none", "t3a"), classes), 1.0, "asked", 1)
    assert (chosen.harmed, chosen.worst) == (harmed, -lost)
