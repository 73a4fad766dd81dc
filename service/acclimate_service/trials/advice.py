"""`acclimate advise`: which adapter the labels speak for."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from acclimate_service.remote import Remote


def fetch_evidence(remote: Remote) -> Mapping[str, Any]:
    """What GET /models/{model}/adapters of a running service says of its model.

    Raises:
        RemoteError: it does not answer, or its guard is off.
    """
    (model, *_) = remote.document("GET", "/models")["models"]
    return remote.document("GET", f"/models/{model['name']}/adapters")


_COLUMNS = f"{'adapter':<28}{'clients':>8}{'labels':>8}{'adapted %':>20}{'frozen %':>20}  verdict"


def advise(document: Mapping[str, Any]) -> str:
    """A table and a recommendation, of what GET /models/{model}/adapters says."""
    rows: Sequence[Mapping[str, Any]] = document["adapters"]
    if not rows:
        return "nobody has told a label yet; send some to POST /clients/{id}/feedback"
    return "\n".join((_COLUMNS, *map(_row, rows), "", _recommendation(rows)))


def _row(row: Mapping[str, Any]) -> str:
    guard = row["guard"]
    shown = f"{_name(row):<28}{row['clients']:>8}{guard['labelled']:>8}"
    return f"{shown}{_interval(guard['adapted']):>20}{_interval(guard['frozen']):>20}  {guard['verdict']}"


def _name(row: Mapping[str, Any]) -> str:
    options = row["hyperparameters"]
    name = str(row["adapter"]) + (f" {orjson.dumps(options).decode()}" if options else "")
    return name + (" (candidate)" if row["candidate"] else "")


def _interval(accuracy: Mapping[str, float | None]) -> str:
    if accuracy["accuracy"] is None:
        return "-"
    estimate, low, high = (100 * (accuracy[name] or 0.0) for name in ("accuracy", "low", "high"))
    return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"


def _recommendation(rows: Sequence[Mapping[str, Any]]) -> str:
    """The trusted adapter whose accuracy is surely highest; else none, if what is there harms."""
    trusted = [row for row in rows if row["guard"]["verdict"] == "trusted"]
    if trusted:
        best = max(trusted, key=lambda row: row["guard"]["adapted"]["low"])
        labels = best["guard"]["labelled"]
        return f"use {_name(best)}: better than no adaptation by {labels} labelled rows, and the best of those that are"
    harmful = [_name(row) for row in rows if row["guard"]["verdict"] == "harmful"]
    if len(harmful) == len(rows):
        return f"use none: {', '.join(harmful)} made predictions worse"
    labels = sum(row["guard"]["labelled"] for row in rows)
    return (
        f"no adapter is proven yet by {labels} labelled rows; tell more, of rows chosen without looking at the answers"
    )
