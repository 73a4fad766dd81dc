"""Networks of all kinds go the whole way: create, measure, a round of learning, and every adapter that applies.

Their weights are random, so that what is checked is not accuracy but that each step takes each network.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

from acclimate_adapters import ADAPTERS, create, missing
from acclimate_service.cli import main
from acclimate_store import Catalogue

CLASSES = 3
NUMBERS = ("--mean", "0.5", "--std", "0.25")


def vision_transformer() -> nn.Module:
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16, num_classes=CLASSES
    )


def of_torchvision(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, num_classes=CLASSES, **extra), ("--arch", f"torchvision:{name}")


def of_timm() -> tuple[nn.Module, tuple[str, ...]]:
    timm = pytest.importorskip("timm")
    return timm.create_model("test_resnet", num_classes=CLASSES), ("--arch", "timm:test_resnet")


def of_the_working_directory() -> tuple[nn.Module, tuple[str, ...]]:
    options = {
        "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16,
    }  # fmt: skip
    Path("own_vit.py").write_text("from torchvision.models import VisionTransformer as Net\n")
    return vision_transformer(), ("--arch", "own_vit:Net", "--arch-options", json.dumps(options))


def of_transformers() -> tuple[nn.Module, tuple[str, ...]]:
    transformers = pytest.importorskip("transformers")
    names = {number: f"class-{number}" for number in range(CLASSES)}
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], id2label=names)
    net = transformers.AutoModelForImageClassification.from_config(config)
    net.save_pretrained("hf")
    return net, ("--arch", "transformers:hf")


Made = Callable[[], tuple[nn.Module, tuple[str, ...]]]
QUICK: dict[str, tuple[Made, int]] = {
    "timm": (of_timm, 32),
    "transformers": (of_transformers, 32),
    "own vision transformer": (of_the_working_directory, 32),
}
SLOW = {"resnet18": 32, "densenet121": 32, "googlenet": 32, "inception_v3": 80, "mobilenet_v3_small": 32,
        "shufflenet_v2_x0_5": 32, "squeezenet1_1": 32, "convnext_tiny": 32}  # fmt: skip


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", "store")
    monkeypatch.delitem(sys.modules, "own_vit", raising=False)
    return ("--allow-import", "own_vit:Net", "--no-onnx")


def goes_the_whole_way(made: Made, size: int, trust: tuple[str, ...], capsys: Any) -> None:
    torch.manual_seed(0)
    net, arch = made()
    torch.save(net.state_dict(), "w.pt")
    told = () if "transformers" in arch[1] else ("--weights", "w.pt", "--classes", "class-0,class-1,class-2")
    assert main(["models", "create", "net", *arch, *told, "--size", str(size), *NUMBERS]) == 0
    draw = np.random.default_rng(0)
    labels = np.arange(60) % CLASSES
    images = draw.integers(0, 256, (60, 3, size, size), dtype=np.uint8)
    np.savez("data.npz", images=images, labels=labels, owners=np.arange(60) // 10)
    # random weights answer by chance, so nothing is plausible
    assert main(["models", "measure", "net", "--data", "data.npz", "--anchors", "2", "--force", *trust]) == 0
    small = ("--by", "owners", *trust)
    one_round = ("--rounds", "1", "--cohort", "1", "--lr", "0.001", "--tune", "fedthe")
    assert main(["learn", "net", "--data", "data.npz", *one_round, *small]) == 0
    bundle = Catalogue(Path("store"), allowed_imports=("own_vit:Net",)).load("net")
    candidates = sorted(ADAPTERS.keys() - {"none"})
    served = [name for name in candidates if not missing(create(name), bundle.model)]
    absent = set() if bundle.model.statistics else {"bn_adapt", "consensus"}
    if "squeezenet" in arch[1]:  # which normalises nothing, and ends in a convolution
        absent |= {"tent", "t3a", "fed_ade", "consensus"}
    assert set(served) == set(candidates) - absent
    assert main(["evaluate", "net", "--clients", "data.npz", "--adapters", ",".join(served), *small]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name:<18}" in out for name in served)
    assert "failed for" not in out


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.integration
@pytest.mark.parametrize("name", QUICK)
def test_small_networks_go_the_whole_way(name: str, trust: tuple[str, ...], capsys: Any) -> None:
    made, size = QUICK[name]
    goes_the_whole_way(made, size, trust, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_networks_of_torchvision_go_the_whole_way(name: str, trust: tuple[str, ...], capsys: Any) -> None:
    goes_the_whole_way(lambda: of_torchvision(name), SLOW[name], trust, capsys)
