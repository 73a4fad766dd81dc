"""What a step costs on this machine, known before it is taken, and which ones are refused for it.

An adapter says how many passes of the network its step takes; what a pass takes is measured once, at the start.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters import Adapter, ConfigurationError, FrozenModel
from acclimate_adapters.adapter import parts_of, step_cost
from acclimate_adapters.cost import Cost, Runs
from acclimate_adapters.functional import entropy
from acclimate_adapters.labels import lesson_cost
from acclimate_adapters.methods.priors import log_posteriors, maximise_likelihood, source_prior
from acclimate_adapters.network.gradient import gradient
from acclimate_service.compute.adapters import Configurations
from acclimate_service.errors import Problem
from acclimate_store import Bundle

_KEPT: Final = 1024
"""Configurations, each with a number of rows, of which it is remembered what they cost."""
_FEW, _SOME, _MANY = 1, 4, 128
"""Rows that are measured: passes with a few and with some, all else with a few and with many."""
_ROUNDS: Final = 5
_WORTH: Final = 0.9
"""Share of the cost that remains without a hyper-parameter that is worth to be named."""
_SWEEPS: Final = 16
"""Sweeps over posteriors that are measured together, since one is too short."""
_MOST_ROWS: Final = 2**16
"""Of a batch, beyond which nobody is told how many are accepted."""


class Price(NamedTuple):
    """Seconds for each call of something, and for each row in it."""

    call: float
    row: float

    def seconds(self, runs: Runs) -> float:
        """What so many runs take."""
        return runs.calls * self.call + runs.rows * self.row


class Prices(NamedTuple):
    """What the parts of a `Cost` take."""

    forward: Price
    gradient: Price
    head: Price
    posterior: Price

    def seconds(self, cost: Cost) -> float:
        """About how long something takes."""
        return sum(price.seconds(runs) for price, runs in zip(self, cost, strict=True))

    @classmethod
    def measured(cls, bundle: Bundle) -> "Prices":
        """Of a model with as many threads as torch has in the calling one. It takes some passes of few rows."""
        model, shape = bundle.model, bundle.manifest.input.shape
        generator = torch.Generator().manual_seed(0)

        def images(rows: int) -> Tensor:
            return model.batch(torch.randn(rows, *shape, generator=generator))

        def features(rows: int) -> Tensor:
            return torch.randn(rows, model.feature_size, generator=generator).to(model.device, model.dtype)

        def log_p(rows: int) -> Tensor:
            return log_posteriors(torch.randn(rows, model.classes, generator=generator))

        sweep = _price(partial(_sweep, model), log_p, _MANY)
        return cls(
            forward=_price(lambda x: model.frozen(x).logits.sum().item(), images, _SOME),
            gradient=_price(partial(_descend, model), images, _SOME),
            head=_price(partial(_step_of_head, model), features, _MANY),
            posterior=Price(sweep.call / _SWEEPS, sweep.row / _SWEEPS),
        )


class StepBudget:
    """Refuses steps that would take the device for too long, and adapters that the operator does not offer.

    Args:
        model: that all clients share.
        configurations: of the clients.
        prices: of the model.
        most_s: seconds that a step may take by its estimate.
        allowed: adapters that clients may have, each part of a chain or portfolio; None stands for all.

    Attributes:
        refusal_of_step: code and detail of the problem with a step of a configuration on so many images; None: it is
            accepted.
    """

    def __init__(
        self,
        model: FrozenModel,
        configurations: Configurations,
        prices: Prices,
        most_s: float,
        allowed: Collection[str] | None = None,
    ) -> None:
        self._model = model
        self._configurations = configurations
        self._prices = prices
        self._most_s = most_s
        self._allowed = allowed
        self.seconds = lru_cache(_KEPT)(self._estimate)
        self.refusal_of_step = lru_cache(_KEPT)(partial(self._refusal, step_cost, "a step on"))
        self._refusal_of_lesson = lru_cache(_KEPT)(partial(self._refusal, lesson_cost, "learning from"))

    def require(self, configuration: str, rows: int = 1) -> None:
        """Refuse a step on a batch of so many images.

        A configuration that nobody knows is let pass: whoever uses it is told so.

        Raises:
            Problem: `step_too_costly`, or `adapter_not_allowed`.
        """
        refusal = self.refusal_of_step(configuration, rows)
        if refusal is not None:
            raise Problem(*refusal)

    def require_lesson(self, configuration: str, rows: int) -> None:
        """Refuse an enrolment with so many labelled images, or to take them in; as `require`."""
        refusal = self._refusal_of_lesson(configuration, rows)
        if refusal is not None:
            raise Problem(*refusal)

    def _estimate(self, configuration: str, rows: int) -> float:
        """About how long a step on so many images takes; 0 for a configuration that nobody knows."""
        try:
            return self._seconds(step_cost, self._configurations.adapter(configuration), rows)
        except ConfigurationError:
            return 0.0

    def _refusal(
        self, cost: Callable[[Adapter, FrozenModel, int], Cost], what: str, configuration: str, rows: int
    ) -> tuple[str, str] | None:
        """Code and detail of what is wrong."""
        try:
            adapter = self._configurations.adapter(configuration)
            seconds = partial(self._seconds, cost, adapter)
            taken = seconds(rows)
        except ConfigurationError:
            return None
        forbidden = [] if self._allowed is None else sorted(parts_of(adapter) - set(self._allowed))
        if forbidden:
            detail = f"{', '.join(forbidden)} is not offered here (ACCLIMATE_ADAPTERS); GET /adapters lists what is"
            return "adapter_not_allowed", detail
        if taken <= self._most_s:
            return None
        most = bisect_right(range(1, _MOST_ROWS), self._most_s, key=seconds)
        ways = [f"send at most {most} images at once"] if most else []
        less = self._costly(cost, adapter)
        ways += [f"configure the client with less of {', '.join(less)}"] if less else []
        detail = (
            f"{what} {rows} image{'s' * (rows > 1)} would take about {1000 * taken:,.0f} ms with adapter "
            f"{adapter.name!r} as it is configured, and {1000 * self._most_s:,.0f} ms are accepted "
            f"(ACCLIMATE_MAX_STEP_MS); {', or '.join(ways) or 'use another adapter'}"
        )
        return "step_too_costly", detail

    def _seconds(self, cost: Callable[[Adapter, FrozenModel, int], Cost], adapter: Adapter, rows: int) -> float:
        return self._prices.seconds(cost(adapter, self._model, rows))

    def _costly(self, cost: Callable[[Adapter, FrozenModel, int], Cost], adapter: Any) -> list[str]:
        """Hyper-parameters of which less would cost less."""
        now, found = self._seconds(cost, adapter, 1), []
        for each in fields(adapter):
            if each.metadata.get("type") == "integer" and getattr(adapter, each.name) > each.metadata["minimum"]:
                least = replace(adapter, **{each.name: each.metadata["minimum"]})
                if self._seconds(cost, least, 1) < _WORTH * now:
                    found.append(each.name)
            elif not each.metadata:  # a part of a chain
                found += self._costly(cost, getattr(adapter, each.name))
        return found


def _price(work: Callable[[Tensor], object], rows: Callable[[int], Tensor], many: int) -> Price:
    """What work on a few rows takes and what on many: the difference is that of the rows."""
    few, more = (_least(work, rows(number)) for number in (_FEW, many))
    row = max(0.0, more - few) / (many - _FEW)
    return Price(max(0.0, few - _FEW * row), row)


def _least(work: Callable[[Tensor], object], x: Tensor) -> float:
    """Least time of some rounds, after one in which torch does what it does only once."""
    times = []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        work(x)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _descend(model: FrozenModel, x: Tensor) -> float:
    """Forward, backward, and all parameters changed."""
    weights = {name: model.tensor(name) for name in model.parameters}
    slopes, answer = gradient(model, x, weights, lambda answer: entropy(answer.logits).mean())
    for name, weight in weights.items():
        torch.sub(weight, slopes[name], alpha=1e-3)
    return answer.logits.sum().item()


def _step_of_head(model: FrozenModel, features: Tensor) -> float:
    """A step of gradient descent of a linear classifier on given features."""
    weight = features.new_zeros(model.classes, model.feature_size)
    slope = F.linear(features, weight).softmax(-1) / len(features)
    return weight.addmm_(slope.T, features, alpha=-1e-3).sum().item()


def _sweep(model: FrozenModel, log_p: Tensor) -> object:
    return maximise_likelihood(log_p, source_prior(model, log_p), _SWEEPS)
