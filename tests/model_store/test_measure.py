"""`acclimate models measure`: from labelled images to a bundle that has what adapters need, or the reason why not."""

import argparse
import gzip
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from acclimate_adapters import create, missing
from acclimate_adapters.balanced.moments import source_moments
from acclimate_store import Catalogue, MeasureError, load_streams
from acclimate_store.cli import add_parser
from acclimate_store.files import GRAPHS
from acclimate_store.plausibility import sign_test

Acclimate = Callable[..., int]
Arrays = Mapping[str, NDArray[Any]]
SHIPPED = Path(__file__).parents[2] / "model_store"
pytestmark = pytest.mark.integration
COLOURS = """
from torch import nn

class Colours(nn.Module):
    '''Says whether an image is red, green, or neither.'''
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.bn(self.conv(x)).relu().mean((2, 3)))
"""


@pytest.fixture
def acclimate(tmp_path: Path) -> Acclimate:
    """The command on a store that holds the shipped model as `fashion-cnn/1`."""
    (tmp_path / "store/fashion-cnn").mkdir(parents=True)
    (tmp_path / "store/fashion-cnn/1").symlink_to(SHIPPED / "bundles/fashion-cnn/1")
    parser = argparse.ArgumentParser(prog="acclimate")
    add_parser(parser.add_subparsers(required=True), default_store=tmp_path / "store")

    def run(*words: str | Path) -> int:
        arguments = parser.parse_args(["models", *map(str, words)])
        code: int = arguments.run(arguments)
        return code

    return run


@pytest.fixture(scope="module")
def fashion() -> Arrays:
    streams = load_streams(SHIPPED / "samples/fashion-hybrid/streams.npz")
    images = np.concatenate([stream.images[:60] for stream in streams])
    return {"images": images, "labels": np.concatenate([stream.labels[:60] for stream in streams])}


@pytest.fixture
def data(tmp_path: Path, fashion: Arrays) -> Callable[..., Path]:
    """A file of labelled images with some arrays changed, or left out by None."""

    def save(**changes: Any) -> Path:
        path = tmp_path / "labelled.npz"
        np.savez_compressed(path, **{k: v for k, v in {**fashion, **changes}.items() if v is not None})
        return path

    return save


def test_all_that_adapters_need_is_measured_in_one_pass(
    acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays, tmp_path: Path, capsys: Any
) -> None:
    assert acclimate("measure", "fashion-cnn", "--data", data(), "--anchors", "3", "--no-onnx") == 0
    out = capsys.readouterr().out
    old, new = (Catalogue(tmp_path / "store").load("fashion-cnn", version) for version in ("1", "2"))
    x, labels = old.prepare(fashion["images"]), torch.from_numpy(fashion["labels"])
    frozen, source = old.model.adapted(x, {}), new.model.source
    k, one_hot = 10, nn.functional.one_hot(labels, 10).double()
    rows = one_hot.sum(0)
    torch.testing.assert_close(source.prior, (rows / rows.sum()).float())
    for mode, answers in (("soft", frozen.logits.double().softmax(1)),
                          ("hard", nn.functional.one_hot(frozen.logits.argmax(1), k).double())):  # fmt: skip
        torch.testing.assert_close(source.confusion_matrix(mode), (answers.T @ one_hot / rows).float())
    by_class = [frozen.features[labels == c].double().mean(0) for c in range(k)]
    torch.testing.assert_close(source.prototypes, torch.stack(by_class).float())
    torch.testing.assert_close(source.descriptor, frozen.features.double().mean(0).float())
    expected = source_moments(Catalogue(tmp_path / "store").load("fashion-cnn", "2").model, [(x, labels)])
    assert source.moments.keys() == expected.keys()
    for name, moment in expected.items():
        torch.testing.assert_close(source.moments[name], moment, rtol=1e-5, atol=1e-6)
    assert source.rates == old.model.source.rates
    accuracy = float((frozen.logits.argmax(1) == labels).double().mean())
    assert f"frozen accuracy  {100 * accuracy:.2f} % of 480 images" in out
    measured = new.manifest.measured
    assert measured is not None
    assert measured.rows == tuple(int(count) for count in rows)
    assert measured.accuracy == pytest.approx(accuracy)
    assert measured.mean[0] == pytest.approx(fashion["images"].mean() / 255, abs=1e-5)
    assert measured.std[0] == pytest.approx(fashion["images"].std() / 255, abs=1e-5)
    for name in ("balanced", "bbse", "fedthe", "fed_ade", "fedcal"):
        assert not missing(create(name), new.model)


