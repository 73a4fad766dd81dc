from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.record import MOST_QUESTIONS, ROWS, Label, Question, Record, Tally


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
    assert told.counts == Counts(wins=1, losses=1, labelled=3, frozen_right=1, adapted_right=1, astray=1)
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


def asked_of(record, share, request_id="a"):
    return record.ask(request_id, share)[1]


def test_rows_are_asked_only_where_answers_differ_and_a_computation_again_asks_the_same():
    record = record_of(("a", *differing(5)))
    assert asked_of(record, 1.0) == asked_of(record_of(("a", *differing(5))), 1.0)
    assert sorted(asked_of(record, 1.0)) == sorted(7 * row % 20 for row in range(5))
    assert asked_of(record_of(("b", *differing(5))), 1.0, "b") != asked_of(record, 1.0), "by lot"
    assert asked_of(record_of(("b", *differing(0))), 1.0, "b") == ()
    arms = Record().append("a", [1, 1, 1], [1, 1, 1], answering="adapted", by_arm=[[1, 1], [1, 2], [1, 1]])
    assert asked_of(arms, 1.0) == (1,), "an arm that does not answer is in play too"
    assert record.ask("a", 1.0, wanted=False)[1] == (), "where a label decides nothing"


def test_rows_in_which_the_two_best_arms_differ_are_worth_most():
    by_arm = [[2, 1], [1, 1], [2, 2], [1, 2], [2, 2], [1, 2]]
    record = Record().append("a", [1] * 6, [1] * 6, answering="adapted", by_arm=by_arm)
    assert set(record.ask("a", 1.0)[1]) == {0, 2, 3, 4, 5}
    for rivals, first in {(0, 1): {0, 2, 4}, (2, 0): {2, 3, 4, 5}, (1, 2): {0, 3, 5}}.items():
        asked = record.ask("a", 1.0, rivals=rivals)[1]
        assert set(asked) == {0, 2, 3, 4, 5}
        assert set(asked[: len(first)]) == first


def asking(batches, number, share, name="r", wanted=lambda batch: True):
    """A record that batches came to in which so many rows differ, and how many of them were asked."""
    record, asked = Record(), []
    for batch in range(batches):
        record = record.append(f"{name}{batch}", *differing(number), answering="adapted")
        record, rows = record.ask(f"{name}{batch}", share, wanted=wanted(batch))
        asked.append(len(rows))
    return record, asked


@pytest.mark.parametrize("number", [1, 4, 20])
def test_a_share_of_all_rows_is_asked_however_many_differ(number):
    assert sum(asking(400, number, 0.02)[1]) in (160, 161)


def test_clients_of_few_rows_are_asked_their_share_too_and_a_fleet_no_more():
    asked = sum(sum(asking(1, 20, 0.02, f"client {client}")[1]) for client in range(500))
    assert 160 < asked < 240, "200 of 10,000 are expected"


def test_a_fleet_keeps_to_its_share_without_knowing_of_itself_whoever_its_clients_are():
    """All rows differ, of 1 to 20 batches of each client; one fleet of e^8 is asked for more than the bound."""
    batches = [1 + client % 20 for client in range(600)]
    asked = sum(sum(asking(number, 20, 0.01, f"of {client}")[1]) for client, number in enumerate(batches))
    assert abs(asked - 0.01 * 20 * sum(batches)) <= 2 * len(batches) ** 0.5


def test_what_is_not_spent_is_kept_up_to_what_the_remembered_rows_bring():
    _, asked = asking(200, 20, 0.01, wanted=lambda batch: batch >= 190)
    assert asked[:190] == [0] * 190
    assert (asked[190], sum(asked[191:])) == (20, 2), "2,048 rows bring 20; ten batches more two"


def test_a_question_is_open_until_its_labels_come():
    record, asked = record_of(("a", *differing(5))).ask("a", 1.0)
    assert record.questions == (Question("a", asked),)
    told, tally = record.tell([Label("a", asked[1], 1), Label("a", asked[1], 1), Label("a", 3, 1), Label("z", 0, 1)])
    assert tally == Tally(counted=2, duplicate=1, unknown=1)
    assert told.questions == (Question("a", (asked[0], *asked[2:])),)
    assert (told.counts.labelled, sum(told.counts.asked)) == (2, 1), "a label that nobody asked for is told apart"
    answered, _ = told.tell([Label("a", row, 1) for row in asked])
    assert answered.questions == ()


def test_a_question_expires_when_its_rows_are_forgotten():
    record, _ = record_of(("a", *differing(1, 1000))).ask("a", 0.01)
    assert [(question.request_id, left) for question, left in record.open_questions()] == [("a", 1048)]
    record, _ = record.append("b", *differing(1, 1048), answering="adapted").ask("b", 0.01)
    assert [(question.request_id, left) for question, left in record.open_questions()] == [("b", 1000), ("a", 0)]
    record = record.append("c", [1], [1], answering="adapted")
    assert [(question.request_id, left) for question, left in record.open_questions()] == [("b", 999)]


def test_of_so_many_batches_the_newest_have_open_questions():
    record = Record()
    for number in range(MOST_QUESTIONS + 2):
        record, _ = record.append(f"r{number}", [1], [2], answering="adapted").ask(f"r{number}", 1.0)
    assert [question.request_id for question in record.questions] == [f"r{n}" for n in range(2, MOST_QUESTIONS + 2)]
    assert record.tell([Label("r0", 0, 1)])[1].counted == 1, "its label counts all the same"


def test_questions_and_the_budget_survive_their_bytes_and_older_bytes_have_none():
    record, _ = asking(30, 3, 0.03)
    read = Record.from_bytes(record.to_bytes())
    assert read == record
    assert (read.questions, read.unspent) == (record.questions, record.unspent)
    assert len(record.questions) > 10
    older = replace(record, questions=(), unspent=None)
    assert Record.from_bytes(older.to_bytes().partition(b"[null,[],")[0]) == older


@pytest.mark.parametrize("cut", [0, 10, 50, -1])
def test_bytes_that_are_no_record_are_refused(cut):
    data = record_of(("a", [0, 1, 2], [0, 2, 1])).to_bytes()
    with pytest.raises(ValueError, match=r"."):
        Record.from_bytes(data[:cut])


def test_records_of_one_client_are_told_apart_by_their_first_request():
    assert record_of(("a", [1], [1]), ("b", [1], [1])).born == record_of(("a", [1], [1])).born
    assert record_of(("b", [1], [1])).born != record_of(("a", [1], [1])).born
    assert Record().born == b""
