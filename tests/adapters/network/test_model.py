import copy
import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from torch import Tensor, nn

from acclimate_adapters import (
    ADAPTERS,
    ConfigurationError,
    FrozenModel,
    InputError,
    MissingSource,
    Source,
    create,
    guarded_step,
    missing,
)
from acclimate_adapters.network.direction import direction

UNIFORM3 = torch.full((3,), 1 / 3)


def small_net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, *extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(1, 4, 3), "norm": norm(4), "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(2)}
    layers |= {"flat": nn.Flatten(), **{f"extra{i}": m for i, m in enumerate(extra)}, "head": nn.Linear(16, 3)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return net.eval()


def freeze(net: nn.Module, **source: object) -> FrozenModel:
    return FrozenModel.from_module(net, classifier="head", source=Source(prior=UNIFORM3, **source))  # type: ignore[arg-type]


@pytest.fixture
def x() -> Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_frozen_answers_as_the_network_and_features_lead_to_the_same_logits(x: Tensor) -> None:
    net = small_net()
    frozen = freeze(net).frozen(x)
    with torch.no_grad():
        assert torch.equal(frozen.logits, net(x))
        torch.testing.assert_close(net.get_submodule("head")(frozen.features), frozen.logits)


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU(inplace=True)], ids=["a plain map", "squeezenet"])
def test_a_map_of_logits_may_be_averaged(between: nn.Module, x: Tensor) -> None:
    """Features are the means of what the 1x1 convolution sees; without a function after it they lead to the logits."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1), between, nn.AdaptiveAvgPool2d(1))
    net = nn.Sequential(*net, nn.Flatten()).eval()
    model = FrozenModel.from_module(net, classifier="2", source=Source(prior=UNIFORM3))
    assert (model.classes, model.feature_size, model.linear) == (3, 4, False)
    frozen = model.frozen(x)
    with torch.no_grad():
        assert torch.equal(frozen.logits, net(x))
        torch.testing.assert_close(frozen.features, net[:2](x).mean((2, 3)))
        if isinstance(between, nn.Identity):
            linear = F.linear(frozen.features, model.tensor("2.weight").flatten(1), model.tensor("2.bias"))
            torch.testing.assert_close(linear, frozen.logits)
    assert direction(model, x).tensors["2.weight"].abs().sum() > 0
    for name, lacking in {"t3a": ("linear_classifier",), "em": (), "surgical": (), "shot": ()}.items():
        assert missing(create(name), model) == lacking
        if not lacking:
            create(name).step(model, create(name).init(model), x)
    with pytest.raises(MissingSource, match="'t3a' needs linear_classifier, which the model does not carry"):
        create("t3a").init(model)


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 1, stride=2), nn.Conv2d(1, 3, 1, padding=1)])
def test_other_convolutions_are_no_classifiers(layer: nn.Module) -> None:
    net = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ConfigurationError, match="'0' is neither a linear layer of the network nor a 1x1 convolution"):
        FrozenModel.from_module(net, classifier="0", source=Source(prior=UNIFORM3))


def test_without_a_classifier_the_logits_stand_for_features_and_whatever_needs_none_is_served(x: Tensor) -> None:
    net = nn.Sequential(small_net(), nn.Hardtanh())
    model = FrozenModel.from_module(net, classifier=None, source=Source(prior=UNIFORM3))
    frozen = model.frozen(x)
    torch.testing.assert_close(frozen.logits, net.eval()(x))
    assert torch.equal(frozen.features, frozen.logits)
    assert (model.classes, model.feature_size, model.linear) == (3, 3, False)
    without = {name: missing(create(name), model) for name in ADAPTERS}
    assert {name for name, lacking in without.items() if not lacking} >= {"none", "em", "tent", "bn_adapt", "memo"}
    assert without["t3a"] == ("linear_classifier",)
    assert without["shot"] == without["surgical"] == ("classifier",)
    assert "classifier" in without["fedthe"]
    for name in (name for name, lacking in without.items() if not lacking):
        adapter = create(name)
        answer = guarded_step(adapter, model, adapter.init(model), x)
        assert answer.logits.shape == (len(x), 3)
    for name in ("shot", "surgical"):
        with pytest.raises(MissingSource, match=f"'{name}' needs classifier, which the model does not carry"):
            create(name).init(model)
    block = create("surgical", modules=("0.conv",))
    assert block.step(model, block.init(model), x).logits.shape == (len(x), 3)


def test_a_network_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the network has no parameters"):
        FrozenModel.from_module(nn.Flatten(), classifier=None, source=Source(prior=UNIFORM3))


def test_a_network_that_answers_otherwise_than_its_prior_is_refused_at_the_first_pass(x: Tensor) -> None:
    net = nn.Sequential(small_net(), nn.Linear(3, 5), nn.Hardtanh())
    model = FrozenModel.from_module(net, classifier=None, source=Source(prior=UNIFORM3))
    with pytest.raises(ConfigurationError, match=r"the network must end in logits \[B, K\]"):
        model.frozen(x)


def test_later_changes_of_the_network_have_no_effect(x: Tensor) -> None:
    net = small_net()
    model = freeze(net)
    before = model.frozen(x).logits
    with torch.no_grad():
        net.get_submodule("conv").weight.zero_()  # type: ignore[union-attr, operator]
    net.train()
    assert torch.equal(model.frozen(x).logits, before)


def test_replaced_modules_change_this_pass_only(x: Tensor) -> None:
    model = freeze(small_net())
    before = model.frozen(x).logits
    changed = model.forward(x, {"norm.running_mean": torch.zeros(4), "head.bias": torch.full((3,), 7.0)})
    assert not torch.allclose(changed, before)
    assert torch.equal(model.frozen(x).logits, before)


def test_dropout_is_inactive(x: Tensor) -> None:
    model = freeze(small_net(nn.BatchNorm2d, nn.Dropout(0.5)).train())
    assert torch.equal(model.frozen(x).logits, model.frozen(x).logits)


def test_layers_keep_their_own_epsilon(x: Tensor) -> None:
    def norm(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels, eps=0.5)

    net = small_net(norm)
    assert torch.equal(freeze(net).frozen(x).logits, net(x).detach())


def test_batch_norm_without_affine_parameters_offers_its_statistics_only(x: Tensor) -> None:
    model = freeze(small_net(lambda c: nn.BatchNorm2d(c, affine=False)))
    assert {n for n in model.modules if n.startswith("norm")} == {"norm.running_mean", "norm.running_var"}
    assert direction(model, x).tensors.keys() == set(model.modules)


def test_batch_norm_without_running_statistics_is_listed_and_not_adapted(x: Tensor) -> None:
    model = freeze(small_net(lambda c: nn.BatchNorm2d(c, track_running_stats=False)))
    assert model.skipped == ("norm",)
    assert model.statistics == ()
    assert "batch_norm" not in model.offers
    assert bool(direction(model, x).logits.isfinite().all())


def test_network_with_group_norm_alone_adapts_its_weights(x: Tensor) -> None:
    model = freeze(small_net(lambda c: nn.GroupNorm(2, c)))
    assert model.statistics == ()
    assert "norm.weight" in direction(model, x).tensors


def test_direction_of_parameters_is_the_negative_entropy_gradient_eq_4(x: Tensor) -> None:
    net = small_net().double()
    model = freeze(net)
    h = direction(model, x.double()).tensors["head.weight"]

    def mean_entropy(weight: Tensor) -> float:
        changed = copy.deepcopy(net)
        changed.get_submodule("head").weight = nn.Parameter(weight)  # type: ignore[union-attr]
        total = 0.0
        with torch.no_grad():
            for row in changed(x.double()).softmax(-1).tolist():
                total -= sum(p * math.log(p) for p in row)
        return total / len(x)

    weight, step = net.get_submodule("head").weight.detach(), 1e-6  # type: ignore[union-attr, operator]
    for i, j in [(0, 0), (1, 7), (2, 15)]:
        up, down = weight.clone(), weight.clone()
        up[i, j] += step
        down[i, j] -= step
        numeric = -(mean_entropy(up) - mean_entropy(down)) / (2 * step)
        assert float(h[i, j]) == pytest.approx(numeric, abs=1e-7)


def test_direction_of_statistics_is_batch_minus_running_eq_5(x: Tensor) -> None:
    net = small_net()
    h = direction(freeze(net), x).tensors
    with torch.no_grad():
        into_norm = net.get_submodule("conv")(x)
    norm = net.get_submodule("norm")
    for c in range(4):
        values = into_norm[:, c].flatten().double()
        n = len(values)
        mean = float(values.sum()) / n
        unbiased = float(((values - mean) ** 2).sum()) / (n - 1)
        assert float(h["norm.running_mean"][c]) == pytest.approx(mean - float(norm.running_mean[c]), abs=1e-5)  # type: ignore[union-attr, index]
        assert float(h["norm.running_var"][c]) == pytest.approx(unbiased - float(norm.running_var[c]), abs=1e-5)  # type: ignore[union-attr, index]


def test_statistics_of_deep_layers_are_those_of_unadapted_activations(x: Tensor) -> None:
    net = small_net(nn.BatchNorm2d, nn.BatchNorm1d(16))
    h = direction(freeze(net), x).tensors["extra0.running_mean"]
    with torch.no_grad():
        activations = net[:5](x)
    torch.testing.assert_close(h, activations.mean(0) - net.get_submodule("extra0").running_mean)  # type: ignore[operator]


def test_direction_yields_the_frozen_logits_of_the_same_pass(x: Tensor) -> None:
    model = freeze(small_net())
    assert torch.equal(direction(model, x).logits, model.frozen(x).logits)


def test_direction_holds_only_what_was_asked_for_and_needs_no_gradient_for_statistics(x: Tensor) -> None:
    model = freeze(small_net())
    h = direction(model, x, ["norm.running_var", "norm.running_mean"])
    assert list(h.tensors) == ["norm.running_var", "norm.running_mean"]
    assert not h.logits.requires_grad


def test_one_value_per_channel_leaves_the_variance_direction_zero_and_named() -> None:
    model = freeze(small_net(nn.BatchNorm2d, nn.BatchNorm1d(16)))
    h = direction(model, torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(2)))
    assert h.undefined == ("extra0.running_var",)
    assert not bool(h.tensors["extra0.running_var"].any())
    assert bool(h.tensors["extra0.running_mean"].any())
    assert all(bool(t.isfinite().all()) for t in h.tensors.values())


def test_everything_works_inside_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        model = freeze(small_net())
        h = direction(model, model.batch(x * 1.0))
    assert torch.equal(h.tensors["head.bias"], direction(model, x).tensors["head.bias"])


def test_passes_on_many_threads_do_not_meet(x: Tensor) -> None:
    model = freeze(small_net())
    batches = [x[: 1 + i % 5] * (i + 1) / 8 for i in range(8)]
    alone = [direction(model, b).tensors for b in batches]
    together: list[dict[str, Tensor]] = [{} for _ in batches]

    def run(i: int) -> None:
        for _ in range(20):
            together[i] = dict(direction(model, batches[i]).tensors)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_content_hash_names_weights_source_and_nothing_else() -> None:
    net = small_net()
    one = freeze(net).content_hash
    assert one == freeze(copy.deepcopy(net)).content_hash
    assert len(one) == 16
    assert freeze(net, rates={"conv.weight": 0.1}).content_hash != one
    with torch.no_grad():
        net.get_submodule("head").bias[0] += 1e-3  # type: ignore[union-attr, operator, index]
    assert freeze(net).content_hash != one


def test_classifier_that_is_no_linear_layer_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match=r"head"):
        FrozenModel.from_module(small_net(), classifier="conv", source=Source(prior=UNIFORM3))


def test_network_that_does_not_end_in_its_classifier_is_refused_at_the_first_pass(x: Tensor) -> None:
    net = small_net()
    net.add_module("more", nn.Linear(3, 5))
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=UNIFORM3))
    with pytest.raises(ConfigurationError, match="must end in its classifier"):
        model.frozen(x)


def test_prior_of_another_class_count_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="classes"):
        FrozenModel.from_module(small_net(), classifier="head", source=Source(prior=torch.full((4,), 0.25)))


@pytest.mark.parametrize("quantity", [{"prototypes": torch.zeros(3, 15)}, {"descriptor": torch.zeros(15)}], ids=str)
def test_source_quantity_of_another_feature_width_is_refused(quantity: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigurationError, match="15 features, the network 16"):
        freeze(small_net(), **quantity)


def test_direction_counts_the_channels_that_are_constant_in_the_batch() -> None:
    model = freeze(small_net())
    assert direction(model, torch.full((5, 1, 8, 8), 0.3)).constant == 4
    assert direction(model, torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))).constant == 0


def test_one_class_is_refused() -> None:
    net = nn.Sequential()
    net.add_module("head", nn.Linear(4, 1))
    with pytest.raises(ConfigurationError, match="at least 2"):
        Source(prior=torch.ones(1))
    with pytest.raises(ConfigurationError, match="2 classes, the network 1"):  # a binary model of a single logit
        FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.tensor([0.5, 0.5])))


def test_rate_of_an_unknown_module_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"conv\.wieght"):
        freeze(small_net(), rates={"conv.wieght": 0.1})


def test_non_finite_weight_is_refused_by_name() -> None:
    net = small_net()
    with torch.no_grad():
        net.get_submodule("conv").weight[0] = float("nan")  # type: ignore[union-attr, operator, index]
    with pytest.raises(ConfigurationError, match=r"conv\.weight"):
        freeze(net)


@pytest.mark.parametrize(
    "bad", [torch.zeros(0, 1, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.int64), torch.full((2, 1, 8, 8), torch.nan)]
)
def test_unusable_batch_is_refused(bad: Tensor) -> None:
    with pytest.raises(InputError):
        freeze(small_net()).batch(bad)


def test_batch_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match="cannot take a batch of shape"):
        freeze(small_net()).frozen(torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    "refuse",
    [
        lambda x: x[:, :, :, :, 0],
        lambda x: torch._assert(x.shape[-1] == 8, "wrong image height"),
        lambda x: {}["no such size"] if x.dim() == 9 else x + "text",
        lambda x: x.new_zeros(3, 4).reshape(-1)[x.shape[1] + 100],
        lambda x: nn.functional.interpolate(x, size=(4, 4), mode="no such mode"),
        lambda x: torch.nn.functional.batch_norm(x[:1, :, :1, :1], None, None, training=True),
    ],
    ids=["index", "assertion", "type", "range", "not implemented", "value"],
)
def test_batch_that_the_network_cannot_take_is_an_input_error_whatever_torch_raises(
    refuse: Callable[[Tensor], object],
) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(9, 2)

        def forward(self, x: Tensor) -> Tensor:
            refuse(x)
            result: Tensor = self.head(x.flatten(1))
            return result

    model = FrozenModel.from_module(Picky(), classifier="head", source=Source(prior=torch.tensor([0.5, 0.5])))
    with pytest.raises(InputError, match=r"cannot take a batch of shape \[2, 1, 3, 3\]"):
        model.frozen(torch.zeros(2, 1, 3, 3))


def test_every_kind_of_layer_of_a_residual_network_gets_a_direction() -> None:
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=4)
    model = FrozenModel.from_module(net, classifier="fc", source=Source(prior=torch.full((4,), 0.25)))
    h = direction(model, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert len(h.tensors) == 62 + 40  # parameters and running statistics, as the paper counts them
    assert all(h.tensors[name].shape == model.tensor(name).shape for name in model.modules)


def test_what_is_derived_is_made_once_for_each_model_runtime_and_constant(model: FrozenModel) -> None:
    made: list[object] = []

    def make(model: FrozenModel, constant: int) -> int:
        made.append((model, constant))
        return constant

    other = model.with_runtime(model.frozen)
    assert [each.derived(make, n) for each in (model, other) for n in (1, 2, 1)] == [1, 2, 1, 1, 2, 1]
    assert made == [(model, 1), (model, 2), (other, 1), (other, 2)]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError])
def test_whatever_a_layer_raises_for_a_batch_is_an_input_error(kind: type[Exception]) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 8:
                raise kind("8 pixels, please")
            return x.flatten(1)

    net = nn.Sequential(Picky(), nn.Linear(64, 2))
    model = FrozenModel.from_module(net, classifier="1", source=Source(prior=torch.full((2,), 0.5)))
    assert model.frozen(torch.rand(2, 1, 8, 8)).logits.shape == (2, 2)
    with pytest.raises(InputError, match=r"shape \[2, 1, 9, 9\]: 8 pixels, please"):
        model.frozen(torch.rand(2, 1, 9, 9))


def test_torch_has_other_errors_than_runtime_errors_for_a_batch() -> None:
    """BatchNorm by the batch raises ValueError."""
    net = nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(36, 2))
    model = FrozenModel.from_module(net, classifier="2", source=Source(prior=torch.full((2,), 0.5)))
    with pytest.raises(InputError, match="expected 4D input"):
        model.frozen(torch.rand(2, 4, 9))
