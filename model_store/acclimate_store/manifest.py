"""The typed manifest of a bundle: what the network is, what it eats, and which files belong to it."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    ValidationError,
    model_validator,
)
from torch import Tensor

from acclimate_adapters.errors import InputError
from acclimate_store.errors import ManifestError

MANIFEST_FILE = "manifest.json"

_BARE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATH = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


def is_bare_name(value: str) -> bool:
    """Whether a text may be the name or the version of a bundle, and so the name of a folder."""
    return _BARE_NAME.fullmatch(value) is not None


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _bare_name(value: str) -> str:
    if not is_bare_name(value):
        raise ValueError("use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
    return value


def _finite(options: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    json.dumps(options, allow_nan=False)  # pydantic looks for non-finite numbers in declared floats only
    return options


def _inner_path(value: str) -> str:
    parts = PurePosixPath(value).parts
    if not _PATH.fullmatch(value) or "." in value.split("/") or ".." in parts:
        raise ValueError(f"{value!r} is not a plain relative path inside the bundle: no '..', no leading '/'")
    if value == MANIFEST_FILE:
        raise ValueError(f"{MANIFEST_FILE} cannot list its own hash")
    return value


BareName = Annotated[str, AfterValidator(_bare_name)]
InnerPath = Annotated[str, AfterValidator(_inner_path)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=1, le=16384)]
Text = Annotated[str, Field(min_length=1)]
R = TypeVar("R", bound=BaseModel)


class Record(BaseModel):
    """A frozen record of a JSON file; unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Resize(Record):
    """How an encoded image of any size becomes the size of the network's input, as torchvision.transforms does it.

    One number for `size` and a `crop`: the shorter side becomes `size` pixels, the aspect ratio is kept, and the
    central `crop` is taken. Without a crop, or with height and width in `size`, the image is stretched; one number then
    stands for both. A crop is one number, or height and width. `antialias` has no default, since libraries disagree on
    theirs and the wrong choice costs accuracy without any error.
    """

    size: Size | tuple[Size, Size]
    interpolation: Literal["bilinear", "bicubic"]
    antialias: StrictBool
    crop: Size | tuple[Size, Size] | None = None

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        if self.crop is not None and any(c > s for c, s in zip(_pair(self.crop), _pair(self.size), strict=True)):
            raise ValueError(f"crop ({self.crop}) must not be larger than size ({self.size})")
        return self

    @property
    def shorter_side(self) -> int | None:
        """What the shorter side becomes where the aspect ratio is kept; None where the image is stretched."""
        return self.size if self.crop is not None and isinstance(self.size, int) else None

    @property
    def target(self) -> list[int]:
        """What `torchvision.transforms.functional.resize` takes: the shorter side alone, or height and width."""
        return [*_pair(self.size)] if self.shorter_side is None else [self.shorter_side]

    @property
    def result(self) -> tuple[int, int]:
        """Height and width of what comes out."""
        return _pair(self.size if self.crop is None else self.crop)


