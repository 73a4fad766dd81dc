"""Builds the reduced benchmark `benchmarks/data/digits` from a full one.

    python tools/make_digits_data.py FOLDER [--output benchmarks/data/digits]

FOLDER has the layout that `acclimate_bench.data.digits` describes, with all clients. The reduced set keeps the
network, what was measured at its source and, of the clients, every other one; recorded accuracies stay those of all.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from acclimate_bench.data.digits import DIGITS
from acclimate_bench.data.shift import ACCURACY, MODEL, MOMENTS

ROOT = Path(__file__).resolve().parents[1]
STEP = 2
README = """\
# Reduced digits benchmark

A real change of domain, read by `acclimate-bench` beside the simulated shifts of
[`../fashion`](../fashion/README.md). A network learned from 9,000 MNIST digits (3 epochs, 97.7 % on held-out ones)
answers clients whose digits come from another data set: other writers, 8 x 8 pixels, enlarged to 20 x 20 (bicubic) and
framed to 28 x 28. Here are 10 of its 20 clients for each mix of classes, 200 images each, some of which several clients
share; `accuracy.json` holds the recorded accuracies of all 20.

| file | array | shape, type | meaning |
|---|---|---|---|
| `model.safetensors` | | | weights of `acclimate:shallow_cnn`; input: pixels / 255 |
| `balanced_source.npz` | `prior`, `class_counts` | (10,) | classes of the training images |
| | `<layer>.class_mean`, `.class_square`, `.row_var` | | class moments of the BatchNorm layers |
| `domain.npz` | `clients` | (10,) | numbers of the clients among the 20: every other one, from 0 |
| | `images`, `labels` | (10, 200, 28, 28) uint8, (10, 200) int64 | in the order of sending; 20 images of each class |
| | `major_classes` | (10, 2) | -1: there are none |
| `domain_label.npz` | the same | | two major classes with 80 images each, 5 of every other class |

The accuracies are those of `none`, of `bn_adapt` with prior strength 16 and of `em` with 2 steps, in batches of 20.
There are no adaptation rates, confusion counts or prototypes: methods that need them are left out.

Built by `tools/make_digits_data.py`. The images are from Optical Recognition of Handwritten Digits (CC BY 4.0; see
`LICENSE.txt`).
"""
LICENCE = """\
The images are taken from Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, by E. Alpaydin and C. Kaynak (1998), which is distributed under the Creative Commons
Attribution 4.0 International licence, https://creativecommons.org/licenses/by/4.0/. Changes: images were selected,
grouped into clients, enlarged from 8 x 8 to 20 x 20 pixels by bicubic interpolation, and framed to 28 x 28.

The network was trained on images of MNIST (Y. LeCun, C. Cortes, C. J. C. Burges); none of them is contained. Weights
and measurements are under the Apache License 2.0 like the rest of the project.
"""


def main() -> None:
    """Write the reduced set."""
    parser = argparse.ArgumentParser(description="Build the reduced digits benchmark.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "data" / "digits")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for file in (ACCURACY, MODEL, MOMENTS):
        shutil.copyfile(arguments.folder / file, arguments.output / file)
    for shift in DIGITS:
        reduce_clients(arguments.folder / f"{shift}.npz", arguments.output / f"{shift}.npz")
    (arguments.output / "LICENSE.txt").write_text(LICENCE)
    (arguments.output / "README.md").write_text(README)


def reduce_clients(full: Path, reduced: Path) -> None:
    """Copy every other client."""
    with np.load(full, allow_pickle=False) as target:
        fewer = {name: target[name][::STEP] for name in target.files}
        numbers = np.arange(0, len(target["labels"]), STEP)
    np.savez_compressed(reduced, clients=numbers, **fewer)


if __name__ == "__main__":
    main()
