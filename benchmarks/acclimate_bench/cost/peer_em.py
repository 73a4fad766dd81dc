"""QuaPy's EMQ, another implementation of the EM that `em` and `fedcal` estimate a prior with."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acclimate_bench.cost.networks import Network


def quapy_em(source_prior: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """The function from posteriors [B, K] under the source prior [K] to the target prior [K]; takes 12 steps at least.

    Raises:
        ImportError: QuaPy is not installed.
    """
    from quapy.method.aggregative import EMQ  # type: ignore[import-untyped]

    def estimate(posteriors: NDArray[Any]) -> NDArray[Any]:
        prior, _ = EMQ.EM(source_prior, posteriors)
        return np.asarray(prior)

    return estimate


def quapy_step(network: Network) -> Callable[[], object]:
    """A frozen pass and EMQ on its posteriors; raises ImportError as `quapy_em`."""
    model = network.model
    estimate = quapy_em(model.source.prior.double().numpy(force=True))
    return lambda: estimate(model.frozen(network.x).logits.double().softmax(dim=-1).numpy(force=True))
