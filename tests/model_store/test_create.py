"""`acclimate models create`, from files as training leaves them to a bundle that answers as the network does."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from acclimate_store import Catalogue
from acclimate_store.cli import add_parser
from acclimate_store.shallow_cnn import ShallowCNN

Acclimate = Callable[..., int]
NUMBERS = ("--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225")
OWN = """
from torch import nn

class Wide(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.unused = nn.Linear(width, num_classes)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))

class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 20 * 30, 4))

class Soft(Wide):
    def forward(self, x):
        return super().forward(x).softmax(-1)

class Pair(Wide):
    def forward(self, x):
        return super().forward(x), x

class Square(Wide):
    def forward(self, x):
        return super().forward(x).square().softmax(-1)

class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


@pytest.fixture
def acclimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Acclimate:
    """The command in an empty folder, which is to become a store too."""
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser(prog="acclimate")
    add_parser(parser.add_subparsers(required=True), default_store=Path("store"))

    def run(*words: str) -> int:
        arguments = parser.parse_args(["models", *words])
        code: int = arguments.run(arguments)
        return code

    return run


def names(count: int) -> str:
    return ",".join(f"class-{number}" for number in range(count))


def answers(key: str, x: torch.Tensor, *trusted: str) -> torch.Tensor:
    bundle = Catalogue(Path("store"), allowed_imports=trusted).load(key)
    return bundle.model.forward(bundle.prepare(x.numpy()), {})


