"""A client goes back to what it was before the harm: over HTTP, on any replica, once."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from acclimate_client.errors import ClientUnknownError, KeyReusedError, VersionUnknownError
from acclimate_service.settings import Settings
from acclimate_service.state.redis.keys import MOST_KEPT


@pytest.fixture(scope="module")
def replica(tmp_path_factory, run_service):
    """A service whose states are small, so that each batch stores one."""
    with run_service(data_dir=tmp_path_factory.mktemp("rollback"), adapter="fedcal") as small:
        yield small


def same(prediction, expected):
    np.testing.assert_allclose(prediction.probabilities, expected, rtol=0, atol=1e-5)


def test_a_client_goes_back_and_is_answered_as_if_what_it_left_had_not_been(make_replica, serial, stream):
    first = make_replica(adapter="fedcal")
    second = make_replica(adapter="fedcal", redis_url=first.service.settings.redis_url)
    one, two, three = stream(1, 3, 20)
    noise = np.random.default_rng(0).integers(0, 256, (64, 1, 28, 28), np.uint8)
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        here.predict("cam", one)
        here.predict("cam", noise)
        (kept,) = here.get("cam").state.kept
        assert (kept.version, kept.bytes > 100) == (1, True)
        assert timedelta() <= datetime.now(UTC) - kept.at < timedelta(minutes=5)
        done = there.rollback("cam")
        assert (done.restored, done.adapter, done.state.version, done.state.committed) == (1, "fedcal", 3, True)
        assert here.get("cam").state.kept == ()
        answers = [sdk.predict("cam", images, probabilities=True) for sdk, images in ((here, two), (there, three))]
    for answer, expected in zip(answers, serial.probabilities("fedcal", [one, two, three])[1:], strict=True):
        same(answer, expected)
    assert [answer.state.version for answer in answers] == [4, 5]


def test_a_large_state_goes_back_to_a_snapshot(make_replica, serial, stream):
    replica = make_replica(adapter="atp", inline_max=1)
    one, two, three = stream(1, 3, 20)
    with replica.sdk() as sdk:
        for images in (one, two, three):
            sdk.predict("cam", images)
            replica.run(snapshot(replica, "cam"))
        (kept,) = sdk.get("cam").state.kept
        assert kept.version == 1
        assert sdk.rollback("cam", 1).state.version == 4
        same(sdk.predict("cam", two, probabilities=True), serial.probabilities("atp", [one, two])[1])


async def snapshot(replica, client):
    session = replica.service.sessions._sessions[client]
    await session._snapshotter.now(session.memory.held)


def test_a_repeated_rollback_does_not_go_back_again_and_a_pause_is_kept(replica, stream):
    one, two = stream(2, 2, 20)
    with replica.sdk() as sdk:
        sdk.predict("once", one)
        sdk.predict("once", two)
        sdk.pause("once")
        first = sdk.rollback("once", idempotency_key="k")
        assert (first.restored, first.state.version) == (1, 4)
        sdk.resume("once")
        sdk.predict("once", two)
        again = sdk.rollback("once", idempotency_key="k")
        assert (again.restored, again.state.version, again.state.replayed) == (1, 4, "stored")
        assert sdk.get("once").state.version == 6
        with pytest.raises(KeyReusedError):
            sdk.rollback("once", 1, idempotency_key="k")


def test_a_rollback_brings_the_adapter_back_and_labels_begin_anew(replica, serial, stream):
    one, two, three = stream(3, 3, 20)
    with replica.sdk() as sdk:
        sdk.predict("changed", one)
        sdk.predict("changed", two)
        sdk.configure("changed", "em")
        sdk.predict("changed", three)
        done = sdk.rollback("changed", 1)
        assert (done.adapter, sdk.get("changed").adapter) == ("fedcal", "fedcal")
        same(sdk.predict("changed", two, probabilities=True), serial.probabilities("fedcal", [one, two])[1])
        assert sdk.get("changed").guard.evidence.labelled == 0


def test_what_is_not_kept_is_404_with_what_is_and_changes_nothing(replica, stream):
    one, two = stream(4, 2, 20)
    with replica.sdk() as sdk:
        with pytest.raises(ClientUnknownError):
            sdk.rollback("nobody")
        with pytest.raises(ClientUnknownError):
            sdk.get("nobody")
        sdk.predict("little", one)
        with pytest.raises(VersionUnknownError, match="those that are: none"):
            sdk.rollback("little")
        sdk.predict("little", two)
        with pytest.raises(VersionUnknownError, match="version 2 of the client is not kept; those that are: 1"):
            sdk.rollback("little", 2)
        assert sdk.get("little").state.version == 2


@pytest.mark.parametrize("body", [b"[]", b'{"version": 0}', b'{"version": true}', b'{"version": "1"}', b'{"to": 1}'])
def test_a_body_that_names_no_version_is_422(replica, assert_problem, body):
    reply = replica.http.post("/clients/odd/rollback", content=body, headers={"Content-Type": "application/json"})
    assert_problem(reply, 422, "invalid_request")
    reply = replica.http.post("/clients/odd/rollback", content=body, headers={"Content-Type": "text/plain"})
    assert_problem(reply, 415, "unsupported_media_type")


def test_nothing_is_kept_where_the_operator_says_so_nor_of_what_candidates_learn(make_replica, stream):
    nothing = make_replica(adapter="fedcal", keep_snapshots=0)
    trying = make_replica(adapter="fedcal", candidates=("em",), candidate_share=1.0)
    one, two, three = stream(5, 3, 20)
    for replica in (nothing, trying):
        with replica.sdk() as sdk:
            for images in (one, two, three):
                sdk.predict("cam", images)
    assert not [key for key in nothing.keys("cam") if b":k" in key]
    model = trying.service.bundle.model.content_hash.encode()
    assert {key.split(b":")[2] for key in trying.keys("cam") if b":k" in key} == {model}


def test_a_deleted_client_leaves_nothing_to_go_back_to(replica, stream):
    one, two = stream(6, 2, 20)
    with replica.sdk() as sdk:
        for _ in range(2):
            sdk.predict("gone", one)
            sdk.predict("gone", two)
            assert [kept.version for kept in sdk.get("gone").state.kept] == [1]
            sdk.delete("gone")
            assert {key.rpartition(b":")[2] for key in replica.keys("gone")} <= {b"r", b"i", b"x"}


def test_operators_may_keep_as_many_as_there_are_places_for():
    (bound,) = [each.le for each in Settings.model_fields["keep_snapshots"].metadata if hasattr(each, "le")]
    assert bound == MOST_KEPT
