"""What replies say of the guard, to records. Nothing here sends or waits."""

from collections.abc import Mapping
from typing import Any

from acclimate_client._members import optional_number, typed
from acclimate_client.evidence import (
    AccuracyInterval,
    AdapterEvidence,
    Evidence,
    Guard,
    GuardDecision,
    RowCounts,
)

Json = Mapping[str, Any]


def decision(value: object) -> GuardDecision | None:
    """Returns the member `guard` of a prediction."""
    return None if value is None else _decision(typed(dict, value))


def guard(value: object) -> Guard | None:
    """Returns the member `guard` of a client."""
    if value is None:
        return None
    fields = typed(dict, value)
    return Guard(_decision(fields), _evidence(fields))


def row_counts(value: object) -> RowCounts | None:
    """Returns the member `feedback`."""
    if value is None:
        return None
    fields = typed(dict, value)
    return RowCounts(
        counted=typed(int, fields["counted"]),
        duplicate=typed(int, fields["duplicate"]),
        contradicting=typed(int, fields["contradicting"]),
        unknown=typed(int, fields["unknown"]),
    )


def adapter_evidence(value: object) -> AdapterEvidence:
    """Returns one item of the member `adapters` of a model."""
    fields = typed(dict, value)
    return AdapterEvidence(
        adapter=typed(str, fields["adapter"]),
        hyperparameters=typed(dict, fields["hyperparameters"]),
        clients=typed(int, fields["clients"]),
        candidate=typed(bool, fields["candidate"]),
        evidence=_evidence(typed(dict, fields["guard"])),
    )


def _decision(fields: Json) -> GuardDecision:
    return GuardDecision(answering=typed(str, fields["answering"]), because=typed(str, fields["because"]))


def _evidence(fields: Json) -> Evidence:
    return Evidence(
        verdict=typed(str, fields["verdict"]),
        labelled=typed(int, fields["labelled"]),
        wins=typed(int, fields["wins"]),
        losses=typed(int, fields["losses"]),
        frozen=_accuracy(fields["frozen"]),
        adapted=_accuracy(fields["adapted"]),
    )


def _accuracy(value: object) -> AccuracyInterval:
    fields = typed(dict, value)
    return AccuracyInterval(
        accuracy=optional_number(fields["accuracy"]),
        low=optional_number(fields["low"]),
        high=optional_number(fields["high"]),
    )
