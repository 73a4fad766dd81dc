"""Numbered batches over real HTTP, for both clients: what is sent, refused, and tried again."""

import math

import numpy as np
import pytest

from acclimate_client.errors import (
    ConnectionFailed,
    InternalError,
    JournalFullError,
    OutOfOrderError,
    StateUnreadableError,
    StepFailedError,
)

IMAGES = np.zeros((2, 3, 3), np.uint8)


def out_of_order(play, **more):
    return play.problem("out_of_order", 409, retryable=False, **{"state_committed": False} | more)


def sent(server):
    return [(request.headers["X-Batch-Number"], request.headers["Idempotency-Key"]) for request in server.requests]


@pytest.mark.parametrize("number", [1, 7, 2**53 - 1])
def test_a_batch_number_is_sent_as_a_decimal(client, server, number):
    client.predict("cam-7", IMAGES, batch_number=number)
    assert server.requests[-1].headers["X-Batch-Number"] == str(number)


def test_a_batch_without_a_number_sends_none(client, server):
    client.predict("cam-7", IMAGES)
    client.predict("cam-7", IMAGES, adapt=False, batch_number=None)
    assert ["X-Batch-Number" in request.headers for request in server.requests] == [False, False]


@pytest.mark.parametrize("number", [0, -1, 2**53, True, False, 1.0, math.nan, "1", np.int64(1)])
def test_a_bad_batch_number_is_refused_before_anything_is_sent(client, server, number):
    with pytest.raises(ValueError, match=r"batch_number is .*; accepted are None and an int in 1\.\.9007199254740991"):
        client.predict("cam-7", IMAGES, batch_number=number)
    assert server.requests == []


def test_a_number_for_a_batch_that_is_not_learned_from_is_refused_before_anything_is_sent(client, server):
    with pytest.raises(ValueError, match=r"batch_number is 3, but with adapt=False .* pass None"):
        client.predict("cam-7", IMAGES, adapt=False, batch_number=3)
    assert server.requests == []


def test_skipped_batches_are_a_signal(client, server, play):
    state = {"version": 2, "status": "warm", "committed": True, "replayed": "none"}
    body = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "atp", "predictions": []}
    server.play(play.reply(body=body | {"state": state, "signals": {"skipped_batches": 2}}))
    assert client.predict("cam-7", IMAGES, batch_number=4).signals == {"skipped_batches": 2.0}


def test_a_batch_out_of_order_is_refused_at_once_and_changed_nothing(client, server, play, slept):
    server.play(out_of_order(play))
    with pytest.raises(OutOfOrderError, match=r"out_of_order \(409\)") as caught:
        client.predict("cam-7", IMAGES, batch_number=4)
    assert (caught.value.retryable, caught.value.state_committed, caught.value.attempts) == (False, False, 1)
    assert sent(server) == [("4", caught.value.idempotency_key)]
    assert slept == []


def test_out_of_order_without_a_word_on_retries_is_final_too(client, server, play):
    server.play(play.reply(409, {"code": "out_of_order", "detail": "batch 4 comes after batch 7"}))
    with pytest.raises(OutOfOrderError, match="batch 4 comes after batch 7"):
        client.predict("cam-7", IMAGES, batch_number=4)
    assert len(server.requests) == 1


def test_a_numbered_batch_is_tried_again_under_its_key_with_its_number(client, server, play):
    server.play(
        play.drop(),
        play.problem("journal_full", 503, retryable=True),
        play.problem("store_unavailable", 503, retryable=True),
        play.problem("journal_full", 503, retryable=True),
    )
    prediction = client.predict("cam-7", IMAGES, batch_number=4)
    assert sent(server) == [("4", prediction.idempotency_key)] * 5
    assert len({request.body for request in server.requests}) == 1


def test_a_repeated_call_with_key_and_number_of_a_failed_one_is_the_same_request(connect, server, play):
    client = connect(server.url, max_retries=0)
    server.play(play.drop())
    with pytest.raises(ConnectionFailed) as caught:
        client.predict("cam-7", IMAGES, batch_number=4)
    client.predict("cam-7", IMAGES, batch_number=4, idempotency_key=caught.value.idempotency_key)
    assert sent(server) == [("4", caught.value.idempotency_key)] * 2


def test_out_of_order_after_an_attempt_of_unknown_outcome_may_be_that_attempt(client, server, play):
    server.play(play.drop(), out_of_order(play))
    with pytest.raises(OutOfOrderError) as caught:
        client.predict("cam-7", IMAGES, batch_number=4)
    assert (caught.value.state_committed, caught.value.attempts) == ("unknown", 2)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [("state_unreadable", 503, StateUnreadableError), ("step_failed", 500, StepFailedError)],
)
def test_a_failure_that_time_does_not_heal_is_not_tried_again(client, server, play, slept, code, status, error):
    server.play(play.problem(code, status, retryable=False, state_committed=False))
    with pytest.raises(error) as caught:
        client.predict("cam-7", IMAGES)
    assert not isinstance(caught.value, InternalError)
    assert (len(server.requests), slept, caught.value.state_committed) == (1, [], False)


def test_a_journal_that_stays_full_is_raised_when_the_retries_are_used_up(connect, server, play):
    server.play(*[play.problem("journal_full", 503, retryable=True, state_committed=False)] * 3)
    with pytest.raises(JournalFullError) as caught:
        connect(server.url, max_retries=2).predict("cam-7", IMAGES)
    assert (caught.value.attempts, caught.value.retryable, caught.value.state_committed) == (3, True, False)
