"""Batches of labels: what they become in a journal, and what they make of a client's record and state.

Labels of earlier rows, or of images that come with them, are counted in the record; then those that counted are taken
into the state, where the adapter learns. Both are one change of the client, so that what holds for batches holds for
labels: once each, durable before the reply, and the same when a journal is computed again.
"""

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from acclimate_adapters import Adapter, Labelled, State, learns
from acclimate_adapters.guard import finite
from acclimate_adapters.labels import Informed, Learning
from acclimate_adapters.merged import Work, guarded_slices
from acclimate_service.compute.client_state import ClientState
from acclimate_service.guard.record import Label, Record, Tally
from acclimate_service.state import Batch, event
from acclimate_store import Bundle

Taking: TypeAlias = Generator[None, None, tuple[ClientState, bytes]]
_FEEDBACK: Final = b"feedback"
_EXAMPLES: Final = b"examples"
_COUNTED: Final = b"counted "
_LABELS: Final = event("labels")
_ON_LOOP: Final = 16 * 1024
"""Bytes of labels that are counted within two milliseconds; more would hold up the event loop."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Labelled images of a client."""

    images: NDArray[Any]  # [N, C, H, W], uint8 or float32, before normalisation
    labels: NDArray[Any]  # [N], int64 in 0..K-1


def feedback_of(labels: Sequence[Label]) -> Batch:
    """A batch of labels of earlier rows."""
    content = orjson.dumps([[each.request_id, each.row, each.label] for each in labels])
    return Batch("uint8", (len(content),), content, _FEEDBACK)


def examples_of(examples: Examples, request_id: str) -> Batch:
    """A batch of labelled images; the id begins a client's record where there is none yet."""
    content = np.ascontiguousarray(examples.images)
    parameters = _EXAMPLES + orjson.dumps([request_id, examples.labels.tolist()])
    return Batch(content.dtype.name, content.shape, content.data, parameters)


def only_counted(labels: Batch) -> Batch:
    """The same labels, to be counted and not learned from."""
    return replace(labels, parameters=_COUNTED + labels.parameters)


def names_rows(batch: Batch) -> bool:
    """Whether a batch tells labels of earlier rows, not of images that come along."""
    return batch.parameters == _FEEDBACK


def has_labels(batch: Batch) -> bool:
    """Whether a batch tells labels."""
    told = _told(batch)
    return told == _FEEDBACK or told.startswith(_EXAMPLES)


def is_light(batch: Batch, adapter: Adapter) -> bool:
    """Whether only a record is to be changed, which needs no torch, and little of it."""
    return _told(batch) == _FEEDBACK and batch.nbytes <= _ON_LOOP and not _is_learned(adapter, batch)


def taking_labels(adapter: Adapter, bundle: Bundle, state: ClientState, batch: Batch) -> Taking:
    """Count the labels of a batch and learn what counted; the answer says what became of them.

    It comes in the slices of a step where the labels are those of images.

    Args:
        adapter: of the client.
        bundle: its model.
        state: the client's.
        batch: one that has labels.
    """
    if _told(batch) == _FEEDBACK:
        return _take_rows(adapter, bundle, state, batch)
    return (yield from _take_examples(adapter, bundle, state, batch))


def _take_rows(adapter: Adapter, bundle: Bundle, state: ClientState, batch: Batch) -> tuple[ClientState, bytes]:
    """Labels of rows that were predicted before, and whose images are gone."""
    before = state.record or Record()
    record, tally = before.tell([Label(*each) for each in orjson.loads(bytes(batch.data))])
    new = record.told_since(before).astype(np.int64)
    learned = state.state
    if new.size and _is_learned(adapter, batch):
        frozen, _, labels, *by_arm = torch.from_numpy(new)
        predicted = torch.stack([frozen, *by_arm], dim=1) if by_arm else None
        learned = _learned(adapter, bundle, state.state, Labelled(labels, predicted=predicted))
    after = replace(state, state=learned, record=record if state.record else None, point=_LABELS)
    return after, _answer(adapter, after, record, tally)


def _take_examples(adapter: Adapter, bundle: Bundle, state: ClientState, batch: Batch) -> Taking:
    """Labels of images: both predictions are made now, from the state before it learns what the images are."""
    request_id, labels = orjson.loads(_told(batch).removeprefix(_EXAMPLES))
    model = bundle.model
    x = bundle.prepare(np.frombuffer(batch.data, batch.dtype).reshape(batch.shape))
    step = yield from guarded_slices(model, Work(adapter, state.state, x))
    if isinstance(step, Exception):
        raise step
    frozen = step.frozen_logits if step.frozen_logits is not None else model.frozen(model.batch(x)).logits
    before, adapted = frozen.argmax(dim=-1).tolist(), step.logits.argmax(dim=-1).tolist()
    record = (state.record or Record()).count(request_id, before, adapted, labels)
    learned = state.state
    if _is_learned(adapter, batch):
        first = frozen.argmax(dim=-1, keepdim=True)
        predicted = None if step.by_arm is None else torch.cat([first, step.by_arm], dim=1)
        learned = _learned(adapter, bundle, state.state, Labelled(torch.tensor(labels), model.batch(x), predicted))
    after = replace(state, state=learned, record=record, point=_LABELS)
    return after, _answer(adapter, after, record, Tally(counted=len(labels)))


def _told(batch: Batch) -> bytes:
    """The parameters of a batch, whether it is learned from or only counted."""
    return batch.parameters.removeprefix(_COUNTED)


def _is_learned(adapter: Adapter, batch: Batch) -> TypeGuard[Learning]:
    return learns(adapter) and not batch.parameters.startswith(_COUNTED)


def _learned(adapter: Learning, bundle: Bundle, state: State, rows: Labelled) -> State:
    """The state with labelled rows taken in, unless that would make it useless."""
    learned = adapter.learn(bundle.model, state, rows)
    return learned if finite(learned) else state


def _answer(adapter: Adapter, state: ClientState, record: Record, tally: Tally) -> bytes:
    told = {"counts": record.counts.kinds, "born": record.born.hex(), "configuration": state.configuration}
    if isinstance(adapter, Informed):
        told["arms"] = adapter.told(state.state)
    return orjson.dumps({"adapter": state.state.adapter, "feedback": asdict(tally), "told": told})
