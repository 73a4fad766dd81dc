"""Numerical edge cases that concern every adapter, each through all of them; the name of a test says the case."""

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    ADAPTERS,
    Anchors,
    ConfigurationError,
    FrozenModel,
    InputError,
    NumericalError,
    Source,
    State,
    Step,
    create,
    guarded_step,
    missing,
)
from acclimate_adapters.balanced.moments import source_moments
from acclimate_adapters.methods.fed_ade.client import PERSONAL
from acclimate_adapters.network.direction import direction

QUICK = {"memo": {"views": 2}, "fedthe_plus": {"views": 2, "tuning_steps": 1}}
NEED_BATCH_NORM = {"bn_adapt", "consensus"}
BEGINNINGS: WeakKeyDictionary[FrozenModel, dict[str, State]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Method:
    """An adapter as its clients use it: those with a personal head enrol with the anchors of the model."""

    name: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.hyperparameters.values())])

    def create(self) -> Any:
        return create(self.name, **(self.hyperparameters or QUICK.get(self.name, {})))

    def init(self, model: FrozenModel) -> State:
        """The state before the first batch, made once for each model, as nothing changes it."""
        known = BEGINNINGS.setdefault(model, {})
        if str(self) not in known:
            known[str(self)] = self._begin(model)
        return known[str(self)]

    def _begin(self, model: FrozenModel) -> State:
        if not self.name.startswith("fedthe"):
            return self.create().init(model)
        assert model.source.anchors is not None
        return self.create().init(model, x=model.source.anchors.inputs, labels=model.source.anchors.labels)

    def answer(self, model: FrozenModel, *batches: Tensor) -> Step:
        """The last of some steps from the beginning."""
        state, step = self.init(model), None
        for batch in batches:
            step = self.create().step(model, state, batch)
            state = step.state
        assert step is not None
        return step


METHODS = [
    *map(Method, sorted(ADAPTERS)),
    Method("atp+fedcal", {"fedcal": {"estimator": "fm"}}),
    Method("bbse", {"mode": "hard"}),
    Method("bn_adapt+em"),
    Method("dynfed", {"arn": "mlp"}),
    Method("fed_ade", {"layers": "all"}),
    Method("fedcal", {"estimator": "em"}),
    Method("fedcal", {"estimator": "fm"}),
    Method("tent", {"optimizer": "adam"}),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


def world(net: nn.Module, classes: int, *shape: int) -> FrozenModel:
    """A model with a linear `head`, from inputs of this shape, and a source that carries everything."""
    generator = torch.Generator().manual_seed(classes)
    inputs, labels = torch.rand(2 * classes, *shape, generator=generator), torch.arange(2 * classes) % classes
    prior = torch.full((classes,), 1 / classes)
    bare = FrozenModel.from_module(net, classifier="head", source=Source(prior=prior))
    features = bare.features(inputs)
    return FrozenModel.from_module(
        net,
        classifier="head",
        source=Source(
            prior=prior,
            rates=dict.fromkeys(bare.modules, 0.3),
            confusion=0.8 * torch.eye(classes) + 0.2 / classes,
            prototypes=torch.stack([features[labels == k].mean(0) for k in range(classes)]),
            descriptor=features.mean(0),
            anchors=Anchors(inputs, labels),
            moments=source_moments(bare, [(inputs, labels)]),
        ),
    )


def small(classes: int = 3, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, *before_head: nn.Module) -> nn.Module:
    """Colour images of 6 x 6 pixels to classes."""
    torch.manual_seed(1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(3, 8, 3), norm=norm(8), relu=nn.ReLU())
    layers |= {"pool": nn.AdaptiveAvgPool2d(2), "flat": nn.Flatten()}
    layers |= {f"more{i}": layer for i, layer in enumerate(before_head)} | {"head": nn.Linear(32, classes)}
    return nn.Sequential(layers)


def images(count: int, seed: int = 0, *shape: int) -> Tensor:
    return torch.rand(count, *(shape or (3, 6, 6)), generator=torch.Generator().manual_seed(seed))


def assert_sound(step: Step, rows: int) -> None:
    assert len(step.logits) == rows
    assert bool(step.logits.isfinite().all())
    assert all(bool(t.isfinite().all()) for t in step.state.tensors.values())


@each_method
def test_batch_of_one_into_1x1_maps_and_batch_norm_1d_is_answered(method: Method) -> None:
    net = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 8, 6), norm=nn.BatchNorm2d(8), flat=nn.Flatten(), norm1=nn.BatchNorm1d(8), relu=nn.ReLU()
        )
    )
    net.add_module("head", nn.Linear(8, 3))
    model = world(net, 3, 3, 6, 6)
    assert_sound(method.answer(model, images(1), images(1, 1)), 1)


