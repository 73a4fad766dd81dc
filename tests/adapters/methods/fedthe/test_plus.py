"""FedTHE+ against Algorithm 2 with torch's own optimiser, and what it promises beyond it."""

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.functional import keyed_generator
from acclimate_adapters.methods.fedthe.plus import tune
from acclimate_adapters.methods.views import views

Enrolment = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def enrolment(golden: object) -> Enrolment:
    return golden.recorded_head(golden.Path(__file__).parents[3] / "golden/A", 0)


def fine_tuned(
    net: nn.Module, image: Tensor, head: Tensor, e: float, augmented: list[Tensor], lr: float
) -> tuple[Tensor, list[Tensor]]:
    """Logits of one image after lines 9 to 11 of Algorithm 2, and all tuned tensors, by torch's SGD on a copy."""
    net, features = copy.deepcopy(net), []
    net.linear5.register_forward_pre_hook(lambda module, arguments: features.append(arguments[0]))
    personal = nn.Parameter(head.clone())
    parameters = [*net.parameters(), personal]
    for p in parameters:
        p.requires_grad_()
    sgd = torch.optim.SGD(parameters, lr=lr)

    def mixed(x: Tensor) -> Tensor:
        logits = net(x)
        return e * logits + (1 - e) * features[-1] @ personal.T

    for x in augmented:
        log_p = mixed(x).log_softmax(-1).logsumexp(0) - math.log(len(x))  # of the mean prediction
        sgd.zero_grad()
        (-(log_p.exp() * log_p).sum()).backward()
        sgd.step()
    return mixed(image[None]).detach(), [p.detach() for p in parameters]


@pytest.mark.parametrize("tuning_steps", [1, 3])
def test_step_is_algorithm_2_with_torchs_sgd_for_each_sample(
    tuning_steps: int, model: FrozenModel, network: nn.Module, streams: Tensor, enrolment: Enrolment
) -> None:
    adapter = create("fedthe_plus", views=4, tuning_steps=tuning_steps, tuning_lr=0.05, seed=5)
    state = adapter.step(model, adapter.init(model, **enrolment), streams[0, 0, :2]).state
    step = adapter.step(model, state, streams[0, 1, :3])
    for row, image in enumerate(streams[0, 1, :3]):
        generator = keyed_generator(5, 2 + row)  # two samples came before
        augmented = [views(image, 4, generator) for _ in range(tuning_steps)]
        e = step.signals["global_weight"][row]
        want, _ = fine_tuned(network, image, enrolment["personal_head"], e, augmented, 0.05)
        torch.testing.assert_close(step.logits[row], want[0], rtol=0, atol=1e-3)
        assert float((step.logits[row] - step.frozen_logits[row]).abs().max()) > 0.05


def test_extractor_and_both_heads_are_tuned_but_not_the_running_statistics(
    model: FrozenModel, network: nn.Module, streams: Tensor, enrolment: Enrolment
) -> None:
    head = enrolment["personal_head"]
    weights = {name: model.tensor(name) for name in model.modules if name not in model.statistics}
    tuned, tuned_head = tune(model, streams[0, 0, :4], weights, head, 0.3, 0.1)
    _, want = fine_tuned(network, streams[0, 0, 0], head, 0.3, [streams[0, 0, :4]], 0.1)
    for got, reference in zip((*tuned.values(), tuned_head), want, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-5)
    assert not torch.equal(tuned_head, head)
    assert not torch.equal(tuned["conv1.weight"], weights["conv1.weight"])
    assert not torch.equal(tuned["linear5.bias"], weights["linear5.bias"])


@pytest.mark.parametrize("neutral", [{"tuning_lr": 0.0}, {"tuning_steps": 0}])
def test_without_fine_tuning_it_is_fedthe(
    neutral: Mapping[str, float], model: FrozenModel, streams: Tensor, enrolment: Enrolment
) -> None:
    plus, plain = create("fedthe_plus", views=2, **neutral), create("fedthe")
    a, b = (adapter.init(model, **enrolment) for adapter in (plus, plain))
    for batch in streams[0, :2, :5]:
        one, other = plus.step(model, a, batch), plain.step(model, b, batch)
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-4)
        a, b = one.state, other.state
    assert {name: t.tolist() for name, t in a.tensors.items()} == {name: t.tolist() for name, t in b.tensors.items()}


def test_client_that_has_not_enrolled_is_answered_by_the_global_head_and_told_so(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter = create("fedthe_plus")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.signals["enrolled"] == 0.0
    assert torch.equal(step.logits, model.frozen(streams[0, 0]).logits)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_the_same_however_the_stream_is_cut(
    size: int, model: FrozenModel, streams: Tensor, enrolment: Enrolment
) -> None:
    adapter, stream = create("fedthe_plus", views=3, tuning_steps=1, tuning_lr=0.05), streams[0, 0, :6]
    whole = adapter.step(model, adapter.init(model, **enrolment), stream)
    state, answers = adapter.init(model, **enrolment), []
    for batch in torch.split(stream, size):
        step = adapter.step(model, state, batch)
        state = step.state
        answers.append(step.logits)
    torch.testing.assert_close(torch.cat(answers), whole.logits, rtol=0, atol=1e-3)


def test_enrolled_head_is_restored_after_each_sample(model: FrozenModel, streams: Tensor, enrolment: Enrolment) -> None:
    adapter = create("fedthe_plus", views=2, tuning_lr=1.0)
    step = adapter.step(model, adapter.init(model, **enrolment), streams[0, 0, :2])
    assert torch.equal(step.state.tensors["personal_head"], enrolment["personal_head"])


def test_seed_changes_the_views(model: FrozenModel, streams: Tensor, enrolment: Enrolment) -> None:
    answers = []
    for seed in (0, 1):
        adapter = create("fedthe_plus", views=2, tuning_lr=0.1, seed=seed)
        answers.append(adapter.step(model, adapter.init(model, **enrolment), streams[0, 0, :2]).logits)
    assert not torch.equal(*answers)


def test_it_works_in_inference_mode(model: FrozenModel, streams: Tensor, enrolment: Enrolment) -> None:
    adapter = create("fedthe_plus", views=2, tuning_steps=1)
    expected = adapter.step(model, adapter.init(model, **enrolment), streams[0, 0, :2])
    with torch.inference_mode():
        step = adapter.step(model, adapter.init(model, **enrolment), streams[0, 0, :2].clone())
    assert torch.equal(step.logits, expected.logits)


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4, affine=False), nn.Identity])
def test_networks_with_other_norms_and_dropout_are_served(norm: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 36, 3))
    source = Source(prior=torch.full((3,), 1 / 3), descriptor=torch.zeros(144))
    model = FrozenModel.from_module(net, classifier="5", source=source)
    adapter = create("fedthe_plus", views=2)
    state = adapter.init(model, personal_head=torch.zeros(3, 144), descriptor=torch.ones(144))
    first, second = (adapter.step(model, state, torch.ones(2, 1, 8, 8)) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert bool(first.logits.isfinite().all())
