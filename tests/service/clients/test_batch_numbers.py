"""Batches that their caller numbers: in this order, or not at all."""

import numpy as np
import pytest

from acclimate_client.errors import OutOfOrderError


@pytest.fixture(params=["atp", "fedcal"], ids=["by journal", "whole"])
def ordered(request, make_replica):
    return make_replica(adapter=request.param)


def test_out_of_order_batches_are_refused_and_change_nothing(ordered, stream, post, assert_problem):
    one, two, three = (images[:, 0] for images in stream(0, 3))
    assert post(ordered, "cam", one, X_Batch_Number="5").status_code == 200
    before = ordered.keys("cam")
    for number in ("5", "4", "1"):
        refused = assert_problem(post(ordered, "cam", two, X_Batch_Number=number), 409, "out_of_order")
        assert refused["retryable"] is False
        assert "batch 5" in refused["detail"]
    assert ordered.keys("cam") == before
    assert post(ordered, "cam", three, X_Batch_Number="6").json()["state"]["version"] == 2


def test_out_of_order_batches_may_be_missing_which_is_said_also_to_whoever_asks_again(ordered, stream, post):
    one, two = (images[:, 0] for images in stream(0, 2))
    first = post(ordered, "cam", one, X_Batch_Number="5").json()
    assert "skipped_batches" not in first["signals"], "a stream may begin at any number"
    second = post(ordered, "cam", two, X_Batch_Number="9", Idempotency_Key="nine").json()
    assert second["signals"]["skipped_batches"] == 3
    again = post(ordered, "cam", two, X_Batch_Number="9", Idempotency_Key="nine").json()
    assert again["signals"] == second["signals"]
    assert again["state"]["replayed"] == "stored"


def test_out_of_order_batches_that_are_retries_get_their_first_answer(ordered, stream, post):
    batches = [images[:, 0] for images in stream(0, 3)]
    answers = [
        post(ordered, "cam", images, X_Batch_Number=str(n), Idempotency_Key=f"key-{n}").json()
        for n, images in enumerate(batches, 1)
    ]
    again = post(ordered, "cam", batches[0], X_Batch_Number="1", Idempotency_Key="key-1").json()
    assert again["predictions"] == answers[0]["predictions"]
    assert (again["state"]["version"], again["state"]["replayed"]) == (1, "stored")


def test_out_of_order_batches_are_told_apart_by_all_replicas(ordered, make_replica, stream, post, assert_problem):
    settings = ordered.service.settings
    other = make_replica(redis_url=settings.redis_url, adapter=settings.adapter)
    batches = [images[:, 0] for images in stream(0, 4)]
    assert post(ordered, "cam", batches[0], X_Batch_Number="1").status_code == 200
    assert post(other, "cam", batches[1], X_Batch_Number="2").status_code == 200
    assert_problem(post(ordered, "cam", batches[2], X_Batch_Number="2"), 409, "out_of_order")
    assert post(ordered, "cam", batches[3], X_Batch_Number="3").json()["state"]["version"] == 3


def test_numbers_go_on_after_a_reset_and_begin_anew_after_a_delete(ordered, stream, post, assert_problem):
    images = stream(0, 1)[0][:, 0]
    assert post(ordered, "cam", images, X_Batch_Number="7").status_code == 200
    assert ordered.http.post("/clients/cam/reset").status_code == 200
    assert_problem(post(ordered, "cam", images, X_Batch_Number="7"), 409, "out_of_order")
    assert post(ordered, "cam", images).status_code == 200, "batches without a number may come between"
    assert post(ordered, "cam", images, X_Batch_Number="8").status_code == 200
    assert ordered.http.delete("/clients/cam").status_code == 204
    assert post(ordered, "cam", images, X_Batch_Number="1").json()["state"]["version"] == 1


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "x", "", str(2**53), "9" * 30, "\uff11"])
def test_a_number_that_is_none_is_refused(replica, post, assert_problem, number):
    images = np.zeros((1, 28, 28), np.uint8)
    reply = post(replica, "numbered", images, X_Batch_Number=number.encode())
    assert "1 to 9007199254740991" in assert_problem(reply, 422, "invalid_request")["detail"]


def test_a_number_for_a_batch_that_changes_nothing_is_refused(replica, post, assert_problem):
    reply = post(replica, "numbered", np.zeros((1, 28, 28), np.uint8), "?adapt=false", X_Batch_Number="1")
    assert_problem(reply, 422, "invalid_request")


def test_the_sdk_sends_numbers_and_knows_the_refusal(ordered, stream):
    one, two = stream(0, 2)
    with ordered.sdk() as sdk:
        assert sdk.predict("cam", one, batch_number=2).state.version == 1
        with pytest.raises(OutOfOrderError):
            sdk.predict("cam", two, batch_number=2)
        assert sdk.predict("cam", two, batch_number=4).signals["skipped_batches"] == 1
