"""Clients whose batches have labels, configurations, resets, states from outside and deletions among them.

One thing is sent after the other, each until it is acknowledged, so what has to follow is known at any time: a version
that is one more, and the state that an uninterrupted run in this process has come to.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from exactly_once.callers import Caller
from exactly_once.streams import Images, step

from acclimate_adapters import State, create
from acclimate_client import LabelledRow
from acclimate_client.errors import AcclimateClientError
from acclimate_store import Bundle

ADAPTERS: Final = ("atp", "fedcal")
"""Clients begin with the first, and again after a deletion."""
TOLERANCE: Final = 1e-3
"""Another memory layout changes less, even where an adapter takes large steps; a batch too many changes more."""


class Changer:
    """One such client.

    Args:
        caller: sends what it says, and keeps what went wrong.
        client: its id.
        batches: what it sends, over and over.
        bundle: the model.
    """

    def __init__(self, caller: Caller, client: str, batches: Sequence[Images], bundle: Bundle) -> None:
        self._caller = caller
        self._client = client
        self._batches = itertools.cycle(batches)
        self._bundle = bundle
        self._keys = itertools.count()
        self._told: tuple[str, list[int]] | None = None  # the last batch that can still be labelled: its id and classes
        self._saved: dict[str, bytes] = {}  # a state of each adapter
        self._begin()

    def run(self, seed: str, changes: int) -> None:
        """Send so many batches and other things, each kind of them at least once."""
        rng = random.Random(f"{seed} {self._client}")
        others = [self._label, self._configure, self._reset, self._import, self._delete]
        drawn = [*others, *rng.choices(others, k=max(0, changes - len(others)))]
        rng.shuffle(drawn)
        with suppress(AcclimateClientError):  # a refusal for good, which is a violation, ends it
            for change in drawn:
                self._predict()
                change()
            self._predict()

    def _begin(self) -> None:
        self._version = 0
        self._restart(ADAPTERS[0])

    def _restart(self, adapter: str) -> None:
        self._adapter = adapter
        self._state: State = create(adapter).init(self._bundle.model)
        self._told = None

    def _predict(self) -> None:
        images = next(self._batches)
        done = self._send(
            lambda sdk, key: sdk.predict(self._client, images, probabilities=True, idempotency_key=key), "predict"
        )
        self._state, expected = step(self._bundle, self._adapter, self._state, images)
        worst = np.abs(done.probabilities - expected).max()
        self._require(worst <= TOLERANCE, f"version {self._version} was answered unlike the serial run, by {worst:.2g}")
        self._told = done.request_id, done.indices.tolist()
        self._saved[self._adapter] = self._caller.insist(lambda sdk: sdk.export_state(self._client), "an export")[0]

    def _label(self) -> None:
        """As the service said, so that the guard finds nothing against the adapter."""
        assert self._told is not None
        request, indices = self._told
        rows = [LabelledRow(request, row, index) for row, index in enumerate(indices)]
        done = self._send(lambda sdk, key: sdk.feedback(self._client, rows, idempotency_key=key), "feedback")
        self._require(done.rows.counted == len(rows), f"{done.rows} of {len(rows)} new labels")

    def _configure(self) -> None:
        other = next(name for name in ADAPTERS if name != self._adapter)
        self._send(lambda sdk, key: sdk.configure(self._client, other, idempotency_key=key), "configure")
        self._restart(other)

    def _reset(self) -> None:
        self._send(lambda sdk, key: sdk.reset(self._client, idempotency_key=key), "reset")
        self._restart(self._adapter)

    def _import(self) -> None:
        data = self._saved[self._adapter]
        self._send(lambda sdk, key: sdk.import_state(self._client, data, idempotency_key=key), "import")
        self._restart(self._adapter)
        self._state = State.from_bytes(data)

    def _delete(self) -> None:
        self._caller.insist(lambda sdk: sdk.delete(self._client), f"{self._client}: a deletion")
        self._begin()

    def _send(self, call: Callable, what: str):
        key = f"{self._client}-{next(self._keys)}"
        done, _ = self._caller.insist(lambda sdk: call(sdk, key), f"{what} {key}")
        self._version += 1
        found = done.state.version
        self._require(found == self._version, f"{what} {key} led to version {found}; expected is {self._version}")
        return done

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self._caller.ledger.violations.append(f"{self._client}: {otherwise}")
