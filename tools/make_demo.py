"""Makes what `acclimate demo` ships: a network of a few kilobytes, and the streams of eight clients.

    python tools/make_demo.py [--data /usr/share/datasets/fashion-mnist]

DATA holds Fashion-MNIST as idx files, as the Debian package `dataset-fashion-mnist` has them. The network is trained on
40,000 training images, half of them corrupted; it is measured and its rates are learned on the other 20,000. Streams
are made from the test images, with corruptions that are in neither.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from acclimate_learning.clients import FAMILIES_OF, Pool, Population, simulate
from acclimate_learning.corruptions import SEVERITIES, corrupt
from acclimate_service.cli import main as acclimate
from acclimate_store.datasets import labelled_images
from acclimate_store.manifest import InputSpec
from acclimate_store.shallow_cnn import ShallowCNN

CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
SPEC = InputSpec(channels=1, height=28, width=28, mean=(0.286,), std=(0.353,))
WIDTH, EPOCHS, BATCH = 6, 6, 100
TRAINED = 40_000
CLIENTS = tuple(range(2, 40, 5))
"""Of forty; by position and not by how much adaptation helps, so that all four corruptions occur."""
TARGET = Path(__file__).resolve().parents[1] / "service/acclimate_service/demo/data"
LICENCE = "Apache-2.0; trained on Fashion-MNIST, MIT, Zalando SE: see LICENSE.txt"


def main() -> None:
    """Write bundle and streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    data = parser.parse_args().data
    images, labels = read(data / "train-images-idx3-ubyte.gz")
    torch.manual_seed(0)
    network = trained(images[:TRAINED], labels[:TRAINED])
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        torch.save(network.state_dict(), work / "weights.pt")
        np.savez(work / "data.npz", images=images[TRAINED:], labels=labels[TRAINED:])
        publish(work)
        shutil.rmtree(TARGET / "bundles", ignore_errors=True)
        shutil.copytree(work / "store/fashion-tiny/1", TARGET / "bundles/fashion-tiny/1")
    save_streams(*read(data / "t10k-images-idx3-ubyte.gz"))


def read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 [N, 1, 28, 28] and labels [N] of an idx file."""
    batches = list(labelled_images(path, SPEC, CLASSES).batches(10_000))
    return np.concatenate([batch.images for batch in batches]), np.concatenate([batch.labels for batch in batches])


def trained(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> ShallowCNN:
    """The network; in every epoch half of the images have one of the corruptions that rates are learned from."""
    network = ShallowCNN(len(CLASSES), WIDTH)
    steps = EPOCHS * len(images) // BATCH
    optimiser = torch.optim.Adam(network.parameters(), weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.01, total_steps=steps)
    draw = torch.Generator().manual_seed(1)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=draw).split(BATCH):
            batch = torch.from_numpy(images[rows])
            families = FAMILIES_OF["teach"]
            family = families[int(torch.randint(len(families), (), generator=draw))]
            severity = SEVERITIES[int(torch.randint(len(SEVERITIES), (), generator=draw))]
            half = len(batch) // 2
            batch = torch.cat([batch[:half], corrupt(batch[half:], family, severity, draw)])
            loss = cross_entropy(network(SPEC.normalise(batch.numpy())), torch.from_numpy(labels[rows]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        print(f"epoch {epoch + 1}: {loss.item():.3f}", flush=True)
    return network


def publish(work: Path) -> None:
    """The bundle with all that is measured and learned, as a user would make it."""
    store, data = ["--store", str(work / "store")], ["--data", str(work / "data.npz")]
    run("models", "create", "fashion-tiny", "--version", "0.1", "--arch", "acclimate:shallow_cnn",
        "--arch-options", f'{{"width": {WIDTH}}}', "--weights", str(work / "weights.pt"),
        "--classes", ",".join(CLASSES), "--mean", str(SPEC.mean[0]),
        "--std", str(SPEC.std[0]), "--licence", LICENCE, *store)  # fmt: skip
    run("models", "measure", "fashion-tiny", "--anchors", "0", "--no-onnx", "--as", "0.2", *data, *store)
    run(
        "learn",
        "fashion-tiny",
        "--no-onnx",
        "--shift",
        "both",
        "--lr",
        "0.5",
        "--rounds",
        "60",
        "--as",
        "1",
        *data,
        *store,
    )


def run(*words: str) -> None:
    """A command of `acclimate`, which has to succeed."""
    if acclimate(list(words)):
        raise SystemExit(f"acclimate {' '.join(words)} failed")


def save_streams(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """What some of forty clients send: two major classes, and a corruption that nothing was trained on."""
    clients = simulate(Pool(images, labels), Population(shift="both", seed=1), "judge")
    chosen = [clients[number] for number in CLIENTS]
    kinds = [client.shift.partition(" + ")[0].split() for client in chosen]
    np.savez_compressed(
        TARGET / "streams.npz",
        client_ids=np.array([f"fashion-{number:02d}" for number in CLIENTS]),
        images=np.stack([client.images for client in chosen]),
        labels=np.stack([client.labels for client in chosen]),
        corruption=np.array([family for family, _ in kinds]),
        severity=np.array([int(severity) for _, severity in kinds]),
    )


if __name__ == "__main__":
    main()
