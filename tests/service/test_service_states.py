"""What the service makes of outcomes that only a lost reply brings about; the store that finds them is tested apart."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from acclimate_service.cache import StateCache
from acclimate_service.configuration import Configurations
from acclimate_service.problems import Problem
from acclimate_service.state import Absent, Attempt, ClientScope, Conflict, Limits, StoreUnavailable, random_rid
from acclimate_service.states import ClientStates
from acclimate_service.telemetry import Telemetry
from acclimate_store import Catalogue

BUNDLES = Path(__file__).parents[2] / "model_store/bundles"


@dataclass
class Settled:
    """A store whose every change ends in one outcome."""

    outcome: Any

    async def reset(self, *_: Any) -> Any:
        return self.outcome

    async def delete(self, *_: Any) -> Any:
        return self.outcome


def states(outcome: Any) -> ClientStates:
    model = Catalogue(BUNDLES).load("fashion-cnn").model
    store: Any = Settled(outcome)
    return ClientStates(model, Configurations("none", {}), store, Limits(), StateCache(0), Telemetry())


@pytest.fixture
def attempt() -> Attempt:
    return Attempt(random_rid(), "0" * 32)


async def test_an_absent_client_whose_reset_may_still_land_is_not_called_unknown(attempt):
    with pytest.raises(StoreUnavailable) as failure:
        await states(Absent("unknown")).reset(ClientScope("a"), attempt)
    assert failure.value.committed == "unknown"
    assert await states(Absent()).reset(ClientScope("a"), attempt) is None


@pytest.mark.parametrize("effect", [False, "unknown"])
async def test_a_conflict_says_whether_the_change_may_still_land(attempt, effect):
    outcome = states(Conflict("life", None, effect))
    for change in (outcome.reset(ClientScope("a"), attempt), outcome.delete(ClientScope("a"))):
        with pytest.raises(Problem) as problem:
            await change
        assert (problem.value.code, problem.value.committed) == ("conflict", effect)
