"""The labelled examples that FedTHE remembers of a client, by their features."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from acclimate_adapters.methods.fedcal import Ring


class Examples(NamedTuple):
    """The last labelled examples of a client, in two rings of one length."""

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
