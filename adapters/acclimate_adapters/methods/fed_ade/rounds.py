"""The federated rounds of Fed-ADE (Algorithm 1): what clients and server compute between two batches.

Whoever runs a round does, with the clients that take part:

    shared = initial_shared(model)                                            before the first round of all
    updates = [local_update(adapter, model, state, shared, r) for each state]  on the clients; r = 0, 1, ... R - 1
    shared = aggregate(shared, updates)                                       on the server; `Update.shared` and
                                                                              `Update.samples` are what it receives
    states = [finish(adapter, model, u.state, shared, r) for each update]     on the clients

Rounds follow `FedAde.step`, which measured the batch (eta, weights, size) and counted it; a round changes layers only,
so a state's step is what it was. Clients that sit a round out keep their layers, and get the shared ones when they
take part again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import ConfigurationError, MissingSource, NumericalError
from acclimate_adapters.functional import at_least_float32, keyed_generator
from acclimate_adapters.methods.fed_ade.client import PERSONAL, SHARED, FedAde, global_layers, shared_modules
from acclimate_adapters.methods.fed_ade.risk import anchor_importance, anchors_of, fit_head, minibatches
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.source import Anchors
from acclimate_adapters.state import State


@dataclass(frozen=True, slots=True)
class Update:
    """What one client's Eq. 6 gave."""

    shared: Mapping[str, Tensor]  # psi_c by name: sent to the server
    samples: int  # N_c^t, size of the batch the client adapts to: sent to the server
    state: State  # with the personalised layers phi_c after Eq. 6: stays with the client


def initial_shared(model: FrozenModel) -> dict[str, Tensor]:
    """The shared layers of the global model, from which the first round starts."""
    return global_layers(model)


def local_update(adapter: FedAde, model: FrozenModel, state: State, shared: Mapping[str, Tensor], r: int) -> Update:
    """Descend the risk of the client's last batch with all layers (Eq. 6), from the shared layers of the server.

    Args:
        adapter: with `layers="all"`.
        model: the frozen model.
        state: of a client.
        shared: psi by name.
        r: round, which decides the minibatch order.

    Raises:
        ConfigurationError: the adapter takes no part in rounds, or the shared layers are not the model's.
        StateMismatch: the state was made for something else.
        NumericalError: the layers became non-finite.
    """
    head, _ = _client_layers(adapter, model, state)
    layers = {**_on_device(model, shared), **head}
    eta, order = float(state.tensors["eta"]), keyed_generator(adapter.seed, state.step, r, 0)
    with torch.inference_mode(False), torch.enable_grad():
        anchors, importance = _weighted_anchors(model, state)
        for rows in minibatches(len(importance), adapter.batch_size, adapter.epochs, order):
            batch = Anchors(anchors.inputs[rows], anchors.labels[rows])
            layers = _descend(model, layers, batch, importance[rows], eta)
    _require_finite(layers)
    personal = {PERSONAL + name: layers[name] for name in head}
    new = {name: layers[name] for name in shared}
    return Update(new, int(state.tensors["samples"]), replace(state, tensors={**state.tensors, **personal}))


def aggregate(shared: Mapping[str, Tensor], updates: Sequence[Update]) -> dict[str, Tensor]:
    """Mean of the clients' shared layers, weighted by their batch sizes (Eq. 7).

    Every tensor is averaged by its name, floating-point buffers like parameters.

    Args:
        shared: psi before the round; the answer when nobody has samples.
        updates: of the clients that took part.

    Raises:
        ConfigurationError: an update's names or shapes are not those of `shared`.
        NumericalError: an update is not finite.
    """
    shapes = {name: tensor.shape for name, tensor in shared.items()}
    for update in updates:
        if {name: tensor.shape for name, tensor in update.shared.items()} != shapes:
            raise ConfigurationError("an update's tensors differ in name or shape from the shared layers")
        _require_finite(update.shared)
    total = sum(update.samples for update in updates)
    if total == 0:
        return dict(shared)
    mean = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
    for update in updates:
        for name, tensor in update.shared.items():
            mean[name].add_(tensor.to(mean[name]), alpha=update.samples / total)
    return mean


def finish(adapter: FedAde, model: FrozenModel, state: State, shared: Mapping[str, Tensor], r: int) -> State:
    """Take the shared layers over and descend the risk with the personalised ones (Eq. 8).

    Arguments and errors as in `local_update`; the state is that of the client's update.
    """
    head, _ = _client_layers(adapter, model, state)
    layers = _on_device(model, shared)
    anchors, importance = _weighted_anchors(model, state)
    seen = anchors_of(model)._replace(features=model.features(anchors.inputs, layers))
    order = keyed_generator(adapter.seed, state.step, r, 1)
    rows = minibatches(len(importance), adapter.batch_size, adapter.personal_epochs, order)
    head = fit_head(head, seen, importance, float(state.tensors["eta"]), rows)
    _require_finite(head)
    new = {SHARED + name: tensor for name, tensor in layers.items()}
    return replace(state, tensors={**state.tensors, **new, **{PERSONAL + n: tensor for n, tensor in head.items()}})


def _descend(
    model: FrozenModel, layers: Mapping[str, Tensor], anchors: Anchors, importance: Tensor, eta: float
) -> dict[str, Tensor]:
    """One step of gradient descent of all layers on a minibatch's risk."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in layers.items()}
    logits = model.run(model.batch(anchors.inputs), leaves).logits
    losses = F.cross_entropy(logits, anchors.labels.to(logits.device), reduction="none")
    risk = (losses * importance.to(losses)).mean()
    slopes = torch.autograd.grad(risk, list(leaves.values()), materialize_grads=True)
    return {
        name: leaf.detach().sub_(slope, alpha=eta) for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }


def _client_layers(adapter: FedAde, model: FrozenModel, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if adapter.layers != "all":
        raise ConfigurationError(f'rounds need layers="all", not {adapter.layers!r}')
    return adapter.client_layers(model, state)


def _on_device(model: FrozenModel, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if {name: t.shape for name, t in shared.items()} != {n: model.tensor(n).shape for n in shared_modules(model)}:
        raise ConfigurationError("the shared layers differ in name or shape from the model's")
    return {name: at_least_float32(tensor.to(model.device)) for name, tensor in shared.items()}


def _weighted_anchors(model: FrozenModel, state: State) -> tuple[Anchors, Tensor]:
    anchors = model.source.anchors
    if anchors is None:
        raise MissingSource("Fed-ADE needs anchors, which the model does not carry")
    return anchors, anchor_importance(state.tensors["labels"], anchors.labels)


def _require_finite(layers: Mapping[str, Tensor]) -> None:
    broken = [name for name, tensor in layers.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise NumericalError(f"adaptation made these modules non-finite: {', '.join(broken)}")
