"""A better candidate takes the place of the default adapter: proven by labels, and only where operators allow it."""

import asyncio
import time

import numpy as np
import pytest

from acclimate_client import LabelledRow
from acclimate_service.guard.evidence import Counts, verdict
from acclimate_service.settings import SettingsError

BATCH = 10


@pytest.fixture
def switching(make_replica, contrary):
    """A service that serves the frozen model and tries an adapter that says something else for every row."""
    settings = {
        "adapter": "none",
        "candidates": ("contrary",),
        "candidate_share": 1.0,
        "auto_switch": True,
        "guard_clients": 1,
    }
    return lambda **changes: make_replica(**{**settings, **changes})


def settle(replica):
    challengers = replica.service.challengers
    deadline = time.monotonic() + 20
    while challengers._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def labelled_batch(sdk, replica, serial, client, images, shift):
    """Send a batch, and tell for each row that the truth is so many classes after what the frozen model sees."""
    prediction = sdk.predict(client, images)
    settle(replica)
    frozen = serial.probabilities("none", [images])[0].argmax(-1)
    labels = ((frozen + shift) % 10).tolist()
    sdk.feedback(client, [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(labels)])
    settle(replica)
    return prediction


def trial_of(replica):
    (challenger,) = replica.service.challengers._challengers
    return challenger.trial


def heard(replica):
    replica.run(trial_of(replica).evidence.pooled())


def test_a_better_candidate_is_what_new_clients_begin_with_and_labelled_ones_go_on_with(switching, serial, stream):
    replica = switching()
    with replica.sdk() as sdk:
        chosen = sdk.configure("chosen", "em")
        for number in range(3):
            images = stream(number, 1)[0]
            assert (
                labelled_batch(sdk, replica, serial, "cam", images, 1).adapter
                == ["none", "contrary", "contrary"][number]
            )
        assert sdk.get("cam").adapter == "contrary"
        heard(replica)
        assert sdk.predict("new", images).adapter == "contrary"
        assert sdk.predict("chosen", images).adapter == chosen.adapter == "em"
        assert sdk.get("cam").guard.evidence.labelled == 20, "its evidence began anew under the candidate"
    for because in ("own", "fleet"):
        assert replica.metric(f'acclimate_adapter_switches_total{{because="{because}",to="contrary"}}') == 1


def test_a_client_that_sent_a_batch_before_stays_as_long_as_its_own_labels_say_nothing(switching, serial, stream):
    replica, (images,) = switching(), stream(0, 1)
    with replica.sdk() as sdk:
        assert sdk.predict("early", images).adapter == "none"
        labelled_batch(sdk, replica, serial, "cam", images, 1)
        heard(replica)
        assert sdk.predict("late", images).adapter == "contrary"
        assert sdk.predict("early", images).adapter == "none"


@pytest.mark.parametrize("shift", [0, 2], ids=["worse", "as bad"])
def test_a_candidate_that_is_no_better_is_never_chosen(switching, serial, stream, shift):
    replica = switching()
    with replica.sdk() as sdk:
        for images in stream(0, 6):
            assert labelled_batch(sdk, replica, serial, "cam", images, shift).adapter == "none"
        heard(replica)
        assert sdk.predict("new", images).adapter == "none"
    assert replica.metric('acclimate_adapter_switches_total{because="own",to="contrary"}') == 0


def test_nobody_is_switched_unless_the_operator_asks_for_it(switching, serial, stream):
    replica = switching(auto_switch=False)
    with replica.sdk() as sdk:
        for images in stream(0, 3):
            assert labelled_batch(sdk, replica, serial, "cam", images, 1).adapter == "none"
        assert sdk.predict("new", images).adapter == "none"
    assert trial_of(replica) is None


