"""The last images of clients, for whoever looks at them and labels them by hand.

They are in the memory of the replica that answered them, beside the client's state, and go when that does: with a
DELETE or a reset, whichever replica was asked, when another replica serves the client, when memory is needed, when the
replica ends. Nothing of them is written anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from numpy.typing import NDArray

from acclimate_service.clients.requests import ClientRequest, Replies
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute.kept_images import KeptImage, images_of, those_kept
from acclimate_service.errors import Problem
from acclimate_service.guard.record import Record
from acclimate_service.state import ClientUnknown


class LastImage(NamedTuple):
    """An image, whether its label is asked for, and its label (class) if it was told."""

    kept: KeptImage
    asked: bool
    label: int | None


class LastImages:
    """Keeps the last images of the clients of one model.

    Args:
        sessions, replies: of the service.
        budget: bytes for each client; 0 keeps none.

    Attributes:
        on: whether any are kept.
    """

    def __init__(self, sessions: Sessions, replies: Replies, budget: int) -> None:
        self._sessions = sessions
        self._replies = replies
        self._budget = budget
        self.on = budget > 0

    def keep(self, turn: Turn, request_id: str, images: NDArray[Any], answer: bytes) -> None:
        """Keep those of a batch [B, C, H, W] that was folded in, as far as there is room; it is the client's turn."""
        held = turn.session.memory.held
        if held is None:
            return
        predicted = [each["index"] for each in orjson.loads(answer)["predictions"]]
        state = held.state
        those = (*state.images, *images_of(request_id, images, predicted))
        kept = those_kept(those, _asked(state.record), self._budget)
        turn.session.exchange(state, replace(state, images=kept, beside=sum([each.image.nbytes for each in kept])))

    async def of(self, request: ClientRequest) -> Sequence[LastImage]:
        """The last images of a client that this replica has, the newest first.

        Raises:
            Problem: `images_off`; `deadline_exceeded`.
            ClientUnknown: there is no such client.
            StateError: Redis failed.
        """
        if not self.on:
            raise Problem("images_off", "ACCLIMATE_KEEP_IMAGES_BYTES is 0: no images are kept")
        if await self._replies.describe(request.client) is None:
            raise ClientUnknown(f"there is no client {request.client.name!r}, so there are no images of it")
        async with self._sessions.turn(request) as turn:
            state = (await turn.session.present()).state
        asked, labels = _asked(state.record), dict[str, list[int]]()
        if state.record is not None:
            labels = {each: state.record.labels_of(each) for each in {kept.request_id for kept in state.images}}
        return [LastImage(kept, kept[:2] in asked, _label(labels, kept)) for kept in reversed(state.images)]


def _asked(record: Record | None) -> set[tuple[str, int]]:
    questions = record.questions if record else ()
    return {(question.request_id, row) for question in questions for row in question.rows}


def _label(labels: Mapping[str, Sequence[int]], kept: KeptImage) -> int | None:
    of_batch = labels.get(kept.request_id, ())
    label = of_batch[kept.row] if kept.row < len(of_batch) else -1
    return label if label >= 0 else None
