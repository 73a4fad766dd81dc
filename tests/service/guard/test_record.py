import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.record import ROWS, Label, Record, Tally


def record_of(*batches):
    """A record of batches of (request id, frozen classes, adapted classes)."""
    record = Record()
    for request_id, frozen, adapted in batches:
        record = record.append(request_id, frozen, adapted, answering="adapted")
    return record


def test_each_row_counts_once_and_the_first_label_stays():
    record = record_of(("a", [0, 1, 2], [0, 2, 1]), ("b", [5], [6]))
    told, tally = record.tell([Label("a", 1, 2), Label("a", 2, 2), Label("b", 0, 9)])
    assert tally == Tally(counted=3)
    assert told.counts == Counts(wins=1, losses=1, labelled=3, frozen_right=1, adapted_right=1)
    again, tally = told.tell([Label("a", 1, 2), Label("a", 1, 0), Label("a", 0, 0), Label("a", 0, 0)])
    assert tally == Tally(counted=1, duplicate=2, contradicting=1)
    assert again.counts.labelled == 4
    assert record.counts == Counts(), "a record never changes"


@pytest.mark.parametrize("label", [Label("z", 0, 0), Label("a", 3, 0), Label("a", -1, 0)])
def test_rows_that_are_not_remembered_are_said_to_be_unknown(label):
    record = record_of(("a", [0, 1, 2], [0, 2, 1]))
    assert record.tell([label]) == (record, Tally(unknown=1))


def test_the_oldest_batches_go_first_and_what_they_taught_stays():
    record = record_of(*((f"r{number}", [1] * 100, [2] * 100) for number in range(20)))
    assert record.rows.shape == (3, 2000)
    record, _ = record.tell([Label("r0", 7, 2)])
    record = record.append("new", [1] * 100, [2] * 100, answering="frozen")
    assert record.rows.shape == (3, 2000)
    assert record.tell([Label("r0", 7, 2)])[1] == Tally(unknown=1)
    assert record.tell([Label("r1", 7, 2), Label("new", 99, 2)])[1] == Tally(counted=2)
    assert record.counts.labelled == 1


def test_a_batch_of_more_rows_than_are_remembered_is_remembered_alone():
    record = record_of(("a", [1], [1]), ("b", [1] * (ROWS + 5), [2] * (ROWS + 5)))
    assert record.rows.shape == (3, ROWS + 5)
    assert record.tell([Label("a", 0, 1)])[1] == Tally(unknown=1)
    assert record.tell([Label("b", ROWS + 4, 2)])[1] == Tally(counted=1)


def test_a_request_id_that_is_used_again_stands_for_the_newest_batch():
    record = record_of(("a", [0], [1]), ("a", [1], [0]))
    assert record.tell([Label("a", 0, 1)])[0].counts.losses == 1


@given(st.lists(st.tuples(st.text(max_size=8), st.integers(1, 300)), max_size=12), st.integers(0, 2**32 - 1))
def test_a_record_survives_its_bytes(batches, seed):
    rng = np.random.default_rng(seed)
    record = Record()
    for number, (request_id, size) in enumerate(batches):
        answering = ("adapted", "frozen")[number % 2]
        record = record.append(request_id, *rng.integers(0, 1000, (2, size)).tolist(), answering=answering)
        record, _ = record.tell([Label(request_id, int(rng.integers(size)), int(rng.integers(1000)))])
    read = Record.from_bytes(record.to_bytes())
    assert read == record
    assert np.array_equal(read.rows, record.rows)
    assert read.to_bytes() == record.to_bytes()
    beside = len(record.to_bytes()) - record.rows.nbytes - len(record.batches)
    assert 0 < beside < 100, "rows and batches are about all that it takes"
    assert record.rows.shape[1] <= max(ROWS, 300)


def test_what_arms_predicted_is_there_when_the_label_comes():
    record = record_of(("a", [0, 1], [0, 2]))
    record = record.append("b", [3, 4], [3, 5], answering="frozen", by_arm=[[3, 6, 3], [5, 4, 7]])
    record = record.append("c", [8], [8], answering="adapted")
    assert record.rows.tolist() == [
        [0, 1, 3, 4, 8],
        [0, 2, 3, 5, 8],
        [-1] * 5,
        [0, 1, 3, 5, 8],
        [0, 1, 6, 4, 8],
        [0, 1, 3, 7, 8],
    ], "where nothing is said of them they predicted what the frozen model did"
    read = Record.from_bytes(record.to_bytes())
    assert (read.answering, read.rows.tolist()) == ("adapted", record.rows.tolist())
    told, _ = read.tell([Label("b", 1, 7), Label("a", 1, 2)])
    assert told.told_since(read)[[0, 2, 3, 4, 5]].tolist() == [[1, 4], [2, 7], [1, 5], [1, 4], [1, 7]]
    assert told.tell([Label("b", 1, 7)])[0].told_since(told).size == 0


def differing(number, rows=20):
    """A batch of 20 rows of which so many are answered otherwise by the adapter, spread over it."""
    adapted = [1] * rows
    for row in range(number):
        adapted[7 * row % rows] = 2
    return [1] * rows, adapted


def test_rows_are_asked_only_where_answers_differ_and_a_computation_again_asks_the_same():
    record = record_of(("a", *differing(5)))
    assert record.worth(1.0) == record_of(("a", *differing(5))).worth(1.0)
    assert sorted(record.worth(1.0)) == sorted(7 * row % 20 for row in range(5))
    assert record_of(("b", *differing(5))).worth(1.0) != record.worth(1.0), "by lot"
    assert record_of(("a", *differing(0))).worth(1.0) == []
    assert record.worth(0.0) == []
    arms = Record().append("a", [1, 1, 1], [1, 1, 1], answering="adapted", by_arm=[[1, 1], [1, 2], [1, 1]])
    assert arms.worth(1.0) == [1], "an arm that does not answer is in play too"


@pytest.mark.parametrize("number", [1, 4, 20])
def test_a_share_of_all_rows_is_asked_however_many_differ(number):
    record, asked = Record(), 0
    for batch in range(400):
        record = record.append(f"r{batch}", *differing(number), answering="adapted")
        asked += len(record.worth(0.02))
    assert 110 < asked < 215, "160 of 8,000 are expected"


@pytest.mark.parametrize("cut", [0, 10, 50, -1])
def test_bytes_that_are_no_record_are_refused(cut):
    data = record_of(("a", [0, 1, 2], [0, 2, 1])).to_bytes()
    with pytest.raises(ValueError, match=r"."):
        Record.from_bytes(data[:cut])


def test_records_of_one_client_are_told_apart_by_their_first_request():
    assert record_of(("a", [1], [1]), ("b", [1], [1])).born == record_of(("a", [1], [1])).born
    assert record_of(("b", [1], [1])).born != record_of(("a", [1], [1])).born
    assert Record().born == b""
