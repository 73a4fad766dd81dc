"""True labels and what they say of adaptation, over real HTTP, for both clients; older services say nothing of it."""

import json
import math

import numpy as np
import pytest

from acclimate_client import (
    AccuracyInterval,
    AdapterEvidence,
    Ask,
    Evidence,
    Guard,
    GuardDecision,
    LabelledRow,
    ModelEvidence,
    ModelRef,
    RowCounts,
    StateInfo,
)
from acclimate_client.errors import (
    ConnectionFailed,
    GuardOffError,
    InvalidFeedbackError,
    NotFoundError,
    Timeout,
    UnexpectedReplyError,
)

IMAGES = np.zeros((2, 3, 3), np.uint8)
ROW = LabelledRow("r-1", 3, "Coat")
STATE = {"version": 5, "status": "warm", "committed": True, "replayed": "none"}
BODY = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "atp", "predictions": []}
EVIDENCE = Evidence(
    verdict="harmful",
    labelled=40,
    wins=3,
    losses=9,
    frozen=AccuracyInterval(0.75, 0.5, 1.0),
    adapted=AccuracyInterval(0.6, 0.4, 0.8),
)
GUARD = Guard(GuardDecision("frozen", "own_harmful"), EVIDENCE)
UNLABELLED = {"accuracy": None, "low": None, "high": None}


def told(request):
    return json.loads(request.body)["rows"]


def test_the_rows_of_several_predictions_go_in_one_request(client, server):
    prediction = client.predict("cam-7", IMAGES)
    rows = [LabelledRow(prediction.request_id, 1, "Coat"), LabelledRow("r-0", 0, 6)]
    client.feedback("cam-7", rows, idempotency_key="k", timeout=2.5)
    request = server.requests[-1]
    assert (request.method, request.path) == ("POST", "/clients/cam-7/feedback")
    assert told(request) == [
        {"request_id": "r-1", "row": 1, "label": "Coat"},
        {"request_id": "r-0", "row": 0, "label": 6},
    ]
    assert (request.headers["Content-Type"], request.headers["Idempotency-Key"]) == ("application/json", "k")
    assert request.headers["X-Request-Timeout-Ms"] == "2500"


def test_rows_may_come_from_a_generator_and_be_numbers_of_numpy(client, server):
    client.feedback("cam-7", (LabelledRow("r-1", row, np.int64(6)) for row in np.arange(2)))
    assert told(server.requests[-1]) == [{"request_id": "r-1", "row": row, "label": 6} for row in (0, 1)]


def test_feedback_says_what_became_of_the_rows_and_who_answers_now(client):
    result = client.feedback("cam-7", [ROW])
    assert result.rows == RowCounts(counted=1, duplicate=2, contradicting=3, unknown=4)
    assert result.guard == GUARD
    assert (result.client_id, result.adapter, result.request_id) == ("cam-7", "atp", "r-2")
    assert result.state == StateInfo(5, "warm", committed=True, replayed="none", durability="always")


def test_accuracies_are_none_without_labels(client, server, play):
    guard = {"answering": "adapted", "because": "policy", "verdict": "undecided", "labelled": 0, "wins": 0, "losses": 0}
    guard |= {"frozen": UNLABELLED, "adapted": UNLABELLED}
    server.play(play.reply(body=BODY | {"state": STATE, "guard": guard}))
    evidence = client.feedback("cam-7", [ROW]).guard.evidence
    assert evidence.frozen == evidence.adapted == AccuracyInterval(None, None, None)


def test_the_answer_of_repeated_feedback_may_be_gone(client, server, play):
    server.play(play.reply(body=BODY | {"state": STATE | {"replayed": "unavailable"}}))
    result = client.feedback("cam-7", [ROW])
    assert (result.state.replayed, result.rows, result.guard) == ("unavailable", None, None)