QUICK = {"googlenet": 64, "mobilenet_v3_small": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64}
LARGE = {"resnet18": 64, "densenet121": 64, "inception_v3": 96, "efficientnet_b0": 64, "convnext_tiny": 64}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_networks_of_torchvision_answer_as_they_were_trained(
    name: str, acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    net = models.get_model(name, weights=None, num_classes=5, **extra).eval()
    torch.save(net.state_dict(), "w.pt")
    size = (QUICK | LARGE)[name]
    code = acclimate("create", "mine", "--arch", f"torchvision:{name}", "--weights", "w.pt", "--classes", names(5),
                     "--size", str(size), *NUMBERS)  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert out.startswith("mine/1: published in store/mine/1")
    assert f"input       3x{size}x{size}" in out
    assert "5 classes (class-0, class-1, class-2, class-3, ...)" in out
    assert ("heads that only training uses are left out" in out) == (name in ("googlenet", "inception_v3"))
    x = torch.rand(2, 3, size, size)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(-1, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(answers("mine", x), net((x - mean) / std), rtol=1e-4, atol=1e-4)


def test_a_vision_transformer_says_the_size_it_takes(acclimate: Acclimate, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    net = models.VisionTransformer(num_classes=3, **options)
    torch.save(net.state_dict(), "w.pt")
    Path("vit.py").write_text("from torchvision.models import VisionTransformer as Net\n")
    assert acclimate("create", "vit", "--arch", "vit:Net", "--weights", "w.pt", "--classes", "a,b,c",
                     "--arch-options", json.dumps(options), *NUMBERS) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "input       3x32x32" in out
    assert "classifier  heads.head: 16 features, 3 classes (a, b, c)" in out
    assert "BatchNorm   none\n" in out
    assert "not served  bn_adapt (no batch_norm), consensus (no batch_norm)\n" in out
    assert "to measure  --allow-import vit:Net, as for learn and evaluate\n" in out
    assert """to serve    ACCLIMATE_ALLOWED_IMPORTS='["vit:Net"]'""" in out


def test_timm_says_size_normalisation_and_resize_rule(acclimate: Acclimate, capsys: pytest.CaptureFixture[str]) -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("test_resnet.r160_in1k", num_classes=3).eval()
    torch.save({"state_dict": net.state_dict(), "epoch": 1}, "w.pt")
    code = acclimate("create", "t", "--arch", "timm:test_resnet.r160_in1k", "--weights", "w.pt", "--classes", "a,b,c")
    assert code == 0
    assert "the weights are in its 'state_dict'; not taken: epoch" in capsys.readouterr().out
    spec = Catalogue(Path("store")).manifest("t").input
    config = timm.data.resolve_model_data_config(net)
    assert (spec.shape, spec.mean, spec.std) == (config["input_size"], config["mean"], config["std"])
    assert spec.resize is not None
    assert spec.resize.interpolation == config["interpolation"]
    assert spec.resize.size == int(160 / config["crop_pct"])


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers_says_everything(acclimate: Acclimate, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], id2label={0: "ant", 1: "bee", 2: "cat"}
    )
    net = transformers.AutoModelForImageClassification.from_config(config).eval()
    net.save_pretrained("hf")
    processor = {
        "crop_pct": 0.875, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
        "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2], "size": {"shortest_edge": 56},
    }  # fmt: skip
    Path("hf/preprocessor_config.json").write_text(json.dumps(processor))
    assert acclimate("create", "hf", "--arch", "transformers:hf") == 0
    manifest = Catalogue(Path("store")).manifest("hf")
    assert manifest.classes == ("ant", "bee", "cat")
    assert manifest.input.mean == (0.5, 0.4, 0.3)
    assert manifest.input.resize is not None
    assert (manifest.input.resize.size, manifest.input.resize.crop) == (64, 56)
    x = torch.rand(2, 3, 56, 56)
    normalised = (x - torch.tensor([0.5, 0.4, 0.3]).view(-1, 1, 1)) / 0.2
    with torch.no_grad():
        torch.testing.assert_close(answers("hf", x), net(normalised).logits, rtol=1e-4, atol=1e-4)


def own(name: str, count: int = 4, **changes: Any) -> tuple[str, ...]:
    """Words that publish a network of `OWN`, whose weights are saved with it."""
    Path("own_nets.py").write_text(OWN)
    space: dict[str, Any] = {}
    exec(OWN, space)
    torch.save(space[name](**changes).state_dict(), "w.pt")
    return ("create", "own", "--arch", f"own_nets:{name}", "--weights", "w.pt", "--classes", names(count))


@pytest.fixture(autouse=True)
def _forget_own_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("own_nets", "vit"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_a_network_of_the_working_directory_of_any_input(
    acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    words = own("Wide", num_classes=4, width=6)
    code = acclimate(*words, "--arch-options", '{"width": 6}', "--size", "20x30", "--mean", "0.5", "--std", "0.25",
                     "--resize", "24x40", "--crop", "20x30")  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "classifier  head: 6 features, 4 classes" in out
    assert "image files: resized to 24x40, centre 20x30 (bilinear)" in out
    assert "BatchNorm   1 layers" in out
    manifest = Catalogue(Path("store")).manifest("own")
    assert manifest.architecture_options == {"width": 6, "num_classes": 4}
    assert manifest.input.shape == (3, 20, 30)
    assert manifest.input.mean == (0.5, 0.5, 0.5)
    assert answers("own", torch.rand(2, 3, 20, 30), "own_nets:Wide").shape == (2, 4)


def test_half_precision_of_data_parallel_is_recognised_and_said(
    acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.DataParallel(ShallowCNN(3)).half()
    torch.save(net.state_dict(), "w.pt")
    assert acclimate("create", "s", "--arch", "acclimate:shallow_cnn", "--weights", "w.pt", "--classes", "a,b,c",
                     "--mean", "0", "--std", "1") == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "weights     prefix 'module.' is removed from the names" in out
    assert "weights     float16 is converted to float32" in out
    assert "input       1x28x28, mean 0, std 1; image files must have this size" in out  # the only size it takes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"(?s)alone does not say; give.*--mean NUMBERS.*--std NUMBERS"),
        (("--mean", "0", "--std", "1"), "takes several sizes, such as 8 and 512; give the one it was trained with"),
        (("--mean", "0", "--std", "1", "--size", "2"), r"fails on a batch of shape \[2, 3, 2, 2\]"),
        (("--mean", "0,0", "--std", "1", "--size", "32"), r"mean needs one value per channel \(3\), not 2"),
        (("--mean", "0", "--std", "0", "--size", "32"), "greater than 0"),
        (("--mean", "x", "--std", "1", "--size", "32"), "--mean 'x' are no numbers"),
        (("--mean", "0", "--std", "1", "--size", "large"), "--size 'large' is no size"),
        (("--mean", "0", "--std", "1", "--size", "32", "--resize", "36"), "resize yields 36x36"),
        (("--mean", "0", "--std", "1", "--crop", "32"), "--crop is taken after --resize"),
        (("--mean", "0", "--std", "1", "--size", "32", "--classifier", "unused"), "not what its layer unused gives"),
        (("--mean", "0", "--std", "1", "--size", "32", "--classifier", "body"), "body is no linear layer of the"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch-options", "{"), "--arch-options is not JSON"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch-options", '{"deep": 1}'), "refuses architecture_opt"),
        (("--mean", "0", "--std", "1", "--size", "32", "--classes", "a,b,c"), "weights are of 4 classes, and 3 are na"),
        (("--mean", "0", "--std", "1", "--size", "32", "--classes", "a"), "no such file or folder"),
        (("--mean", "0", "--std", "1", "--size", "32", "--classes", "a,b,a,c"), "class names must be unique"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch", "resnet18"), "'resnet18' is no architecture"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch", "torchvision:resnet"), "not a classification model"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch", "timm:nothing"), "unknown to timm"),
        (("--mean", "0", "--std", "1", "--size", "32", "--arch", "transformers:absent"), "config.json cannot be read"),
        (("--mean", "0", "--std", "1", "--size", "32", "--weights", "absent.pt"), "there is no file absent.pt"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_or_done_is_said_and_nothing_is_published(
    words: tuple[str, ...], message: str, acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acclimate(*own("Wide", num_classes=4), *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    with pytest.raises(ValueError, match=message):
        raise ValueError(captured.err)
    assert not Path("store").exists()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("Soft", ("--size", "32"), "answers with the softmax of its layer head; leave that function out"),
        ("Pair", ("--size", "32"), "answers with a tuple; wrap it"),
        ("Square", ("--size", "32"), "answers with probabilities; leave the last softmax out"),
        ("Flat", ("--size", "20x30"), "no convolution that would tell its channels; give --size CxHxW"),
    ],
)
def test_networks_that_cannot_be_adapted_are_told_why(
    name: str, words: tuple[str, ...], message: str, acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"num_classes": 4} if name != "Flat" else {}
    assert acclimate(*own(name, **changes), *words, "--mean", "0", "--std", "1") == 2
    assert message in capsys.readouterr().err


def test_a_network_without_a_classifier_is_published_and_said_to_be_one(
    acclimate: Acclimate, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*own("Convolutional"), "--size", "32", "--mean", "0", "--std", "1")
    assert acclimate(*words) == 0
    out = capsys.readouterr().out
    assert "classifier  none, 4 classes (class-0, class-1, class-2, class-3)\n" in out
    assert "note        no linear layer gives the answer, and no 1x1 convolution a map whose mean it is\n" in out
    (line,) = [line for line in out.splitlines() if "not served" in line]
    assert all(f"{name} (no classifier)" in line for name in ("fedthe", "fedthe_plus", "shot", "surgical"))
    assert "t3a (no linear_classifier)" in line
    assert "em" not in line.split()
    assert answers("own", torch.rand(2, 3, 32, 32), "own_nets:Convolutional").shape == (2, 4)


def test_a_network_without_convolution_takes_the_channels_of_its_size(acclimate: Acclimate) -> None:
    assert acclimate(*own("Flat"), "--size", "3x20x30", "--mean", "0", "--std", "1") == 0


def test_class_names_come_from_a_file_or_a_folder(acclimate: Acclimate) -> None:
    Path("names.txt").write_text("ant\nbee\n\ncat \n")
    for name in ("cat", "ant", "bee"):
        Path("images", name).mkdir(parents=True)
    torch.save(ShallowCNN(3).state_dict(), "w.pt")
    for number, source in enumerate(("names.txt", "images")):
        acclimate("create", f"m{number}", "--arch", "acclimate:shallow_cnn", "--weights", "w.pt", "--classes", source,
                  "--mean", "0", "--std", "1")  # fmt: skip
        assert Catalogue(Path("store")).manifest(f"m{number}").classes == ("ant", "bee", "cat")


def test_a_name_that_is_taken_is_refused(acclimate: Acclimate, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*own("Wide", num_classes=4), "--size", "32", "--mean", "0", "--std", "1")
    assert acclimate(*words) == 0
    assert acclimate(*words) == 2
    assert "own/1 is published already and never changes; give another --version or NAME" in capsys.readouterr().err
    assert acclimate(*words, "--version", "2") == 0
    assert acclimate("create", "../own", *words[2:]) == 2
