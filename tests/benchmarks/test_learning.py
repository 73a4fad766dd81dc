"""The benchmark of learning from labels, on two clients of the carried digits or by hand."""

import re
from pathlib import Path

import numpy as np
import pytest

from acclimate_bench.accuracy.methods import choose
from acclimate_bench.cli import main
from acclimate_bench.errors import BenchError
from acclimate_bench.guard import learning
from acclimate_bench.guard.learning import Learned


def test_only_methods_that_can_learn_are_run() -> None:
    assert {method.name for method in learning.learners(())} == {"fedcal_pl", "fedcal_em", "fedcal_fm", "balanced"}
    with pytest.raises(BenchError, match="em learn nothing from labels; there are fedcal_pl"):
        learning.learners(choose(["em", "balanced"], slow=False))


def test_the_table_gives_gains_over_learning_nothing() -> None:
    results = [Learned("label", "balanced", 0.05, 83.6, 90.4, (91.3, 89.4), 0.24)]
    text = learning.to_text(results, [1, 5], 2)
    assert "## 5 % of rows labelled" in text
    (row,) = re.findall(r"\| label .*", text)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("label", "balanced", "83.6", "90.4", "+0.9"),
        *("-1.0", "0.2"),
    ]


def test_no_label_no_gain_and_all_labels_at_once_change_answers() -> None:
    from acclimate_bench.accuracy.selection import DIGITS_CARRIED, FASHION_CARRIED
    from acclimate_bench.data.shifts import Folders

    shift = Folders(FASHION_CARRIED, DIGITS_CARRIED).load("label")
    (method,) = choose(["fedcal_pl"], slow=False)
    done: list[str] = []
    none, every = learning.measure(shift, [method], [20.0], [1e-9, 1.0], 1, done.append)
    assert isinstance(none, Learned)
    assert isinstance(every, Learned)
    assert none.by_weight == (none.without,)
    assert every.by_weight[0] > every.without + 1
    assert len(done) == learning.count_runs([method], [20.0], [1e-9, 1.0], 1)
    assert np.isclose(none.spread, 0)


def test_the_command_refuses_what_a_table_of_learning_cannot_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["guard", "--learn", "1", "--json", str(tmp_path / "a.json")]) == 2
    assert "--learn prints a table" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["guard", "--learn", "0"])
    assert "use a weight above 0" in capsys.readouterr().err
