"""Batches of images as a journal keeps them, with all that decides their answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from acclimate_service.guard.evidence import ALPHA
from acclimate_service.guard.policy import Decision
from acclimate_service.state import Batch


@dataclass(frozen=True, slots=True)
class Asked:
    """All that decides a step and its answer beside state and images.

    Args:
        probabilities: whether the answer is to hold the posterior of every image.
        request_id: by which the rows are remembered; empty if they are not.
        against: configurations whose clients are to be answered unadapted, for what reason; a client's own evidence
            comes first.
        alpha: of the test of that evidence.
    """

    probabilities: bool = False
    request_id: str = ""
    against: Mapping[str, Decision] = field(default_factory=dict)
    alpha: float = ALPHA

    def encode(self) -> bytes:
        """As it is kept in a journal."""
        against = {name: decision.because for name, decision in self.against.items()}
        return orjson.dumps([self.probabilities, self.request_id, against, self.alpha])

    @classmethod
    def decode(cls, data: bytes) -> "Asked":
        """What `encode` wrote."""
        probabilities, request_id, against, alpha = orjson.loads(data)
        decisions = {name: Decision("frozen", because) for name, because in against.items()}
        return cls(probabilities, request_id, decisions, alpha)


def batch_of(images: NDArray[Any], asked: Asked | None = None) -> Batch:
    """A batch of images.

    Args:
        images: [B, C, H, W], uint8 or float32, before normalisation.
        asked: what is wanted.
    """
    content = np.ascontiguousarray(images)
    return Batch(content.dtype.name, content.shape, content.data, (asked or Asked()).encode())