class InputSpec(Record):
    """The batch a network expects: NCHW, and how pixels are normalised.

    `mean` and `std` are per channel, for pixels in 0..1. `resize` applies to encoded images only; arrays must already
    have the exact size.
    """

    channels: Size
    height: Size
    width: Size
    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    resize: Resize | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ValueError(f"{name} needs one value per channel ({self.channels}), not {len(values)}")
        if self.resize is not None:
            height, width = self.resize.result
            if (self.height, self.width) != (height, width):
                raise ValueError(f"resize yields {height}x{width}, but the input is {self.height}x{self.width}")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return self.channels, self.height, self.width

    def normalise(self, batch: NDArray[Any] | Tensor, device: torch.device | str | None = None) -> Tensor:
        """Pixels to network input: (x / 255 - mean) / std for uint8, (x - mean) / std for float32.

        Args:
            batch: [B, C, H, W], B >= 1; uint8 in 0..255 or float32 in 0..1. Never changed.
            device: where to compute, so that uint8 and not float32 crosses the bus; by default where the batch is.

        Returns:
            float32 [B, C, H, W], bit for bit what NumPy computes from the same formula in float32.

        Raises:
            InputError: another shape or type.
        """
        # torch.tensor copies, which also makes read-only request buffers safe to use.
        x = torch.tensor(batch, device=device) if isinstance(batch, np.ndarray) else batch.to(device)
        if x.ndim != 4 or x.shape[0] < 1 or tuple(x.shape[1:]) != self.shape:
            raise InputError(f"the model takes batches of shape [B, {self.extent}], B >= 1; got {list(x.shape)}")
        return (self._unit(x) - _constant(self.mean, x.device)).div_(_constant(self.std, x.device))

    @property
    def extent(self) -> str:
        """`shape` as it is written in messages."""
        return ", ".join(map(str, self.shape))

    @staticmethod
    def _unit(x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            # A tensor and not a number: CUDA multiplies by the reciprocal of a number, which rounds differently.
            return x.to(torch.float32).div_(_constant((255.0,), x.device))
        if x.dtype == torch.float32:
            return x
        raise InputError(f"the model takes uint8 (0..255) or float32 (0..1) pixels; got {x.dtype}")


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 [1, C, 1, 1], never written to: brought to the device once, since that waits for what it is doing."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


HARM: Final = 0.02
"""A client that loses more accuracy than this is harmed."""
MOST_HARMED: Final = 0.05
"""Largest share of clients that the default adapter may harm."""
FEWEST_CLIENTS: Final = 5
"""Least clients that may prove a gain: that all of them gain happens by chance once in 32 times, if gain and loss are
equally likely. The interval of a mean over fewer says nothing."""


class Measured(Record):
    """What `acclimate models measure` found on labelled images of the training side.

    `rows` are the images of each class. `accuracy` is that of the frozen model on them. `mean` and `std` are those of
    their pixels in 0..1, per channel.
    """

    data: Text
    rows: tuple[Annotated[int, Field(ge=0)], ...]
    accuracy: Annotated[float, Field(ge=0, le=1)]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Golden(Record):
    """That the bundle has a golden batch, which decides whether it may serve; see `golden`.

    `tolerance` is the largest difference of a logit that is accepted, as a share of the largest logit, by the type that
    the model computes in. Single precision of one device is not that of another: convolutions of GPUs keep 10 bits.
    """

    tolerance: Mapping[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=lambda: {"float64": 5e-3, "float32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}
    )


class Evidence(Record):
    """What an adapter gains on clients that nothing was learned from, beside the frozen model on the same images.

    `gain`, the 95 % interval `low` to `high`, and `worst`, the least gain of a client, are differences of accuracy.
    `harmed` is the share of clients that lose more than `HARM`. `of` says in words which clients these were.
    """

    adapter: Text
    options: Annotated[Mapping[str, JsonValue], AfterValidator(_finite)] = Field(default_factory=dict)
    gain: float
    low: float
    high: float
    worst: float
    harmed: Annotated[float, Field(ge=0, le=1)]
    clients: Annotated[int, Field(ge=1)]
    of: Text

    @property
    def obstacle(self) -> str:
        """Why the adapter is not to be the default; empty if it may be."""
        if self.clients < FEWEST_CLIENTS:
            return f"it was judged on {self.clients} clients, and {FEWEST_CLIENTS} are the least"
        if self.low <= 0:
            low, high = (f"{100 * value:+.1f}" for value in (self.low, self.high))
            return f"its gain of {100 * self.gain:+.1f} points may be none ({low} to {high})"
        if self.harmed > MOST_HARMED:
            return f"it harms {100 * self.harmed:.0f} % of the clients, the worst by {-100 * self.worst:.1f} points"
        return ""


SAFEST: Final = "consensus"
"""The adapter that hardly harms anybody, which answers as long as no labels say what is better."""


STATE_BUDGET: Final = 1 / 8
"""Share of its exact bytes that a stored state may take where nothing was learned about it."""


class StateBudget(Record):
    """How few bytes the stored states of an adapter may take, as clients showed of which nothing else was learned.

    `budget` is the share of their exact bytes. Stored and restored after every batch, a state took `nbytes` in the
    mean, the share `other` of all answers was not that of exact states, and their accuracy was less by `lost`.
    """

    budget: Annotated[float, Field(gt=0, le=1)]
    nbytes: Annotated[float, Field(ge=0)]
    other: Annotated[float, Field(ge=0, le=1)]
    lost: Annotated[float, Field(ge=-1, le=1)]
    of: Text


class Default(NamedTuple):
    """What clients begin with that choose no adapter."""

    adapter: str
    options: Mapping[str, JsonValue]
    because: Literal[
        "evidence", "no_labels", "not_servable"
    ]  # labels say so, or speak for none, nor can `SAFEST` serve
    reason: str  # in words; where nothing has been proven, what would change it

    def __str__(self) -> str:
        """The sentence that starts, commands and logs say."""
        return f"default adapter: {self.adapter}, because: {self.because}; {self.reason}"


class Manifest(Record):
    """What `manifest.json` says; unknown fields are refused, so that a misspelt one is never ignored.

    `architecture` is a registered name such as `acclimate:shallow_cnn` or `torchvision:resnet18`, or an import path
    `module:callable` that the operator allows (see `architectures.build`). It is called with `architecture_options`.
    `classifier` is the module name of the last layer, null if that is none that adapters can look into. `files` maps
    every other file of the bundle to its sha256; those of `files.GRAPHS` among them are passes of the model for ONNX
    Runtime. `metrics` are free: name to value. `golden` is there where a golden batch is. `measured` is there once
    labelled images were seen. `evidence` is that of the adapter that is to be the default, which it is if the evidence
    suffices. `settings` are hyper-parameters that adapters have here unless others are named, with what they gain.
    `state_budgets` say by adapter how few bytes a stored state may take. `provenance` says in words how the
    bundle was made.
    """

    schema_version: Literal[1]
    name: BareName
    version: BareName
    architecture: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.-]*$")]
    architecture_options: Annotated[Mapping[str, JsonValue], AfterValidator(_finite)] = Field(default_factory=dict)
    classifier: Text | None
    input: InputSpec
    classes: Annotated[tuple[Text, ...], Field(min_length=2)]
    files: Mapping[InnerPath, Sha256]
    metrics: Mapping[str, float] = Field(default_factory=dict)
    golden: Golden | None = None
    measured: Measured | None = None
    evidence: Evidence | None = None
    settings: Mapping[str, Evidence] = Field(default_factory=dict)
    state_budgets: Mapping[str, StateBudget] = Field(default_factory=dict)
    licence: Text
    provenance: Text

    @model_validator(mode="after")
    def _unique_classes(self) -> Self:
        twice = sorted({name for name in self.classes if self.classes.count(name) > 1})
        if twice:
            raise ValueError(f"class names must be unique; repeated: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _settings_by_adapter(self) -> Self:
        if odd := sorted(name for name, each in self.settings.items() if name != each.adapter):
            raise ValueError(f"settings of {', '.join(odd)} are about another adapter")
        return self

    @property
    def key(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"

    @property
    def options(self) -> dict[str, Mapping[str, JsonValue]]:
        """Hyper-parameters that were chosen for this model, by adapter."""
        return {adapter: each.options for adapter, each in self.settings.items()}

    def state_budget(self, adapter: str) -> float:
        """Share of its exact bytes that a stored state of an adapter may take, unless the operator says otherwise."""
        learned = self.state_budgets.get(adapter)
        return STATE_BUDGET if learned is None else learned.budget

    def default(self, servable: bool) -> Default:
        """The adapter of clients that choose none: one whose gain is proven, else `SAFEST` where it can serve.

        Args:
            servable: whether model and source have what `SAFEST` needs.
        """
        told = self.evidence
        if told is not None and not told.obstacle:
            low, high = (f"{100 * value:+.1f}" for value in (told.low, told.high))
            gained = f"{100 * told.gain:+.1f} points ({low} to {high}) on {told.of}"
            return Default(told.adapter, told.options, "evidence", gained)
        run = f"`acclimate evaluate {self.name} --write`"
        if told is None:
            lacking = f"no gain was shown on clients that were held out; run `acclimate learn {self.name}` or {run}"
        else:
            lacking = f"of {told.adapter} {told.obstacle}; run {run}"
        if told is not None and told.adapter == SAFEST and told.clients >= FEWEST_CLIENTS:
            return Default("none", {}, "evidence", lacking)
        if not servable:
            return Default("none", {}, "not_servable", f"{SAFEST} cannot be served, and {lacking}")
        return Default(SAFEST, {}, "no_labels", f"it hardly harms anybody, and {lacking}")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse strictly.

        Raises:
            ManifestError: every problem found.
        """
        return parse_strictly(cls, MANIFEST_FILE, text)

    def to_json(self) -> str:
        """Indented JSON that `from_json` reads back."""
        return self.model_dump_json(indent=2) + "\n"


def parse_strictly(record: type[R], file: str, text: str | bytes) -> R:
    """Parse a JSON file of a bundle without any coercion of types.

    Raises:
        ManifestError: every problem found: where and what.
    """
    try:
        return record.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = [f"{file}: {'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()]
        raise ManifestError(f"{file} is not valid; correct:", problems) from error