@each_method
def test_short_last_batch_is_answered(method: Method, model: FrozenModel, streams: Tensor) -> None:
    assert_sound(method.answer(model, streams[0, 0, :8], streams[0, 1, :3]), 3)


@each_method
def test_constant_images_are_answered(method: Method, model: FrozenModel) -> None:
    assert_sound(method.answer(model, *[torch.full((8, 1, 28, 28), 0.7)] * 2), 8)


@each_method
def test_all_identical_images_in_a_batch_are_answered(method: Method, model: FrozenModel, streams: Tensor) -> None:
    assert_sound(method.answer(model, *[streams[0, 0, :1].expand(8, -1, -1, -1)] * 2), 8)


@pytest.mark.parametrize("name", ["atp", "bn_adapt", "dynfed"])
def test_constant_images_report_low_variance(name: str) -> None:
    net = nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(3), flat=nn.Flatten(), head=nn.Linear(108, 2)))
    model = world(net, 2, 3, 6, 6)
    x = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1).expand(5, 3, 6, 6)
    assert Method(name).answer(model, x).signals["constant_channels"] == 3
    h = direction(model, x)
    torch.testing.assert_close(h.tensors["norm.running_var"], -model.tensor("norm.running_var"))
    assert Method(name).answer(model, images(5)).signals["constant_channels"] == 0


@each_method
def test_two_classes_work(method: Method) -> None:
    step = method.answer(world(small(classes=2), 2, 3, 6, 6), images(8), images(8, 1))
    assert_sound(step, 8)
    assert step.logits.shape == (8, 2)


@pytest.fixture(scope="module")
def thousand() -> FrozenModel:
    """Of a thousand classes."""
    return world(small(classes=1000), 1000, 3, 6, 6)


@each_method
def test_thousand_classes_and_twenty_images_are_answered(method: Method, thousand: FrozenModel) -> None:
    step = method.answer(thousand, images(20))
    assert_sound(step, 20)
    assert step.logits.shape == (20, 1000)
    assert 0 <= float(str(step.signals["entropy"])) <= math.log(1000) + 1e-4
    prior = step.signals.get("prior", (1.0,))
    assert isinstance(prior, tuple)
    assert sum(prior) == pytest.approx(1, abs=1e-4)
    assert min(prior) >= 0


@each_method
def test_non_finite_logits_of_the_model_are_an_error_and_keep_the_state(method: Method, model: FrozenModel) -> None:
    adapter, state = method.create(), method.init(model)
    before = state.to_bytes()
    with pytest.raises(NumericalError):
        guarded_step(adapter, model, state, torch.full((8, 1, 28, 28), 3e38))
    assert state.to_bytes() == before


@each_method
def test_huge_finite_input_is_answered_or_refused_and_never_poisons_the_state(
    method: Method, model: FrozenModel, streams: Tensor
) -> None:
    adapter, state = method.create(), method.init(model)
    x = streams[0, 0, :8].clone()
    x[3] = 1e30
    with contextlib.suppress(NumericalError):
        state = guarded_step(adapter, model, state, x).state
    assert_sound(guarded_step(adapter, model, state, streams[0, 1, :8]), 8)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def half(request: pytest.FixtureRequest, network: nn.Module, model: FrozenModel) -> FrozenModel:
    """The model in half precision."""
    net = copy.deepcopy(network).to(request.param)
    return FrozenModel.from_module(net, classifier="linear5", source=model.source)


@each_method
def test_half_precision_model_answers_as_the_single_precision_one(
    half: FrozenModel, method: Method, model: FrozenModel, streams: Tensor
) -> None:
    step, exact = (method.answer(m, streams[0, 0, :4], streams[0, 1, :4]) for m in (half, model))
    assert_sound(step, 4)
    assert step.logits.dtype == half.dtype
    torch.testing.assert_close(step.logits.float().softmax(-1), exact.logits.softmax(-1), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("name", "options"),
    [("tent", {}), ("tent", {"optimizer": "adam"}), ("shot", {}), ("fed_ade", {})],
    ids=["tent", "adam", "shot", "fed_ade"],
)
def test_what_is_trained_in_half_precision_moves_as_far_as_in_single(
    half: FrozenModel, name: str, options: dict[str, Any], model: FrozenModel, streams: Tensor
) -> None:
    adapter, lengths = create(name, **options), []
    for each in (model, half):
        begin = state = adapter.init(each)
        for x in streams[0, :5]:
            state = adapter.step(each, state, x[:8].to(each.dtype)).state
        trained = [n for n in begin.tensors if n.removeprefix(PERSONAL) in each.parameters]
        moved = [state.tensors[n].float() - begin.tensors[n].float() for n in trained]
        lengths.append(float(torch.cat([part.flatten() for part in moved]).norm()))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.2)


