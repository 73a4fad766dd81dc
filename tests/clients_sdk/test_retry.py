"""Failures played by a real server: what is tried again, when, under which key, and what the caller is told."""

import gc
import math
import ssl

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_client import ConnectionFailed, ProblemError, Timeout, UnexpectedReplyError
from acclimate_client._problems import retry_after
from acclimate_client._transport import backoff, certificates
from acclimate_client.errors import (
    JournalFullError,
    KeyReusedError,
    OtherModelError,
    StoreFullError,
    StoreUnavailableError,
    WrongShapeError,
)

IMAGES = np.zeros((2, 3, 3), np.uint8)
CUT_REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"


def full(play, **more):
    return play.problem("journal_full", 503, retryable=True, **{"state_committed": False} | more)


def keys(server):
    return [request.headers["Idempotency-Key"] for request in server.requests]


def test_a_503_is_tried_again_with_the_same_key_and_body(client, server, play, slept):
    server.play(full(play))
    prediction = client.predict("cam-7", IMAGES)
    assert keys(server) == [prediction.idempotency_key] * 2
    assert server.requests[0].body == server.requests[1].body
    assert slept == [0.25]


def test_a_503_without_a_problem_body_is_tried_again(client, server, play, slept):
    server.play(
        play.reply(503, b"<html>upstream</html>", {"Content-Type": "text/html"}), play.reply(429), play.reply(408)
    )
    assert client.predict("cam-7", IMAGES).labels
    assert slept == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("sent", [b"", CUT_REPLY, b"HTTP/1.1 2"])
def test_a_connection_cut_before_the_reply_is_complete_is_tried_again(client, server, play, slept, sent):
    server.play(play.drop(sent))
    prediction = client.predict("cam-7", IMAGES)
    assert keys(server) == [prediction.idempotency_key] * 2
    assert slept == [0.25]


def test_a_reply_that_does_not_decompress_is_tried_again(client, server, play):
    server.play(play.reply(200, b"not gzip", {"Content-Encoding": "gzip"}))
    assert client.predict("cam-7", IMAGES).labels


def test_a_timeout_is_tried_again_with_the_same_key(connect, server, play, slept):
    server.play(play.stall())
    prediction = connect(server.url, timeout=0.1).predict("cam-7", IMAGES)
    assert keys(server) == [prediction.idempotency_key] * 2
    assert slept == [0.25]


def test_a_key_still_running_waits_as_long_as_the_server_asks(client, server, play, slept):
    server.play(play.problem("request_running", 409, retryable=True, headers={"Retry-After": "2"}))
    client.predict("cam-7", IMAGES)
    assert slept == [2.25]


def test_told_to_wait_for_over_a_minute_the_client_asks_its_caller_instead(client, server, play, slept):
    server.play(play.problem("too_many_requests", 429, retryable=True, headers={"Retry-After": "61"}))
    with pytest.raises(ProblemError) as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.retry_after == 61
    assert slept == []


@pytest.mark.parametrize(
    ("code", "status", "error"), [("other_model", 409, OtherModelError), ("key_reused", 422, KeyReusedError)]
)
def test_what_the_server_calls_final_is_not_tried_again(client, server, play, code, status, error):
    server.play(play.problem(code, status, retryable=False))
    with pytest.raises(error):
        client.predict("cam-7", IMAGES)
    assert len(server.requests) == 1


def test_the_servers_word_wins_over_the_status(client, server, play):
    server.play(play.problem("store_full", 507, retryable=True), play.problem("state_corrupt", 503, retryable=False))
    with pytest.raises(ProblemError, match="state_corrupt"):
        client.predict("cam-7", IMAGES)
    assert len(server.requests) == 2


def test_a_409_without_a_problem_body_is_final(client, server, play):
    server.play(play.reply(409, b"conflict"))
    with pytest.raises(ProblemError, match="http_409"):
        client.reset("cam-7")
    assert len(server.requests) == 1


def test_waits_double_up_to_eight_seconds_and_then_the_last_error_is_raised(connect, server, play, slept):
    server.play(*[play.problem("store_full", 507, retryable=True)] * 8)
    with pytest.raises(StoreFullError) as caught:
        connect(server.url, max_retries=7).predict("cam-7", IMAGES)
    assert slept == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert caught.value.attempts == 8


def test_no_retries_means_one_attempt(connect, server, play, slept):
    server.play(full(play))
    with pytest.raises(JournalFullError):
        connect(server.url, max_retries=0).predict("cam-7", IMAGES)
    assert (len(server.requests), slept) == (1, [])


@pytest.mark.parametrize("method", ["get", "reset", "delete"])
def test_other_methods_are_tried_again_too(client, server, play, method):
    server.play(full(play), play.drop())
    getattr(client, method)("cam-7")
    assert len(server.requests) == 3
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 1


