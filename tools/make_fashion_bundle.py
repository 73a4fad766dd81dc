"""Builds the bundle `fashion-cnn/1` and the sample streams `fashion-hybrid` from a federated Fashion-MNIST benchmark.

    python tools/make_fashion_bundle.py BENCHMARK [--store model_store/bundles] [--samples model_store/samples]

BENCHMARK holds `accuracy.json` and, in `hybrid/`, the trained `model.safetensors`, the adaptation rates `rates.json`,
`aux.npz` (confusion counts, prototypes, descriptor), `balanced_source.npz` (class moments) and `target.npz` (the target
clients).
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from acclimate_adapters import FrozenModel, Source
from acclimate_learning.judging import Judgement
from acclimate_store import Evidence, InputSpec, Manifest, write_bundle
from acclimate_store.onnx_graphs import export_graphs
from acclimate_store.shallow_cnn import ShallowCNN

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
METHODS = ("none", "bn_adapt", "em", "bbse_soft", "atp_batch", "atp_online")
# By position and not by how much adaptation helps: these meet all four corruptions, and the frozen network is right on
# them as often as on all forty clients (76.4 %).
CLIENTS = tuple(range(2, 40, 5))

PROVENANCE = """\
ShallowCNN trained by FedAvg on 120 source clients of Fashion-MNIST with hybrid shift: every client has 2 major \
classes (80 % of its images), 8 minor ones and one of 12 corruptions at severity 1 to 5. 160 training and 40 \
validation images per client, 60 rounds, 40 clients per round, 1 local epoch, batch 20, SGD 0.1 (0.03 in the last \
quarter), running statistics averaged with the weights. Adaptation rates: ATP's rule on the validation sets, from 0, \
learning rate 0.1, 120 rounds of 30 clients. Confusion matrices: validation sets of all source clients, columns \
normalised. Prototypes, class moments and descriptor: training images of all source clients. Prior: uniform, as the \
protocol intends and as in the runs behind the metrics; the training images of a class number within 13 % of it. \
Metrics: mean accuracy over 40 target clients with 4 corruptions not seen in training, 200 images each in batches \
of 20, every client starting anew."""

LICENCE = """\
The network was trained on, and the sample images are taken from, Fashion-MNIST, which is distributed under the MIT
License below. Images of classes, clients and corruptions were selected and corrupted for this project; weights,
measurements and corruptions are under the Apache License 2.0 like the rest of the project.

The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def main() -> None:
    """Write the bundle and the samples."""
    parser = argparse.ArgumentParser(description="Build the bundle fashion-cnn/1 and the samples fashion-hybrid.")
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("--store", type=Path, default=ROOT / "model_store" / "bundles")
    parser.add_argument("--samples", type=Path, default=ROOT / "model_store" / "samples")
    arguments = parser.parse_args()
    print(make_bundle(arguments.benchmark, arguments.store))
    print(make_samples(arguments.benchmark, arguments.samples / "fashion-hybrid"))


def make_bundle(benchmark: Path, store: Path) -> Path:
    """Publish `fashion-cnn/1`."""
    net = ShallowCNN(num_classes=len(CLASSES))
    net.load_state_dict(load_file(benchmark / "hybrid" / "model.safetensors"))
    methods = json.loads((benchmark / "accuracy.json").read_bytes())["shifts"]["hybrid"]["methods"]
    manifest = Manifest(
        schema_version=1,
        name="fashion-cnn",
        version="1",
        architecture="acclimate:shallow_cnn",
        architecture_options={"num_classes": len(CLASSES)},
        classifier="linear5",
        input=InputSpec(channels=1, height=28, width=28, mean=(0.286,), std=(0.353,)),
        classes=CLASSES,
        files={},
        metrics={f"accuracy.{method}": round(methods[method]["mean"], 6) for method in METHODS},
        evidence=_evidence(methods),
        licence="Apache-2.0; trained on Fashion-MNIST, MIT, Zalando SE: see LICENSE.txt",
        provenance=PROVENANCE,
    )
    source = read_source(benchmark / "hybrid")
    model = FrozenModel.from_module(net, classifier=manifest.classifier, source=source)
    graphs = export_graphs(model, manifest.input.shape, print)
    return write_bundle(store, manifest, net, source, extra={"LICENSE.txt": LICENCE.encode(), **graphs})


def _evidence(methods: Mapping[str, Any]) -> Evidence:
    """The gain of `atp` on the target clients."""
    accuracy, frozen = (np.array(methods[name]["per_client"]) for name in ("atp_online", "none"))
    told = Judgement("atp", {}, accuracy, frozen, step_ms=0.0, state_bytes=0.0, failures=0)
    return told.evidence("40 target clients with hybrid shift by 4 corruptions not seen in training, 200 images each")


def read_source(folder: Path) -> Source:
    """The source quantities of one shift."""
    measured, moments = _arrays(folder / "aux.npz"), _arrays(folder / "balanced_source.npz")
    return Source(
        prior=torch.full((len(CLASSES),), 1 / len(CLASSES)),
        rates=json.loads((folder / "rates.json").read_bytes())["rates"],
        confusion={mode: _columns(measured[f"bbse_counts_{mode}"]) for mode in ("soft", "hard")},
        prototypes=torch.from_numpy(measured["prototypes"]),
        descriptor=torch.from_numpy(measured["local_descriptor_mean"]),
        moments={name: torch.from_numpy(value) for name, value in moments.items() if name.startswith("bn")},
    )


def make_samples(benchmark: Path, folder: Path) -> Path:
    """Write the streams of a few target clients, each as it sends its images."""
    target = _arrays(benchmark / "hybrid" / "target.npz")
    chosen = list(CLIENTS)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / "streams.npz",
        client_ids=np.array([f"fashion-{index:02d}" for index in chosen]),
        images=target["images"][chosen][:, :, None],
        labels=target["labels"][chosen],
        corruption=target["corruption"][chosen],
        severity=target["severity"][chosen],
    )
    (folder / "LICENSE.txt").write_text(LICENCE)
    return folder


def _arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _columns(counts: NDArray[np.float32]) -> Tensor:
    """Counts [predicted, true] to P(predicted | true)."""
    return torch.from_numpy(counts / counts.sum(axis=0, keepdims=True))


if __name__ == "__main__":
    main()