@pytest.mark.parametrize("name", ["atp", "bn_adapt"])
def test_activations_whose_squares_overflow_float16_have_finite_statistics(name: str) -> None:
    net = nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(3), flat=nn.Flatten(), head=nn.Linear(108, 2)))
    nn.init.constant_(net.norm.running_mean, 300)
    nn.init.constant_(net.norm.running_var, 9e4)
    exact = world(net, 2, 3, 6, 6)
    mixed = copy.deepcopy(net)
    mixed.head.half()  # the BatchNorm layer stays in single precision, as is usual
    half = FrozenModel.from_module(mixed, classifier="head", source=exact.source)
    x = 300 + 300 * torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    step = Method(name).answer(half, x)
    assert_sound(step, 8)
    torch.testing.assert_close(
        step.logits.float().softmax(-1), Method(name).answer(exact, x).logits.softmax(-1), rtol=0, atol=0.02
    )


@each_method
def test_channels_last_memory_gives_the_same_answer(method: Method) -> None:
    model, batches = world(small(), 3, 3, 6, 6), [images(8), images(8, 1)]
    plain = method.answer(model, *batches)
    strided = method.answer(model, *(x.contiguous(memory_format=torch.channels_last) for x in batches))
    torch.testing.assert_close(strided.logits.softmax(-1), plain.logits.softmax(-1), rtol=0, atol=1e-5)


@each_method
def test_zero_feature_vectors_are_answered(method: Method) -> None:
    net = small()
    nn.init.constant_(net.norm.bias, -1e3)  # no feature survives the ReLU
    assert_sound(method.answer(world(net, 3, 3, 6, 6), images(8), images(8, 1)), 8)


@each_method
def test_nan_pixel_of_one_client_touches_no_other(method: Method, model: FrozenModel, streams: Tensor) -> None:
    adapter, alone = method.create(), [method.answer(model, *streams[c, :2, :8]) for c in (0, 1)]
    first = [adapter.step(model, method.init(model), streams[c, 0, :8]).state for c in (0, 1)]
    broken = streams[2, 0, :8].clone()
    broken[0, 0, 0, 0] = math.nan
    with pytest.raises(InputError, match="NaN"):
        adapter.step(model, method.init(model), broken)
    for c in (0, 1):
        assert torch.equal(adapter.step(model, first[c], streams[c, 1, :8]).logits, alone[c].logits)


@each_method
@pytest.mark.parametrize(
    "norm", [lambda c: nn.GroupNorm(2, c), lambda c: nn.LayerNorm([c, 4, 4])], ids=["group", "layer"]
)
def test_absent_batch_norm_is_reported_or_answered(norm: Callable[[int], nn.Module], method: Method) -> None:
    model = world(small(3, norm), 3, 3, 6, 6)
    if NEED_BATCH_NORM & set(method.name.split("+")):
        assert missing(method.create(), model) == ("batch_norm",)
        with pytest.raises(ConfigurationError, match="batch_norm"):
            method.init(model)
    else:
        assert_sound(method.answer(model, images(8), images(8, 1)), 8)


@each_method
def test_batch_norm_without_affine_parameters_or_running_statistics_is_no_crash(method: Method) -> None:
    class Both(nn.Sequential):
        def __init__(self, channels: int) -> None:
            plain = nn.BatchNorm2d(channels, affine=False)
            super().__init__(plain, nn.BatchNorm2d(channels, track_running_stats=False))

    model = world(small(3, Both), 3, 3, 6, 6)
    assert model.skipped == ("norm.1",)
    assert_sound(method.answer(model, images(8), images(8, 1)), 8)


@each_method
def test_dropout_is_inactive(method: Method) -> None:
    model = world(small(3, nn.BatchNorm2d, nn.Dropout(0.5)).train(), 3, 3, 6, 6)
    first, again = (method.answer(model, images(8), images(8, 1)) for _ in range(2))
    assert torch.equal(first.logits, again.logits)
    assert first.state.to_bytes() == again.state.to_bytes()


@pytest.mark.parametrize("name", sorted({m.name for m in METHODS} - {"none", "em", "t3a", "fedcal"}))
def test_what_the_model_lacks_is_an_error_of_init(name: str) -> None:
    bare = FrozenModel.from_module(
        small(3, nn.Identity), classifier="head", source=Source(prior=torch.full((3,), 1 / 3))
    )
    lacking = missing(create(name), bare)
    if lacking:
        with pytest.raises(ConfigurationError, match="|".join(lacking)):
            create(name).init(bare)
    else:
        create(name).init(bare)