def test_anchors_are_images_of_each_class_drawn_from_the_data(
    acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays, tmp_path: Path
) -> None:
    acclimate("measure", "fashion-cnn", "--data", data(), "--anchors", "3", "--no-onnx")
    bundle = Catalogue(tmp_path / "store").load("fashion-cnn")
    anchors = bundle.model.source.anchors
    assert anchors is not None
    assert torch.bincount(anchors.labels).tolist() == [3] * 10
    there = {row.numpy().tobytes() for row in bundle.prepare(fashion["images"])}
    assert {row.numpy().tobytes() for row in anchors.inputs} <= there
    acclimate("measure", "fashion-cnn", "--data", data(), "--anchors", "0", "--no-onnx")
    assert Catalogue(tmp_path / "store").load("fashion-cnn").model.source.anchors is None


def test_weights_are_shared_and_other_files_kept_but_for_graphs_of_the_model_before(
    acclimate: Acclimate, data: Callable[..., Path], tmp_path: Path
) -> None:
    for version in ("2", "2-again"):
        acclimate("measure", "fashion-cnn", "--data", data(), "--as", version, "--no-onnx")
    store = tmp_path / "store/fashion-cnn"
    assert (store / "2/model.safetensors").samefile(store / "2-again/model.safetensors")
    assert (store / "2/LICENSE.txt").read_bytes() == (store / "1/LICENSE.txt").read_bytes()
    assert list(store.glob("1/*.onnx"))
    assert not list(store.glob("2/*.onnx"))
    manifest = Catalogue(tmp_path / "store").manifest("fashion-cnn", "2")
    assert manifest.provenance.endswith("Measured on 480 labelled images of labelled.npz.")


def test_a_uniform_prior_is_for_networks_trained_with_balanced_classes(
    acclimate: Acclimate, data: Callable[..., Path], tmp_path: Path
) -> None:
    acclimate("measure", "fashion-cnn", "--data", data(), "--prior", "uniform", "--no-onnx")
    torch.testing.assert_close(
        Catalogue(tmp_path / "store").load("fashion-cnn").model.source.prior, torch.full((10,), 0.1)
    )


def as_folder(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    for number, (image, label) in enumerate(zip(fashion["images"], fashion["labels"], strict=True)):
        folder = path / classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(folder / f"{number:04d}.png")
    return path


def as_idx(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    path.mkdir()
    images, labels = fashion["images"][:, 0], fashion["labels"].astype(np.uint8)
    with gzip.open(path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">4B3I", 0, 0, 8, 3, *images.shape) + images.tobytes())
    with gzip.open(path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">4BI", 0, 0, 8, 1, len(labels)) + labels.tobytes())
    return path


