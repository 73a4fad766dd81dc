"""The part of a reply that a retry must get again, as it is stored beside the state."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from torch import Tensor

from acclimate_adapters import Step
from acclimate_service.guard.policy import Decision


def encode(
    step: Step,
    logits: Tensor,
    classes: Sequence[str],
    with_probabilities: bool = False,
    skipped_batches: int = 0,
    request_id: str = "",
    decision: Decision | None = None,
    switched: bool = False,
) -> bytes:
    """JSON of the adapter, the predictions [B], the probabilities [B, K] if wanted, and the signals.

    Args:
        step: the adapter's step.
        logits: [B, K], of the prediction that is given: the step's own, or that of the frozen model.
        classes: their names.
        with_probabilities: whether to give the whole posterior.
        skipped_batches: missing in a numbered stream; one more signal, where there are any.
        request_id: by which the rows can be told their labels; left out if they are not remembered.
        decision: which prediction is given; said if it is the frozen one, or if the batch before was given the other:
            `switched`.
    """
    probabilities = logits.double().softmax(dim=-1).cpu()
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
    if request_id:
        answer["request_id"] = request_id
    if decision is not None and (switched or decision.answer == "frozen"):
        answer["guard"] = {"answering": decision.answer, "because": decision.because, "switched": switched}
    return orjson.dumps(answer)


def decode(answer: bytes) -> dict[str, Any]:
    """The members that `encode` wrote."""
    fields: dict[str, Any] = orjson.loads(answer)
    return fields


UNAVAILABLE: Mapping[str, Any] = {"predictions": [], "signals": {}}
"""Stands for the answer of an applied batch that is no longer stored."""
