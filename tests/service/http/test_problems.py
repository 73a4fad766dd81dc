from typing import get_args

import orjson
import pytest

from acclimate_adapters import StateMismatch
from acclimate_client.errors import PROBLEMS
from acclimate_service.errors import Problem
from acclimate_service.http.payload import PayloadCode
from acclimate_service.http.problems import RETRY_AFTER_S, STATUS, problem_of, reply
from acclimate_service.state import StateCorrupt, StoreFull, StoreUnavailable


def test_every_code_of_the_decoder_has_a_status():
    assert set(get_args(PayloadCode)) <= STATUS.keys()


def test_the_sdk_knows_every_code():
    assert set(PROBLEMS) == set(STATUS)


def test_every_retryable_code_is_a_code():
    assert RETRY_AFTER_S.keys() <= STATUS.keys()


@pytest.mark.parametrize("code", STATUS)
def test_a_retryable_problem_says_when_to_come_back(code):
    made = reply(Problem(code, "detail"), "r")
    assert ("retry-after" in made.headers) is (code in RETRY_AFTER_S or STATUS[code] in (429, 503))
    assert orjson.loads(made.body)["retryable"] is (code in RETRY_AFTER_S)
    assert made.status_code == STATUS[code]


@pytest.mark.parametrize(
    ("error", "code", "committed"),
    [
        (StoreUnavailable("lost", "unknown"), "store_unavailable", "unknown"),
        (StoreUnavailable("refused", False), "store_unavailable", False),
        (StoreFull("full", "unknown"), "store_full", "unknown"),
        (StateCorrupt("broken"), "state_corrupt", False),
        (StateMismatch("another layout"), "state_corrupt", False),
    ],
)
def test_a_state_error_keeps_what_is_known_of_its_effect(error, code, committed):
    problem = problem_of(None, error)
    assert (problem.code, problem.committed) == (code, committed)
