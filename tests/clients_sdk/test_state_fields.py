"""What replies say of state, durability and keys, over real HTTP, for both clients; and that older services may not."""

from datetime import UTC, datetime

import numpy as np
import pytest

from acclimate_client import StateInfo, StoredState
from acclimate_client.errors import UnexpectedReplyError

IMAGES = np.zeros((2, 3, 3), np.uint8)
STATE = {"version": 5, "status": "warm", "committed": True, "replayed": "none"}
BODY = {"client_id": "cam-7", "model": {"name": "m", "version": "1"}, "adapter": "atp", "predictions": []}

KEYED = pytest.mark.parametrize(
    "call",
    [
        lambda client: client.predict("cam-7", IMAGES),
        lambda client: client.reset("cam-7"),
        lambda client: client.configure("cam-7", "atp"),
        lambda client: client.enroll("cam-7", IMAGES, [0, 1]),
        lambda client: client.import_state("cam-7", b"state"),
    ],
    ids=["predict", "reset", "configure", "enroll", "import"],
)


def answer(play, state=STATE, **more):
    return play.reply(body=BODY | {"state": state, "hyperparameters": {}, "changed": True} | more)


@KEYED
def test_every_keyed_reply_says_how_durable_it_is_and_until_when_its_key_is_remembered(client, call):
    result = call(client)
    assert result.state.durability == "always"
    assert result.key_expires_at_earliest == datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


@KEYED
def test_a_service_that_does_not_say_leaves_durability_unknown_and_the_expiry_none(client, server, play, call):
    server.play(answer(play))
    result = call(client)
    assert result.state == StateInfo(5, "warm", committed=True, replayed="none", durability="unknown", lost=0)
    assert result.key_expires_at_earliest is None


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2031-05-06T07:08:09.250Z", datetime(2031, 5, 6, 7, 8, 9, 250_000, tzinfo=UTC)),
        ("2031-05-06T09:08:09+02:00", datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)),
    ],
)
def test_the_expiry_of_a_key_is_in_utc(client, server, play, text, time):
    server.play(answer(play, key_expires_at_earliest=text))
    expiry = client.predict("cam-7", IMAGES).key_expires_at_earliest
    assert (expiry, expiry.tzinfo) == (time, UTC)


@pytest.mark.parametrize("text", ["soon", "2031-05-06T07:08:09", 1_900_000_000])
def test_an_expiry_that_is_no_moment_is_an_unexpected_reply(client, server, play, text):
    server.play(answer(play, key_expires_at_earliest=text))
    with pytest.raises(UnexpectedReplyError, match=r"expected|Invalid isoformat"):
        client.predict("cam-7", IMAGES)


def test_a_state_that_redis_rolled_back_says_how_many_versions_are_lost(client, server, play):
    server.play(answer(play, STATE | {"status": "rolled_back", "lost": 2}))
    state = client.predict("cam-7", IMAGES).state
    assert (state.status, state.lost) == ("rolled_back", 2)


@pytest.mark.parametrize("replayed", ["none", "stored", "recomputed", "unavailable"])
def test_it_is_said_where_the_answer_comes_from(client, server, play, replayed):
    server.play(answer(play, STATE | {"replayed": replayed}))
    assert client.predict("cam-7", IMAGES).state.replayed == replayed


@pytest.mark.parametrize("committed", [False, "unknown"])
def test_a_frozen_answer_is_a_prediction_and_says_whether_it_was_committed(client, server, play, committed):
    server.play(answer(play, STATE | {"status": "frozen", "committed": committed}))
    state = client.predict("cam-7", IMAGES).state
    assert (state.status, state.committed) == ("frozen", committed)
    assert len(server.requests) == 1


def test_a_frozen_answer_after_an_attempt_of_unknown_outcome_may_be_committed(client, server, play):
    server.play(play.drop(), answer(play, STATE | {"status": "frozen", "committed": False}))
    assert client.predict("cam-7", IMAGES).state.committed == "unknown"


def test_a_frozen_answer_after_refusals_alone_is_not_committed(client, server, play):
    refused = play.problem("journal_full", 503, retryable=True, state_committed=False)
    server.play(refused, answer(play, STATE | {"status": "frozen", "committed": False}))
    assert client.predict("cam-7", IMAGES).state.committed is False


def test_an_answer_that_learns_nothing_is_never_committed(client, server, play):
    server.play(play.drop(), answer(play, STATE | {"committed": False}))
    assert client.predict("cam-7", IMAGES, adapt=False).state.committed is False


def test_get_leaves_out_what_the_service_does_not_say(client, server, play):
    server.play(answer(play, {"version": 5, "status": "warm", "bytes": 812, "tier": "redis"}))
    assert client.get("cam-7").state == StoredState(5, "warm", 812, "redis")


def test_a_client_whose_journal_nobody_writes_has_no_owner(client, server, play):
    stored = {"version": 5, "status": "warm", "bytes": 812, "tier": "redis", "base": 5, "journal_entries": 0}
    server.play(answer(play, stored | {"journal_bytes": 0, "owner": None, "expires_in_s": 60}))
    state = client.get("cam-7").state
    assert (state.owner, state.base, state.journal_entries, state.journal_bytes) == (None, 5, 0, 0)
    assert state.expires_in_s == 60.0