def test_feedback_is_tried_again_under_one_key(client, server, play):
    server.play(play.problem("store_unavailable", 503, retryable=True), play.drop())
    result = client.feedback("cam-7", iter([ROW, ROW]))
    assert len(server.requests) == 3
    assert {request.headers["Idempotency-Key"] for request in server.requests} == {result.idempotency_key}
    assert len({request.body for request in server.requests}) == 1


def test_feedback_of_unknown_outcome_may_have_been_counted(connect, server, play):
    server.play(play.drop())
    with pytest.raises(ConnectionFailed) as caught:
        connect(server.url, max_retries=0).feedback("cam-7", [ROW])
    assert caught.value.state_committed == "unknown"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [("invalid_feedback", 422, InvalidFeedbackError), ("guard_off", 409, GuardOffError)],
)
def test_feedback_that_is_refused_is_not_tried_again(client, server, play, code, status, error):
    server.play(play.problem(code, status, retryable=False, state_committed=False))
    with pytest.raises(error) as caught:
        client.feedback("cam-7", [ROW])
    assert (len(server.requests), caught.value.state_committed) == (1, False)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, "there are 0 rows; accepted are 1 to 10000"),
        ([ROW] * 10_001, ValueError, "there are 10001 rows"),
        ([ROW, ("r-1", 3, "Coat")], TypeError, r"row 1 is a tuple; accepted is LabelledRow\(request_id, row, label\)"),
        (ROW, TypeError, "not iterable"),
    ],
)
def test_rows_that_cannot_be_right_are_refused_before_anything_is_sent(client, server, rows, error, message):
    with pytest.raises(error, match=message):
        client.feedback("cam-7", rows)
    assert server.requests == []


def test_as_many_rows_as_the_server_takes_are_sent(client, server):
    client.feedback("cam-7", [ROW] * 10_000)
    assert len(told(server.requests[-1])) == 10_000


@pytest.mark.parametrize("timeout", [0, math.nan])
def test_a_bad_timeout_of_feedback_is_refused_before_anything_is_sent(client, server, timeout):
    with pytest.raises(ValueError, match="timeout is"):
        client.feedback("cam-7", [ROW], timeout=timeout)
    assert server.requests == []


def test_the_timeout_of_feedback_wins_over_that_of_the_client(connect, server, play):
    server.play(play.stall())
    with pytest.raises(Timeout):
        connect(server.url, max_retries=0).feedback("cam-7", [ROW], timeout=0.02)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (("", 3, "Coat"), ValueError, "request_id is ''; accepted is the request_id of a prediction"),
        ((None, 3, "Coat"), ValueError, "request_id is None"),
        (("r-1", -1, "Coat"), ValueError, "row is -1; accepted are 0"),
        (("r-1", "3", "Coat"), TypeError, "row is '3'; accepted is an int"),
        (("r-1", 3, 1.5), TypeError, "label is 1.5; accepted are a class name and a class index"),
        (("r-1", 3, None), TypeError, "label is None"),
    ],
)
def test_a_labelled_row_that_cannot_be_right_is_refused_where_it_is_made(fields, error, message):
    with pytest.raises(error, match=message):
        LabelledRow(*fields)


def test_a_guarded_prediction_says_why_the_frozen_model_answers(client, server, play):
    guard = {"answering": "frozen", "because": "fleet_behind", "later": 1}
    server.play(play.reply(body=BODY | {"state": STATE | {"status": "guarded"}, "guard": guard}))
    prediction = client.predict("cam-7", IMAGES)
    assert prediction.state.status == "guarded"
    assert prediction.guard == GuardDecision("frozen", "fleet_behind")


def test_a_prediction_of_the_adapted_model_has_no_guard(client):
    assert client.predict("cam-7", IMAGES).guard is None


def test_get_shows_the_guard_of_a_client(client):
    assert client.get("cam-7").guard == GUARD


@pytest.mark.parametrize("guard", [{}, {"guard": None}], ids=["older service", "guard off"])
def test_a_client_without_a_guard_has_none(client, server, play, guard):
    stored = {"version": 5, "status": "warm", "bytes": 812, "tier": "redis"}
    server.play(play.reply(body=BODY | {"state": stored} | guard))
    assert client.get("cam-7").guard is None


