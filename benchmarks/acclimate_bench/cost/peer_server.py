"""The frozen network behind LitServe, for `peers`; runs in the environment that is made for it.

python peer_server.py BUNDLES MODEL PORT THREADS BATCHES
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import litserve  # type: ignore[import-not-found]
import numpy as np
import orjson
import torch
from fastapi import Body
from starlette.responses import Response

from acclimate_store import Catalogue

_TIMEOUT_S = 0.002
"""Longest wait for further requests of a batch."""


class Classifier(litserve.LitAPI):  # type: ignore[misc]
    """Answers what the service answers without adaptation: class, label and probability of every image."""

    def __init__(self, bundles: Path, model: str, threads: int, batches: int) -> None:
        super().__init__(max_batch_size=batches, batch_timeout=_TIMEOUT_S if batches > 1 else 0.0)
        self._from = bundles, model, threads

    def setup(self, device: str) -> None:
        """Load the network in the process that runs it."""
        bundles, model, threads = self._from
        torch.set_num_threads(threads)
        self._bundle = Catalogue(bundles).load(model, "1")

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Any:
        """Images from raw bytes."""
        return np.frombuffer(request, np.uint8).reshape(-1, *self._bundle.manifest.input.shape)

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Requests stay apart until the network sees them together."""
        return inputs

    def predict(self, images: Any) -> Any:
        """One forward pass for all requests of a batch."""
        many = isinstance(images, list)
        parts = images if many else [images]
        logits = self._bundle.model.frozen(self._bundle.prepare(np.concatenate(parts))).logits
        posteriors = torch.split(logits.double().softmax(dim=-1), [len(part) for part in parts])
        return posteriors if many else posteriors[0]

    def unbatch(self, output: Any) -> Any:
        """One posterior for each request."""
        return output

    def encode_response(self, output: torch.Tensor) -> Response:
        """The same members as the service's reply has."""
        classes, (confidence, index) = self._bundle.manifest.classes, output.max(dim=-1)
        rows = zip(index.tolist(), confidence.tolist(), strict=True)
        predictions = [{"index": i, "label": classes[i], "probability": p} for i, p in rows]
        return Response(orjson.dumps({"predictions": predictions}), media_type="application/json")


if __name__ == "__main__":
    bundles, model, port, threads, batches = sys.argv[1:]
    api = Classifier(Path(bundles), model, int(threads), int(batches))
    server = litserve.LitServer(api, accelerator="cpu", devices=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(port), log_level="error", generate_client_file=False, access_log=False)
