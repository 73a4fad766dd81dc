"""The networks whose speed is measured, and the batches they answer."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source
from acclimate_adapters.balanced.moments import source_moments
from acclimate_adapters.network.graphs import Graphs
from acclimate_bench.cost.inputs import BUNDLES
from acclimate_store import Catalogue, InputSpec, Manifest, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import load_weights
from acclimate_store.layout_choice import fastest

CLASSES = 10
ROWS = 20


@dataclass(frozen=True, slots=True)
class Network:
    """A network twice, plain and frozen, the batch that both answer, and the memory layout of the frozen one."""

    name: str
    net: nn.Module
    model: FrozenModel
    x: Tensor
    layout: str


def resnet18() -> nn.Module:
    """A ResNet-18 of random weights; its speed is that of a trained one."""
    torch.manual_seed(0)
    net: nn.Module = torchvision.models.resnet18(num_classes=CLASSES).eval()
    return net


def freeze(net: nn.Module) -> FrozenModel:
    """The network with a rate for every module, the most expensive case, and a source that serves all methods."""
    device = next(net.parameters()).device
    prior = torch.full((CLASSES,), 1 / CLASSES, device=device)
    bare = FrozenModel.from_module(net, classifier="fc", source=Source(prior=prior))
    rows = random_batch(3, 32, seed=3, rows=100).to(device)
    source = Source(
        prior=prior,
        rates=dict.fromkeys(bare.modules, 0.01),
        confusion=0.8 * torch.eye(CLASSES, device=device) + 0.2 / CLASSES,
        descriptor=bare.features(rows).mean(0),
        moments=source_moments(bare, [(rows, torch.arange(len(rows), device=device) % CLASSES)]),
    )
    return FrozenModel.from_module(net, classifier="fc", source=source)


def random_batch(channels: int, size: int, seed: int = 1, rows: int = ROWS) -> Tensor:
    """Images of noise [rows, channels, size, size]."""
    return torch.rand(rows, channels, size, size, generator=torch.Generator().manual_seed(seed))


def resnet(device: str) -> Network:
    """ResNet-18 on images of 32 x 32."""
    net = resnet18().to(device)
    model, layout = fastest(freeze(net), (3, 32, 32))
    return Network("ResNet-18", net, model, random_batch(3, 32).to(device), layout)


def fashion_cnn(device: str) -> Network:
    """The bundled model, with the rates it carries."""
    bundle = Catalogue(BUNDLES).load("fashion-cnn", "1", device)
    net = build(bundle.manifest.architecture, bundle.manifest.architecture_options)
    load_weights(net, BUNDLES / "fashion-cnn/1")
    model, layout = fastest(bundle.model, (1, 28, 28))
    return Network("fashion-cnn", net.eval().to(device), model, random_batch(1, 28).to(device), layout)


def frozen(network: Network, graphs: Graphs) -> FrozenModel:
    """The same network and source with other graphs."""
    return FrozenModel.from_module(
        network.net, classifier=network.model.classifier, source=network.model.source, graphs=graphs
    )


def write_resnet(root: Path) -> None:
    """Publish a ResNet-18 of random weights whose every module adapts, each at a random rate."""
    net = resnet18()
    modules = freeze(net).modules
    rates = dict(zip(modules, (0.01 * torch.rand(len(modules))).tolist(), strict=True))
    manifest = Manifest(
        schema_version=1,
        name="resnet18",
        version="1",
        architecture="torchvision:resnet18",
        architecture_options={"num_classes": CLASSES},
        classifier="fc",
        input=InputSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3),
        classes=tuple(f"class {k}" for k in range(CLASSES)),
        files={},
        metrics={},
        licence="CC0-1.0",
        provenance="random weights",
    )
    write_bundle(root, manifest, net, Source(prior=torch.full((CLASSES,), 1 / CLASSES), rates=rates))
