import json
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate_adapters import create
from acclimate_store import Catalogue, load_streams

ROOT = Path(__file__).parents[2]
IN_PROCESS = {
    "none": create("none"),
    "atp batch": create("atp", mode="batch"),
    "atp online": create("atp", mode="online"),
}


def test_the_demo_shows_over_http_what_the_adapters_reach_in_process(tmp_path: Path) -> None:
    """Every client's accuracy by every method of the demo that is compared, to the image."""
    output = tmp_path / "accuracy.json"
    command = [sys.executable, str(ROOT / "examples/demo.py"), "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    shown = json.loads(output.read_text())
    bundle = Catalogue(ROOT / "model_store/bundles").load("fashion-cnn", "1")
    streams = load_streams(ROOT / "model_store/samples/fashion-hybrid/streams.npz")
    for title, adapter in IN_PROCESS.items():
        for stream, accuracy in zip(streams, shown[title], strict=True):
            state, correct = adapter.init(bundle.model), 0
            for start in range(0, len(stream.images), 20):
                batch = slice(start, start + 20)
                step = adapter.step(bundle.model, state, bundle.prepare(stream.images[batch]))
                state = step.state
                correct += int((step.logits.argmax(-1).numpy() == stream.labels[batch]).sum())
            assert accuracy == pytest.approx(100 * correct / len(stream.images)), (title, stream.client_id)
    assert "mean" in done.stdout