def test_a_client_that_was_given_the_default_again_is_not_moved_twice(switching, serial, stream):
    replica = switching()
    with replica.sdk() as sdk:
        labelled_batch(sdk, replica, serial, "cam", stream(0, 1)[0], 1)
        assert sdk.get("cam").adapter == "contrary"
        sdk.configure("cam", "none")
        labelled_batch(sdk, replica, serial, "cam", stream(1, 1)[0], 1)
        assert sdk.get("cam").adapter == "none"


def test_a_paused_client_is_not_moved(switching, serial, stream):
    replica, (images,) = switching(), stream(0, 1)
    with replica.sdk() as sdk:
        frozen = serial.probabilities("none", [images])[0].argmax(-1)
        prediction = sdk.predict("cam", images)
        settle(replica)
        sdk.pause("cam")
        sdk.feedback(
            "cam", [LabelledRow(prediction.request_id, row, (k + 1) % 10) for row, k in enumerate(frozen.tolist())]
        )
        settle(replica)
        assert (sdk.get("cam").adapter, sdk.get("cam").adaptation) == ("none", "paused")


def test_a_client_that_is_configured_while_it_is_moved_keeps_what_it_was_given(switching, serial, stream):
    replica = switching()
    other = switching(redis_url=replica.service.settings.redis_url)
    trial = trial_of(replica)
    with replica.sdk() as sdk, other.sdk() as elsewhere:
        initial = trial.initial

        async def meanwhile(configuration):
            await asyncio.to_thread(elsewhere.configure, "cam", "em")
            return await initial(configuration)

        trial.initial = meanwhile
        labelled_batch(sdk, replica, serial, "cam", stream(0, 1)[0], 1)
        assert sdk.get("cam").adapter == "em"
    assert replica.metric('acclimate_adapter_switches_total{because="own",to="contrary"}') == 0


def test_labelled_images_move_nobody_since_only_answers_are_compared(switching, serial, stream):
    replica, (images,) = switching(), stream(0, 1)
    labels = (serial.probabilities("none", [images])[0].argmax(-1) + 1) % 10
    with replica.sdk() as sdk:
        sdk.predict("cam", images)
        for _ in range(3):
            sdk.feedback_images("cam", images, labels.tolist())
            settle(replica)
        assert sdk.get("cam").adapter == "none"


def test_a_deleted_client_leaves_no_share_of_the_pairs(switching, serial, stream):
    replica = switching()
    with replica.sdk() as sdk:
        labelled_batch(sdk, replica, serial, "cam", stream(0, 1)[0], 1)
        shares = [field for pool in replica.redis.keys("*:e") for field in replica.redis.hkeys(pool) if b"|" in field]
        assert len(shares) == 3, "of the default, the candidate, and the pairs of the two"
        sdk.delete("cam")
        assert not replica.redis.keys("*:e")


@pytest.mark.parametrize("changes", [{"guard": "off"}, {"candidates": ()}])
def test_switching_without_anything_to_compare_is_refused_at_the_start(switching, changes):
    with pytest.raises(SettingsError, match="ACCLIMATE_AUTO_SWITCH"):
        switching(**changes)


def test_a_fleet_is_hardly_ever_switched_to_a_candidate_that_is_no_better():
    """The rule of the service on 2,000 simulated fleets with three candidates each, looked at after every label."""
    rng, alpha, candidates, fleets, labels = np.random.default_rng(0), 0.05, 3, 2000, 300
    wins = np.cumsum(rng.random((fleets, candidates, labels)) < 0.5, axis=2)
    n = np.arange(1, labels + 1)
    least = [next((w for w in range(k + 1) if switches(w, k - w, alpha / candidates)), k + 1) for k in n]
    ever = (wins >= np.array(least)).any(axis=(1, 2))
    assert 0 < ever.mean() <= alpha
    better = np.cumsum(rng.random((200, labels)) < 0.75, axis=1)
    assert (better >= np.array(least)).any(axis=1).mean() > 0.99


def switches(wins, losses, alpha):
    return verdict(Counts(wins, losses, wins + losses, losses, wins), alpha) == "trusted"
