"""What the demo asks of the service, in plain HTTP: applications have the SDK for it."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said of a batch.

    Args:
        request_id: by which rows are named when their labels become known.
        indices: predicted classes [B].
        status: what became of the client's state; "guarded" if the frozen model answered.
        ask: rows whose labels would tell something.
        signals: what the adapter measured without labels.
    """

    request_id: str
    indices: NDArray[np.int64]
    status: str
    ask: tuple[int, ...]
    signals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls a service.

    Args:
        url: of the service.
    """

    url: str

    def ready(self) -> bool:
        """Whether it answers batches."""
        try:
            self._call("GET", "/v2/health/ready")
        except (URLError, ConnectionError):
            return False
        return True

    def configure(self, client: str, adapter: str, hyperparameters: Mapping[str, Any]) -> None:
        """Choose a client's adapter."""
        chosen = {"adapter": adapter, "hyperparameters": dict(hyperparameters)}
        self._call("PUT", f"/clients/{client}", json.dumps(chosen).encode())

    def reset(self, client: str) -> None:
        """Take a client back to the global model."""
        self._call("POST", f"/clients/{client}/reset")

    def predict(self, client: str, images: NDArray[np.uint8]) -> Answer:
        """Send a batch [B, C, H, W]."""
        body = io.BytesIO()
        np.save(body, images)
        told = self._call("POST", f"/clients/{client}/predict", body.getvalue(), "application/x-npy")
        indices = np.array([each["index"] for each in told["predictions"]])
        asked = tuple(told.get("ask", ()))
        return Answer(told["request_id"], indices, told["state"]["status"], asked, told["signals"])

    def feedback(self, client: str, answer: Answer, labels: Mapping[int, int]) -> Mapping[str, Any]:
        """Tell the true labels of some rows of an answer; gives what the client's labels show so far."""
        rows: Sequence[Mapping[str, Any]] = [
            {"request_id": answer.request_id, "row": row, "label": label} for row, label in labels.items()
        ]
        guard: Mapping[str, Any] = self._call(
            "POST", f"/clients/{client}/feedback", json.dumps({"rows": rows}).encode()
        )["guard"]
        return guard

    def _call(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        asked = Request(self.url + path, body, {"Content-Type": kind}, method=method)
        with urlopen(asked, timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read())
