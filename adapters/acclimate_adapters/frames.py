"""Frames that tell nothing about a client: answered, but not folded into its state.

A covered camera sends black frames and a stuck one sends the same frame over and over, in one batch or one in each,
which whoever calls has to say. Whatever a method learns from them moves the client's state away from the pictures that
follow. Nothing has to be known of the method to see it: such frames are left out of the batch that its step is given.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from acclimate_adapters.adapter import Adapter, Step
from acclimate_adapters.functional import at_least_float32, entropy
from acclimate_adapters.network.model import FrozenModel, require_finite
from acclimate_adapters.state import State

FLAT: Final = 1 / 64
"""Standard deviation over space up to which a channel is constant but for noise. Inputs are normalised, to 1 about."""
UNRELATED: Final = 0.1
"""Correlation of neighbouring pixels below which, along rows and columns alike, a channel is noise."""
FEWEST_PIXELS: Final = 256
"""Pixels of a channel below which a picture may look like noise by chance."""
ALIKE: Final = 1e-6
"""Largest difference of features that are the same up to rounding, relative to the largest of them."""
LEFT_OUT: Final = -1
"""Place of a frame that tells nothing by itself: a flat one, or noise."""


class Frames(NamedTuple):
    """The frames of a batch, and which of them are folded in."""

    folded: tuple[int, ...]  # rows: the first of each frame, none that is flat or noise
    places: tuple[int, ...]  # of each row of the batch: which of those shows the same frame, or LEFT_OUT
    repeated: bool = False  # the batch is the one before once more

    @classmethod
    def of(cls, x: Tensor, *, repeated: bool = False, without_noise: bool = False) -> Self:
        """The frames of a batch x [B, C, ...]; rows without spatial axes, [B, C], are no frames and all folded in."""
        rows = range(len(x))
        if x.dim() < 3:
            return cls(tuple(rows), tuple(rows), repeated)
        sums, squares, flat = _measured(x)
        if without_noise:
            flat = [each or noise for each, noise in zip(flat, noises(x), strict=True)]
        first: dict[tuple[float, float], int] = {}
        folded, places = list[int](), list[int]()
        for row in rows:
            original = first.setdefault((sums[row], squares[row]), row)
            if flat[row]:
                places.append(LEFT_OUT)
            elif original != row and torch.equal(x[original], x[row]):
                places.append(places[original])
            else:
                places.append(len(folded))
                folded.append(row)
        return cls(tuple(folded), tuple(places), repeated)

    @property
    def complete(self) -> bool:
        """Whether every row is folded in."""
        return len(self.folded) == len(self.places)

    @property
    def stuck(self) -> bool:
        """Whether several rows all show one frame."""
        return len(self.folded) == 1 < len(self.places) and LEFT_OUT not in self.places

    def of_step(self, x: Tensor) -> Tensor:
        """The rows of the batch that are folded in."""
        return x if self.complete else x[list(self.folded)]

    def answer(self, adapter: Adapter, model: FrozenModel, state: State, x: Tensor, take: Callable[[], Step]) -> Step:
        """The answer to the whole batch.

        A flat frame or noise is answered by the frozen model, and a repeated one as its first. The state is kept if
        nothing is folded in, if all frames are the same or those of the batch before, or if their features are.

        Args:
            adapter: the client's.
            model: the frozen model.
            state: before the batch.
            x: [B, C, ...], the batch.
            take: takes the step on `of_step(x)`, one row at least.

        Returns:
            The step, with one more signal: "skipped" is the share of the rows that were not folded in, 0..1.

        Raises:
            StateMismatch: the state was made for another adapter, layout or model, even if no step is taken.
            NumericalError: the frozen model answers a flat frame with non-finite numbers.
        """
        if not self.folded:
            state.require(adapter.name, adapter.layout, model.content_hash)
            return _unadapted(model, state, x)
        step = take()
        kept = self.repeated or self.stuck or (x.dim() > 2 and _alike(step.features))
        whole = step if self.complete else self._spread(model, x, step)
        skipped = 1.0 if kept else 1 - len(self.folded) / len(self.places)
        return replace(whole, state=state if kept else step.state, signals={**step.signals, "skipped": skipped})

    def _spread(self, model: FrozenModel, x: Tensor, step: Step) -> Step:
        """The step on the folded rows as one on all rows; signals stay those of the folded rows."""
        places = torch.tensor(self.places, device=step.logits.device)
        flat = (places == LEFT_OUT).nonzero().flatten()
        frozen = model.frozen(x[flat.to(x.device)]) if len(flat) else None

        def spread(rows: Tensor | None, of_flat: Tensor | None) -> Tensor | None:
            if rows is None or of_flat is None:
                return None if rows is None else rows[places]
            return rows[places.clamp_min(0)].index_copy(0, flat, of_flat.to(rows))

        logits = None if frozen is None else require_finite(frozen.logits)
        features = None if frozen is None else frozen.features
        by_arm = None
        if logits is not None and step.by_arm is not None:
            by_arm = logits.argmax(dim=-1, keepdim=True).expand(-1, step.by_arm.shape[1])
        answer = spread(step.logits, logits)
        assert answer is not None
        return replace(
            step,
            logits=answer,
            frozen_logits=spread(step.frozen_logits, logits),
            features=spread(step.features, features),
            uncorrected=spread(step.uncorrected, logits),
            frozen_features=spread(step.frozen_features, features),
            by_arm=spread(step.by_arm, by_arm),
        )


def _measured(x: Tensor) -> tuple[list[float], list[float], list[bool]]:
    """Of each row of x [B, C, ...]: its sum and length, by which equal rows are found, and whether it is flat."""
    channels = at_least_float32(x).flatten(2)  # [B, C, S]
    pixels = channels.shape[-1]
    sums, lengths = channels.sum(-1), torch.linalg.vector_norm(channels, dim=-1)  # [B, C]
    means, squares = sums / pixels, lengths.square() / pixels
    # of constant channels the difference of squares is rounding, which grows with them
    flat = (squares - means.square() <= FLAT**2 + 1e-6 * squares).all(1) & (pixels > 1)
    total, length, is_flat = torch.stack([sums.sum(1), lengths.sum(1), flat.to(sums)]).tolist()
    return total, length, [bool(each) for each in is_flat]


def noises(x: Tensor) -> list[bool]:
    """Whether each row of x [B, C, ...] is noise: no channel's neighbouring pixels have anything to do with each other.

    What is no picture [B, C, H, W], or one of very few pixels, never is.
    """
    if x.dim() != 4 or x.shape[2] * x.shape[3] < FEWEST_PIXELS or min(x.shape[2:]) < 2:
        return [False] * len(x)
    height, width = x.shape[2:]
    deviations = at_least_float32(x)
    deviations = deviations - deviations.mean((2, 3), keepdim=True)
    squares = deviations.square().sum((2, 3)).clamp_min(torch.finfo(deviations.dtype).tiny)  # [B, C]
    along = (deviations[..., 1:] * deviations[..., :-1]).sum((2, 3)) * (width / (width - 1))
    across = (deviations[..., 1:, :] * deviations[..., :-1, :]).sum((2, 3)) * (height / (height - 1))
    unrelated = torch.maximum(along.abs(), across.abs()) < UNRELATED * squares
    return [bool(each) for each in unrelated.all(1).tolist()]


def _alike(features: Tensor | None) -> bool:
    """Whether several rows of features [B, d] are all the same."""
    if features is None or len(features) < 2:
        return False
    return bool((features - features[:1]).abs().max() <= ALIKE * features.abs().max())


def _unadapted(model: FrozenModel, state: State, x: Tensor) -> Step:
    """The frozen model's answer to a batch of which nothing is folded in."""
    frozen = model.frozen(x)
    logits = require_finite(frozen.logits)
    signals = {"entropy": float(entropy(logits).mean()), "collapsed": 0.0, "fallback": 1.0, "skipped": 1.0}
    return Step(logits, state, signals, logits, frozen.features)
