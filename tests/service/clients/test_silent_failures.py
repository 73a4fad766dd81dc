"""Work that nobody waits for fails aloud, whichever it is: logged with its cause, counted, and shown while it lasts."""

import time

import pytest

from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.guard.pools import Pools
from acclimate_service.scopes import Kept
from acclimate_service.state import ClientScope, Session
from acclimate_service.state.journal import Journal
from acclimate_service.trials.challengers import Challengers

CAM = ClientScope("cam")


@pytest.fixture(scope="module")
def service(run_service, tmp_path_factory):
    """Every state has a journal, and every batch a challenger."""
    directory = tmp_path_factory.mktemp("service")
    with run_service(data_dir=directory, inline_max=1, candidates=("em",), candidate_share=1.0) as replica:
        yield replica


def predict(replica, images):
    with replica.sdk() as sdk:
        sdk.predict("cam", images)


def leave(replica, images):
    predict(replica, images)
    replica.loop.call_soon_threadsafe(replica.service.sessions._leave, "cam")


def be_asked_for(replica, images):
    predict(replica, images)
    replica.loop.call_soon_threadsafe(replica.service.sessions.hand_over, "cam")


def miss_announcements(replica, images):
    predict(replica, images)
    replica.loop.call_soon_threadsafe(replica.service.sessions.check_all)


def hear_of_the_fleet(replica, _):
    replica.service.fleet._heard_at = float("-inf")
    replica.loop.call_soon_threadsafe(replica.service.fleet.heard)


def note_activity(replica, _):
    replica.loop.call_soon_threadsafe(replica.service.rounds.note, CAM)


KINDS = {
    "answers": (Journal, "answer", predict),
    "snapshot": (Journal, "upload", leave),
    "evict": (Session, "evict", leave),
    "hand_over": (Session, "hand_over", be_asked_for),
    "check": (Session, "check", miss_announcements),
    "challenger": (Challengers, "_see", predict),
    "evidence": (Pools, "counted", hear_of_the_fleet),
    "cohort_note": (Cohorts, "note", note_activity),
}


@pytest.mark.parametrize("task", KINDS)
def test_it_is_logged_with_its_cause_counted_and_shown_until_it_succeeds(task, service, stream, monkeypatch, caplog):
    owner, step, occasion = KINDS[task]
    (images,) = stream(0, 1)

    def failing():
        reply = service.http.get("/v2/health/ready")
        assert reply.status_code == 200, "the others are served"
        return {each["task"]: each for each in reply.json()["failing"]}

    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            occasion(service, images)  # where two of them meet, one of them may find nothing to do
            assert time.monotonic() < deadline
            time.sleep(0.05)

    async def fail(*_):
        raise RuntimeError(f"no {task} today")

    counted = f'acclimate_background_failures_total{{task="{task}"}}'
    before = service.metric(counted)
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        until(lambda: task in failing())
        assert failing()[task]["error"] == "RuntimeError"
        assert service.metric(counted) > before
        assert service.metric(f'acclimate_background_failing{{task="{task}"}}') == 1
    assert f"no {task} today" in caplog.text
    until(lambda: task not in failing())
    assert service.metric(f'acclimate_background_failing{{task="{task}"}}') == 0


async def test_what_cannot_be_closed_keeps_nothing_else_from_it_and_each_cause_is_logged(caplog):
    closed = []

    class Part:
        def __init__(self, name, fails):
            self.name, self.fails = name, fails

        async def aclose(self, budget_s=0):
            closed.append((self.name, budget_s))
            if self.fails:
                raise OSError(f"the {self.name} cannot be closed")

    sessions, fleet = Part("sessions", fails=True), Part("fleet", fails=True)
    arms, questions = Part("arms", fails=False), Part("questions", fails=True)
    await Kept(sessions, fleet, arms, questions, challengers=None).aclose(5)
    assert [name for name, _ in closed] == ["sessions", "fleet", "arms", "questions"]
    assert 4 < closed[0][1] <= 5
    for part in (sessions, fleet, questions):
        assert f"the {part.name} cannot be closed" in caplog.text
