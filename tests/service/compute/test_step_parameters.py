"""What decides a step is read from a journal as it was written, by earlier versions too."""

from acclimate_service.compute.steps import StepParameters
from acclimate_service.guard.policy import Decision


def test_what_was_heard_of_arms_survives_a_journal_to_the_last_bit():
    against = {"atp": Decision("frozen", "fleet_behind")}
    told = StepParameters(True, "r", against, 0.01, shares={"portfolio": (0.1 + 0.2, 1 / 3)}, ask_budget=0.02)
    read = StepParameters.decode(told.encode())
    assert (read.probabilities, read.request_id, read.against, read.alpha) == (True, "r", against, 0.01)
    assert read.ask_budget == 0.02, "an operator may have changed it meanwhile"
    assert {name: tuple(shares) for name, shares in read.shares.items()} == dict(told.shares)


def test_entries_of_before_there_were_arms_are_read_and_those_without_are_still_written_so():
    assert StepParameters().encode() == b'[false,"",{},0.05]'
    assert StepParameters.decode(b'[false,"",{},0.05]') == StepParameters()
    assert StepParameters(logits=True).encode() == b'[false,"",{},0.05,true]'
    assert StepParameters.decode(b'[false,"",{},0.05,true]') == StepParameters(logits=True)