def test_evidence_lists_the_adapters_of_a_model(client, server):
    assert client.evidence("fashion-cnn") == ModelEvidence(
        model=ModelRef("fashion-cnn", "1"),
        policy="follow-fleet",
        adapters=(AdapterEvidence("atp", {"mode": "batch"}, clients=12, candidate=False, evidence=EVIDENCE),),
    )
    assert (server.requests[-1].method, server.requests[-1].path) == ("GET", "/models/fashion-cnn/adapters")


@pytest.mark.parametrize("model", ["", "..", "a/b", "a?b", "ä", "a" * 65])
def test_a_bad_model_name_is_refused_before_anything_is_sent(client, server, model):
    with pytest.raises(ValueError, match=r"model is .* accepted are"):
        client.evidence(model)
    assert server.requests == []


def test_an_older_service_has_no_such_routes(client, server, play):
    server.play(*[play.problem("not_found", 404, retryable=False)] * 2)
    for call in (lambda: client.feedback("cam-7", [ROW]), lambda: client.evidence("fashion-cnn")):
        with pytest.raises(NotFoundError):
            call()


@pytest.mark.parametrize("guard", [7, {"answering": "frozen"}, {"answering": "frozen", "because": 1}])
def test_a_guard_of_another_format_is_an_unexpected_reply(client, server, play, guard):
    server.play(play.reply(body=BODY | {"state": STATE, "guard": guard}))
    with pytest.raises(UnexpectedReplyError):
        client.predict("cam-7", IMAGES)


def test_labels_go_with_their_images_to_where_labels_go(client, server):
    client.feedback_images("cam-7", IMAGES, ["Coat", 6], idempotency_key="k", timeout=2.5)
    request = server.requests[-1]
    assert (request.method, request.path) == ("POST", "/clients/cam-7/feedback")
    assert request.headers["Idempotency-Key"] == "k"
    assert request.headers["X-Labels"] == '["Coat", 6]'
    assert request.body == IMAGES.tobytes()


def test_images_need_one_label_each(client, server):
    sent = len(server.requests)
    with pytest.raises(ValueError, match="1 labels for 2 images"):
        client.feedback_images("cam-7", IMAGES, [1])
    assert len(server.requests) == sent


def page(*clients, following=None):
    asked = [
        {"client_id": name, "asks": [{"request_id": "r-1", "rows": rows}], "expires_in_s": 60} for name, rows in clients
    ]
    return {"model": BODY["model"], "clients": asked, "next": following}


def test_what_is_asked_of_all_clients_comes_page_by_page(client, server, play):
    server.play(
        play.reply(body=page(("cam-7", [3, 1]), ("cam-8", [0]), following="17.5")),
        play.reply(body=page(("cam-9", [4]))),
    )
    asked = [*client.asks()]
    assert [(ask.client_id, ask.row) for ask in asked] == [("cam-7", 3), ("cam-7", 1), ("cam-8", 0), ("cam-9", 4)]
    assert [(request.path, request.query) for request in server.requests] == [
        ("/asks", {}),
        ("/asks", {"cursor": ["17.5"]}),
    ]
    assert asked[0].labelled("Coat") == LabelledRow("r-1", 3, "Coat")


def test_what_one_client_is_asked_is_one_page(client, server, play):
    server.play(play.reply(body=page(("cam-7", [2]))["clients"][0]))
    assert [*client.asks("cam-7")] == [Ask("cam-7", "r-1", 2)]
    assert server.requests[-1].path == "/clients/cam-7/asks"


def test_a_list_that_is_none_is_unexpected(client, server, play):
    server.play(play.reply(body={"clients": [{"client_id": "cam-7", "asks": [{"rows": [1]}]}], "next": None}))
    with pytest.raises(UnexpectedReplyError):
        [*client.asks()]