def test_a_refused_connection_is_tried_again_and_changed_nothing(connect, free_url, slept):
    with pytest.raises(ConnectionFailed, match=r"POST http://127.0.0.1:\d+/clients/cam-7/predict") as caught:
        connect(free_url, max_retries=2).predict("cam-7", IMAGES)
    assert slept == [0.25, 0.5]
    assert caught.value.state_committed is False
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_an_error_carries_the_key_to_repeat_the_call_with(connect, server, play):
    client = connect(server.url, max_retries=0)
    server.play(play.drop())
    with pytest.raises(ConnectionFailed) as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.state_committed == "unknown"
    client.predict("cam-7", IMAGES, idempotency_key=caught.value.idempotency_key)
    assert keys(server) == [caught.value.idempotency_key] * 2


def test_a_timeout_may_have_changed_the_state(connect, server, play):
    server.play(play.stall())
    with pytest.raises(Timeout) as caught:
        connect(server.url, timeout=0.05, max_retries=0).predict("cam-7", IMAGES)
    assert caught.value.state_committed == "unknown"
    assert isinstance(caught.value.__cause__, httpx.ReadTimeout)


def test_not_committed_by_the_last_attempt_is_not_enough_after_one_of_unknown_outcome(client, server, play):
    server.play(play.drop(), *[full(play)] * 4)
    with pytest.raises(JournalFullError) as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.state_committed == "unknown"


def test_not_committed_by_any_attempt_is_not_committed(client, server, play):
    server.play(*[full(play)] * 5)
    with pytest.raises(JournalFullError) as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.state_committed is False


def test_a_call_that_only_reads_never_committed(client, server, play):
    unknown = play.problem("store_unavailable", 503, retryable=False, state_committed="unknown")
    server.play(unknown, unknown, unknown)
    for call in (lambda: client.get("cam-7"), lambda: client.predict("cam-7", IMAGES, adapt=False)):
        with pytest.raises(StoreUnavailableError) as caught:
            call()
        assert caught.value.state_committed is False
    with pytest.raises(StoreUnavailableError) as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.state_committed == "unknown"


@pytest.mark.parametrize("body", [b"<html>", b"[1]", {"client_id": "cam-7"}, {"predictions": 7}, b"[" * 100_000])
def test_a_reply_of_another_format_is_an_error_and_not_tried_again(client, server, play, body):
    server.play(play.reply(200, body))
    with pytest.raises(UnexpectedReplyError, match="does not answer like an Acclimate server") as caught:
        client.predict("cam-7", IMAGES)
    assert caught.value.idempotency_key == keys(server)[0]
    assert len(server.requests) == 1


def test_a_header_that_cannot_be_sent_is_refused_at_once(connect, server, slept):
    with pytest.raises(ConnectionFailed, match="Illegal header value") as caught:
        connect(server.url, headers={"X-Bad": "a\nb"}).predict("cam-7", IMAGES)
    assert (caught.value.retryable, caught.value.state_committed, slept) == (False, False, [])


def test_a_refusal_reports_the_servers_detail_and_request(client, server, play):
    server.play(play.problem("wrong_shape", 422, retryable=False, state_committed=False))
    with pytest.raises(WrongShapeError, match=r"wrong_shape \(422\): about wrong_shape \[request r-1\]"):
        client.predict("cam-7", IMAGES)


def test_retries_leak_no_connections(connect, server, play):
    client = connect(server.url, max_retries=3)
    for _ in range(60):  # with two leaks a call, beyond the 100 connections of the pool
        server.play(full(play), play.drop(CUT_REPLY), play.drop())
        client.predict("cam-7", IMAGES)
    assert server.opened <= 1 + 2 * 60
    assert server.open_after_settling(1) == 1  # the one kept alive
    gc.collect()  # an unclosed socket would warn here, and warnings are errors


def test_the_certificates_are_read_once_for_all_clients(connect, free_url, monkeypatch):
    read = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *given, **named: read.append(named))
    certificates.cache_clear()
    for _ in range(2):
        connect(free_url)
    certificates.cache_clear()  # nobody else shall have those that were not read
    assert len(read) == 1


def test_a_well_behaved_server_sees_one_connection(client, server, play):
    server.play(*[full(play)] * 4)
    client.predict("cam-7", IMAGES)
    client.models()
    assert server.opened == 1


def test_timeouts_leak_no_connections(connect, server, play):
    client = connect(server.url, max_retries=2, timeout=0.03)
    server.play(play.stall(0.1), play.stall(0.1))
    client.delete("cam-7")
    server.play(play.stall(0.1), play.stall(0.1))
    client.delete("cam-7")
    gc.collect()
    assert server.opened <= 5


@given(failures=st.integers(0, 10**6), draw=st.floats(0, 1))
def test_the_back_off_lies_between_zero_and_its_range(failures, draw):
    assert 0 <= backoff(failures, draw) <= min(8.0, 0.25 * 2 ** min(failures, 40))
    assert backoff(failures, 1.0) == min(8.0, 0.25 * 2 ** min(failures, 40))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("3", 3.0),
        ("1.5", 1.5),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_by_the_servers_clock(value, seconds):
    headers = httpx.Headers({"Retry-After": value, "Date": "Wed, 21 Oct 2015 07:28:00 GMT"})
    assert retry_after(headers) == seconds


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_any_retry_after_is_nothing_or_a_wait(value):
    seconds = retry_after(httpx.Headers({"Retry-After": value}))
    assert seconds is None or (seconds >= 0 and math.isfinite(seconds))
