"""The anchors of a source as the frozen model sees them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from acclimate_adapters import Anchors, ConfigurationError, FrozenModel


def test_anchor_features_are_those_of_the_frozen_model(
    make_model: Callable[..., FrozenModel], source_quantities: Mapping[str, Any]
) -> None:
    inputs, labels = source_quantities["anchors"]
    many = Anchors(inputs.repeat(3, 1, 1, 1), labels.repeat(3))  # more than one pass takes
    model = make_model(anchors=many)
    assert model.anchor_features is not None
    torch.testing.assert_close(model.anchor_features.features, model.frozen(many.inputs).features)
    assert torch.equal(model.anchor_features.labels, many.labels)
    assert make_model(anchors=None).anchor_features is None


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, 10])),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, -1])),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0.0, 1.0])),
        (torch.zeros(2, 3, 28, 28), torch.tensor([0, 1])),
        (torch.zeros(0, 1, 28, 28), torch.tensor([], dtype=torch.int64)),
    ],
    ids=["beyond", "negative", "floating", "channels", "none"],
)
def test_anchors_that_do_not_fit_the_network_are_refused(
    inputs: Tensor, labels: Tensor, make_model: Callable[..., FrozenModel]
) -> None:
    with pytest.raises(ConfigurationError, match=r"source\.anchors"):
        make_model(anchors=Anchors(inputs, labels))
