"""How a client of FedTHE enrols: its personal head and local descriptor, from labelled examples that may be kept."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from acclimate_adapters.cost import Cost, forward_pass, head_step
from acclimate_adapters.errors import InputError, MissingSource
from acclimate_adapters.functional import at_least_float32, class_labels
from acclimate_adapters.methods.ring import Ring
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import Form, State, count

HEAD_EPOCHS, HEAD_BATCH, HEAD_LR, HEAD_WEIGHT_DECAY = 100, 32, 0.01, 5e-4  # the paper's 100 rounds of one epoch each


class Examples(NamedTuple):
    """The last labelled examples of a client, by their features, in two rings of one length."""

    features: Ring  # [most, d]
    labels: Ring  # [most]

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], most: int, width: int, like: Tensor) -> "Examples":
        """Those of a state's tensors, or none yet, on the device and in the precision of another tensor."""
        seen = tensors.get("examples_seen", torch.tensor(0))
        features = tensors.get("examples", torch.zeros(most, width)).to(like)
        labels = tensors.get("example_labels", torch.zeros(most, dtype=torch.int64)).to(like.device)
        return cls(Ring(features, seen), Ring(labels, seen))

    def with_more(self, features: Tensor, labels: Tensor) -> "Examples":
        """With more examples [N, d] and [N], the oldest ones left out where there is no room."""
        return Examples(self.features.push(features), self.labels.push(labels))

    def pack(self) -> dict[str, Tensor]:
        """The inverse of `unpack`."""
        return {
            "examples": self.features.buffer,
            "example_labels": self.labels.buffer,
            "examples_seen": self.features.seen,
        }


def enrol(model: FrozenModel, seed: int, enrolment: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an enrolled client's state, none without enrolment; arguments as `FedThe.init`."""
    global_descriptor(model)  # a missing one is an error now, not at the first batch
    match sorted(enrolment):
        case []:
            return {}
        case ["labels", "x"]:
            head, descriptor = personalise(model, enrolment["x"], enrolment["labels"], seed)
        case ["descriptor", "personal_head"]:
            head = _fitting(model, "personal_head", enrolment["personal_head"], (model.classes, model.feature_size))
            descriptor = _fitting(model, "descriptor", enrolment["descriptor"], (model.feature_size,))
        case given:
            raise InputError(f"enrol with x and labels or with personal_head and descriptor, not with {given}")
    return enrolled(head, descriptor)


def enrolled(personal_head: Tensor, descriptor: Tensor) -> dict[str, Tensor]:
    """The tensors of the state of a client that has just enrolled."""
    return {
        "personal_head": personal_head,  # [K, d]
        "descriptor": descriptor,  # [d], h^l
        "history": torch.zeros_like(descriptor),  # [d], h^history once there is a sample
        "samples": torch.zeros((), dtype=torch.int64),
    }


def enrolled_forms(model: FrozenModel, state: State, examples: int = 0) -> dict[str, Form]:
    """The forms of the tensors of a client that has enrolled, none before, as `Adapter.form`.

    Args:
        model: the frozen model.
        state: that of the client.
        examples: how many are remembered at most; those of a head that was trained elsewhere are not known.
    """
    if not state.tensors:
        return {}
    k, d = model.classes, model.feature_size
    dtypes = (torch.promote_types(model.dtype, torch.float32),)
    forms = {"personal_head": Form((k, d), dtypes), "descriptor": Form((d,), dtypes), "history": Form((d,), dtypes)}
    forms["samples"] = count()
    if examples and "examples_seen" in state.tensors:
        forms |= {"examples": Form((examples, d), dtypes), "example_labels": count(examples, high=k - 1)}
        forms["examples_seen"] = count()
    return forms


def personalise(model: FrozenModel, x: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Personal head [K, d] and local descriptor h^l [d] of labelled examples (Algorithm 1, section 4.2).

    Args:
        model: gives the features; the extractor stays frozen.
        x: [N, C, H, W], normalised.
        labels: [N], int64 in 0..K-1.
        seed: order of the examples.
    """
    features = at_least_float32(model.features(x))
    labels = class_labels(labels, len(features), model.classes)
    targets = one_hot(labels.to(features.device), model.classes).to(features.dtype)
    return train_head(features, targets, seed), features.mean(0)


def train_head(features: Tensor, targets: Tensor, seed: int) -> Tensor:
    """Weight [K, d] of a linear head without bias: SGD on the mean cross-entropy, from 0.

    Args:
        features: [N, d].
        targets: [N, K], one-hot.
        seed: order of the examples.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = features.new_zeros(targets.shape[1], features.shape[1])
    for _ in range(HEAD_EPOCHS):
        order = torch.randperm(len(features), generator=generator).to(features.device)
        for rows in torch.split(order, HEAD_BATCH):
            residual = torch.softmax(features[rows] @ weight.T, -1) - targets[rows]
            gradient = residual.T @ features[rows] / len(rows)
            weight = weight - HEAD_LR * (gradient + HEAD_WEIGHT_DECAY * weight)
    return weight


def enrolment_cost(rows: int) -> Cost:
    """What it takes to train a head on so many examples."""
    steps = math.ceil(rows / HEAD_BATCH)
    return forward_pass(rows).and_also(head_step(HEAD_BATCH).times(HEAD_EPOCHS * steps))


def global_descriptor(model: FrozenModel) -> Tensor:
    """h^g [d] of the source.

    Raises:
        MissingSource: the model carries none.
    """
    if model.source.descriptor is None:
        raise MissingSource("the ensemble of two heads needs descriptor, which the model does not carry")
    return model.source.descriptor


def _fitting(model: FrozenModel, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of an enrolled tensor in the model's precision, single at least."""
    if tensor.shape != shape or not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{name} must be finite and of shape {[*shape]}; its shape is {[*tensor.shape]}")
    return at_least_float32(tensor.to(model.device, model.dtype, copy=True))