def as_table(fashion: Arrays, classes: tuple[str, ...]) -> Any:
    """As Hugging Face's `datasets` has it in memory."""
    import io

    pa = pytest.importorskip("pyarrow")
    names = sorted(classes)  # another order than the model's
    cells = []
    for image in fashion["images"]:
        Image.fromarray(image[0]).save(buffer := io.BytesIO(), "PNG")
        cells.append({"bytes": buffer.getvalue(), "path": None})
    table = pa.table({"image": cells, "label": [names.index(classes[label]) for label in fashion["labels"]]})
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def as_parquet(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    table = as_table(fashion, classes)
    from pyarrow import parquet

    path.mkdir()
    parquet.write_table(table, path / "train.parquet")
    return path


def as_saved_to_disk(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    table = as_table(fashion, classes)
    import pyarrow as pa

    path.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        half = table.slice(number * (len(table) // 2), None if number else len(table) // 2)
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(half, max_chunksize=100)
    (path / "cache-1.arrow").write_bytes(b"not a part of it")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def as_channels_last(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    np.savez(path.with_suffix(".npz"), images=fashion["images"].transpose(0, 2, 3, 1), labels=fashion["labels"])
    return path.with_suffix(".npz")


def as_floats(fashion: Arrays, path: Path, classes: tuple[str, ...]) -> Path:
    floats = fashion["images"][:, 0].astype(np.float32) / np.float32(255)
    np.savez(path.with_suffix(".npz"), images=floats, labels=fashion["labels"].astype(np.int32))
    return path.with_suffix(".npz")


@pytest.mark.parametrize("write", [as_folder, as_idx, as_parquet, as_saved_to_disk, as_channels_last, as_floats])
def test_every_kind_of_data_gives_the_same(
    write: Callable[..., Path], acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays, tmp_path: Path
) -> None:
    catalogue = Catalogue(tmp_path / "store")
    # names of classes that a folder can have
    parts = [name.replace("/", "-") for name in catalogue.manifest("fashion-cnn").classes]
    made = renamed(catalogue, tuple(parts))
    assert acclimate("measure", "fashion-cnn", "--data", data(), "--no-onnx") == 0
    assert acclimate("measure", made, "--data", write(fashion, tmp_path / "data", tuple(parts)), "--no-onnx") == 0
    npz, other = (catalogue.load(name).model.source for name in ("fashion-cnn", made))
    for name in ("prior", "prototypes", "descriptor"):
        torch.testing.assert_close(getattr(other, name), getattr(npz, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other.confusion_matrix("soft"), npz.confusion_matrix("soft"), rtol=1e-5, atol=1e-6)


def test_of_several_splits_one_is_to_be_named(acclimate: Acclimate, tmp_path: Path, capsys: Any) -> None:
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert acclimate("measure", "fashion-cnn", "--data", tmp_path / "saved") == 2
    assert f"name one of them: {tmp_path}/saved/test, {tmp_path}/saved/train" in capsys.readouterr().err
    assert acclimate("measure", "fashion-cnn", "--data", tmp_path / "saved/test") == 2
    assert "state.json is not that of a saved data set: KeyError('_data_files')" in capsys.readouterr().err
    (tmp_path / "saved/test/state.json").write_text('{"_data_files": []}')
    assert acclimate("measure", "fashion-cnn", "--data", tmp_path / "saved/test") == 2
    assert "is a saved data set without rows" in capsys.readouterr().err


def renamed(catalogue: Catalogue, classes: tuple[str, ...], **changes: Any) -> str:
    """The shipped model under another name, with other class names; its name."""
    from acclimate_store.bundle import write_files
    from acclimate_store.files import GRAPHS

    old = catalogue.manifest("fashion-cnn", "1")
    folder = catalogue.root / "fashion-cnn/1"
    told = {"name": "other", "classes": classes, "metrics": {}, **changes}
    files: dict[str, bytes | Path] = {file: folder / file for file in old.files if file not in GRAPHS}
    write_files(catalogue.root, type(old).from_json(old.model_copy(update=told).to_json()), files)
    return "other"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {"labels": None}, "array labels is missing"),
        (lambda a: {"images": None}, "array images is missing"),
        (lambda a: {"images": a["images"][..., :20]}, r"the model takes images \[N, 1, 28, 28\], these are"),
        (lambda a: {"images": a["images"].astype(np.float64)}, "uint8 .* or float32 .*, not float64"),
        (lambda a: {"images": np.asfortranarray(a["images"])}, "Fortran order"),
        (lambda a: {"labels": a["labels"].astype(float)}, "labels are integers, not float64"),
        (lambda a: {"labels": a["labels"][1:]}, "one label per image"),
        (lambda a: {"images": a["images"][:0], "labels": a["labels"][:0]}, "at least one image"),
        (lambda a: {"labels": a["labels"] + 1}, "numbers from 0 to 9, these run from 1 to 10"),
        (lambda a: {"labels": np.where(a["labels"] == 2, 3, a["labels"])}, "holds no image of Pullover"),
        (lambda a: {"images": a["images"].astype(np.float32) * np.float32(np.nan)}, "holds NaN or infinite"),
        (lambda a: {"images": a["images"].astype(np.float32)}, "floats up to 255; floats are 0..1: divide by 255"),
        (lambda a: {"images": a["images"] // 255}, "uint8 without a pixel above 1"),
        (lambda a: {"images": (a["images"] / 255 - 0.286).astype(np.float32)}, "that are not normalised"),
        (lambda a: {"images": 255 - a["images"]}, "Probable cause: the images are inverted"),
        (lambda a: {"images": a["images"].swapaxes(2, 3).copy()}, "Probable cause: height and width are exchanged"),
        (lambda a: {"labels": 9 - a["labels"]}, "Probable cause: the classes are permuted: .* Ankle boot"),
        (lambda a: {"labels": np.random.default_rng(0).permutation(a["labels"])}, "frequent class would be as good"),
    ],
)  # fmt: skip
def test_data_that_does_not_do_is_refused_with_the_reason_and_nothing_is_published(
    change: Any,
    reason: str,
    acclimate: Acclimate,
    data: Callable[..., Path],
    fashion: Arrays,
    tmp_path: Path,
    capsys: Any,
) -> None:
    assert acclimate("measure", "fashion-cnn", "--data", data(**change(fashion))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    with pytest.raises(MeasureError, match=reason):
        raise MeasureError(captured.err)
    assert [path.name for path in (tmp_path / "store/fashion-cnn").iterdir()] == ["1"]


def test_what_is_not_plausible_is_published_by_force(
    acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays
) -> None:
    words = ("measure", "fashion-cnn", "--data", data(images=255 - fashion["images"]), "--no-onnx")
    assert acclimate(*words) == 2
    assert acclimate(*words, "--force") == 0


@pytest.mark.parametrize(
    ("mean", "std", "cause"),
    [
        ((0.0,), (1.0,), "the network was probably trained with the mean and std of these images"),
        ((0.286,), (0.353 / 255,), "the network was probably trained with"),
        ((-1.5,), (0.353,), "the network was probably trained with"),
    ],
)
def test_a_wrong_normalisation_is_noticed(
    mean: tuple[float, ...], std: tuple[float, ...], cause: str,
    acclimate: Acclimate, data: Callable[..., Path], tmp_path: Path, capsys: Any,
) -> None:  # fmt: skip
    catalogue = Catalogue(tmp_path / "store")
    spec = catalogue.manifest("fashion-cnn").input.model_copy(update={"mean": mean, "std": std})
    name = renamed(catalogue, catalogue.manifest("fashion-cnn").classes, input=spec)
    assert acclimate("measure", name, "--data", data()) == 2
    assert cause in capsys.readouterr().err


@pytest.fixture
def colours(acclimate: Acclimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Images for a small network of one's own, which is in the store as `colours/1`."""
    monkeypatch.chdir(tmp_path)
    Path("colours.py").write_text(COLOURS)
    space: dict[str, Any] = {}
    exec(COLOURS, space)
    net = space["Colours"]()
    net.conv.weight.data = torch.eye(3).view(3, 3, 1, 1)
    net.head.weight.data = 9 * torch.diag(torch.tensor([1.0, 1, 0]))
    net.head.bias.data = torch.tensor([0.0, 0, 3.6])
    torch.save(net.state_dict(), "w.pt")
    assert acclimate("create", "colours", "--arch", "colours:Colours", "--weights", "w.pt",
                     "--classes", "red,green,grey", "--size", "8", "--mean", "0", "--std", "1") == 0  # fmt: skip
    draw = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = draw.integers(0, 120, (90, 3, 8, 8), dtype=np.uint8)
    images[np.arange(90) % 3 == 0, 0] += 100
    images[np.arange(90) % 3 == 1, 1] += 100
    return {"images": images, "labels": labels}


def test_swapped_channels_are_noticed(acclimate: Acclimate, colours: Arrays, capsys: Any) -> None:
    trust = ("--allow-import", "colours:Colours", "--no-onnx")
    np.savez("bgr.npz", images=colours["images"][:, ::-1], labels=colours["labels"])
    assert acclimate("measure", "colours", "--data", "bgr.npz", *trust) == 2
    assert "Probable cause: the channels are swapped, RGB and BGR" in capsys.readouterr().err
    np.savez("rgb.npz", **colours)
    assert acclimate("measure", "colours", "--data", "rgb.npz", *trust) == 0


@pytest.mark.integration
def test_graphs_of_the_measured_model_come_along(acclimate: Acclimate, colours: Arrays, tmp_path: Path) -> None:
    np.savez("rgb.npz", **colours)
    assert acclimate("measure", "colours", "--data", "rgb.npz", "--allow-import", "colours:Colours") == 0
    assert {path.name for path in (tmp_path / "store/colours").glob("2/*.onnx")} == {*GRAPHS}
    catalogue = Catalogue(tmp_path / "store", ("colours:Colours",))
    assert catalogue.load("colours", "2", runtime="auto").runtime.startswith("onnxruntime")


def test_an_accuracy_that_was_promised_is_compared(
    acclimate: Acclimate, data: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    catalogue = Catalogue(tmp_path / "store")
    name = renamed(catalogue, catalogue.manifest("fashion-cnn").classes, metrics={"accuracy": 0.97})
    assert acclimate("measure", name, "--data", data()) == 2
    assert "the bundle says 97.0 %. Are the images of the training side" in capsys.readouterr().err


def test_few_images_of_a_class_are_said(
    acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays, capsys: Any
) -> None:
    kept = np.flatnonzero((fashion["labels"] != 0) | (np.cumsum(fashion["labels"] == 0) <= 4))
    few = data(images=fashion["images"][kept], labels=fashion["labels"][kept])
    assert acclimate("measure", "fashion-cnn", "--data", few, "--no-onnx") == 0
    assert "few images (10 or more are wanted) of T-shirt/top: bbse" in capsys.readouterr().out


def test_a_folder_of_other_classes_is_refused(
    acclimate: Acclimate, fashion: Arrays, tmp_path: Path, capsys: Any
) -> None:
    folder = as_folder(fashion, tmp_path / "train", tuple(f"class {k}" for k in range(10)))
    assert acclimate("measure", "fashion-cnn", "--data", folder) == 2
    assert (
        "has folders class 0, class 1, class 2, class 3, class 4, which are no classes of the model"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [None, b"", b"no archive at all"])
def test_a_file_that_cannot_be_read_is_refused(
    content: bytes | None, acclimate: Acclimate, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "data.npz"
    if content is not None:
        path.write_bytes(content)
    assert acclimate("measure", "fashion-cnn", "--data", path) == 2
    assert "cannot be read as an .npz file without pickle" in capsys.readouterr().err


def test_a_version_that_exists_is_refused_before_anything_is_measured(
    acclimate: Acclimate, data: Callable[..., Path], fashion: Arrays, capsys: Any
) -> None:
    wrong = data(images=fashion["images"].astype(np.float32))
    assert acclimate("measure", "fashion-cnn", "--data", wrong, "--as", "1") == 2
    assert "fashion-cnn/1 is published already" in capsys.readouterr().err


def test_the_sign_test_is_the_upper_tail_of_a_fair_coin() -> None:
    assert sign_test(3, 1) == pytest.approx(5 / 16)
    assert sign_test(0, 0) == 1
    assert sign_test(20, 0) == pytest.approx(2**-20)
