"""The part of a reply that a retry must get again, as it is stored beside the state."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from acclimate_adapters import Step


def encode(step: Step, classes: Sequence[str], with_probabilities: bool, skipped_batches: int = 0) -> bytes:
    """JSON of the adapter, the predictions [B], the probabilities [B, K] if wanted, and the signals.

    Batches missing in a numbered stream are one more signal, where there are any.
    """
    probabilities = step.logits.double().softmax(dim=-1).cpu()
    confidence, index = probabilities.max(dim=-1)
    answer: dict[str, Any] = {
        "adapter": step.state.adapter,
        "predictions": [
            {"index": i, "label": classes[i], "probability": p}
            for i, p in zip(index.tolist(), confidence.tolist(), strict=True)
        ],
        "signals": {**step.signals, **({"skipped_batches": skipped_batches} if skipped_batches else {})},
    }
    if with_probabilities:
        answer["probabilities"] = probabilities.tolist()
    return orjson.dumps(answer)


def decode(answer: bytes) -> dict[str, Any]:
    """The members that `encode` wrote."""
    fields: dict[str, Any] = orjson.loads(answer)
    return fields


UNAVAILABLE: Mapping[str, Any] = {"predictions": [], "signals": {}}
"""Stands for the answer of an applied batch that is no longer stored."""
