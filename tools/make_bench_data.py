"""Builds the reduced benchmark `benchmarks/data/fashion` from a federated Fashion-MNIST benchmark.

    python tools/make_bench_data.py FOLDER [--output benchmarks/data/fashion] [--anchors FILE]

FOLDER has the layout that `acclimate_bench.data.fashion` describes, with all clients. The reduced set keeps the
networks, the source quantities and, of the target clients, every fifth; recorded accuracies stay those of all clients,
so that any selection of them can be compared. FILE holds labelled source images of the hybrid shift, `images`
[M, N, 28, 28] and `labels` [M, N] of M source clients.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from make_fashion_bundle import CLIENTS, LICENCE  # the same clients as in the sample streams, for the same reason

from acclimate_bench.data.fashion import ANCHORS, BALANCED, FASHION
from acclimate_bench.data.shift import ACCURACY

ROOT = Path(__file__).resolve().parents[1]
UNCHANGED = ("model.safetensors", "rates.json", "aux.npz", "balanced_source.npz")
KEPT = ("per_client", "clients", "images_per_client", "lr")  # of what is recorded for a method
README = """\
# Reduced accuracy benchmark

What `acclimate-bench accuracy` reads by default: federated Fashion-MNIST with four kinds of shift between source and
target clients. Every folder holds the frozen network of its shift, what was measured on its 120 source clients, and 8
of its 40 target clients, 200 images each; `accuracy.json` holds the accuracies of the reference programs on all 40.

| folder | what differs from client to client |
|---|---|
| `feature` | one corruption, never met in training; all classes equally often |
| `label` | two major classes, 80 % of the images |
| `hybrid` | both |
| `multitype` | clients with an even number: a corruption; with an odd one: major classes |

| file | array | shape, type | meaning |
|---|---|---|---|
| `model.safetensors` | | | weights of `acclimate:shallow_cnn` |
| `rates.json` | `rates` | | adaptation rates by tensor name |
| `aux.npz` | `bbse_counts_soft`, `bbse_counts_hard` | (10, 10) | confusion counts, row = predicted, column = true |
| | `prototypes`, `local_descriptor_mean` | (10, 64), (64,) | class means and source mean of the features |
| `balanced_source.npz` | `<layer>.class_mean`, `.class_square`, `.row_var` | | class moments of the BatchNorm layers |
| `target.npz` | `clients` | (8,) | numbers of the clients among the 40: every fifth, from 2 |
| | `images`, `labels` | (8, 200, 28, 28) uint8, (8, 200) int64 | in the order of sending |
| | `corruption`, `severity`, `major_classes` | (8,), (8,), (8, 2) | `none`, 0 and -1 where there is none |
| `hybrid/anchors.npz` | `images`, `labels` | (120, 28, 28) uint8, (120,) int64 | labelled images of 3 source clients |

Built by `tools/make_bench_data.py`. The images come from Fashion-MNIST (MIT, Zalando SE; see `LICENSE.txt`).
"""


def main() -> None:
    """Write the reduced set."""
    parser = argparse.ArgumentParser(description="Build the reduced accuracy benchmark.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "data" / "fashion")
    parser.add_argument("--anchors", type=Path, default=ROOT / "tests" / "golden" / "A" / "expected" / "atp_train.npz")
    arguments = parser.parse_args()
    for shift in FASHION:
        reduce_shift(arguments.folder / shift, arguments.output / shift)
    write_anchors(arguments.anchors, arguments.output / "hybrid" / ANCHORS)
    (arguments.output / ACCURACY).write_text(json.dumps(reduced_record(arguments.folder), indent=1) + "\n")
    (arguments.output / "LICENSE.txt").write_text(LICENCE)
    (arguments.output / "README.md").write_text(README)


def reduce_shift(folder: Path, output: Path) -> None:
    """Copy a shift with fewer target clients."""
    output.mkdir(parents=True, exist_ok=True)
    for file in UNCHANGED:
        shutil.copyfile(folder / file, output / file)
    chosen = list(CLIENTS)
    with np.load(folder / "target.npz", allow_pickle=False) as target:
        fewer = {name: target[name][chosen] for name in target.files}
    np.savez_compressed(output / "target.npz", clients=np.array(chosen), **fewer)


def write_anchors(file: Path, output: Path) -> None:
    """Write the labelled source images of all source clients as one list."""
    with np.load(file, allow_pickle=False) as recorded:
        images, labels = recorded["images"], recorded["labels"]
    np.savez_compressed(output, images=images.reshape(-1, *images.shape[2:]), labels=labels.ravel())


def reduced_record(folder: Path) -> dict[str, Any]:
    """Hyper-parameters and recorded accuracies by shift, without what the benchmark does not use."""
    full = json.loads((folder / ACCURACY).read_bytes())
    balanced = json.loads((folder / BALANCED).read_bytes())["shifts"]
    shifts = {}
    for name in FASHION:
        methods = {**full["shifts"][name]["methods"], "balanced": balanced[name]}
        kept = {method: {key: rounded(entry[key]) for key in KEPT if key in entry} for method, entry in methods.items()}
        shifts[name] = {"hparams": full["shifts"][name]["hparams"], "methods": kept}
    return {"metric": full["metric"], "seed": full["seed"], "shifts": shifts}


def rounded(value: Any) -> Any:
    """Accuracies without the noise of single precision."""
    return [rounded(item) for item in value] if isinstance(value, list) else round(value, 6)


if __name__ == "__main__":
    main()
