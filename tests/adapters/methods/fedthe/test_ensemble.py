"""FedTHE against its equations written out sample by sample, and what it promises beyond them."""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, InputError, MissingSource, NumericalError, Source, State, create, require
from acclimate_adapters.methods.fedthe.ensemble import fold_history, head_weight, mix, train_head

Enrolment = Mapping[str, Tensor]


@pytest.fixture
def enrolment(source_quantities: Mapping[str, object]) -> Enrolment:
    anchors = source_quantities["anchors"]
    return {"x": anchors.inputs[:60], "labels": anchors.labels[:60]}


def two_scalars(
    global_logits: Tensor, personal_logits: Tensor, to_global: float, to_local: float, steps: int, lr: float
) -> float:
    """e of one sample as in Algorithm 2 line 6, with autograd and torch's own Adam on Eq. 3, 4 and 5."""
    scalars = torch.ones(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([scalars], lr=lr)
    p_g, p_l = global_logits.softmax(0), personal_logits.softmax(0)
    similarity = float(p_g @ p_l / (p_g.norm() * p_l.norm()))
    for _ in range(steps):
        e, rest = scalars.softmax(0)
        p = (e * global_logits + rest * personal_logits).softmax(0)
        entropy = -(p * p.log()).sum()  # Eq. 3
        alignment = e * to_global + rest * to_local  # Eq. 4
        loss = similarity * entropy + (1 - similarity) * alignment  # Eq. 5
        adam.zero_grad()
        loss.backward()
        adam.step()
    return float(scalars.detach().softmax(0)[0])


def draw(rows: int, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of two heads, and distances to two descriptors."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, rows, classes, generator=generator, dtype=torch.float64)
    distances = 5 * torch.rand(2, rows, generator=generator, dtype=torch.float64)
    return (*logits, *distances)


def similarity_of(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.cosine_similarity(a.softmax(-1), b.softmax(-1))


@pytest.mark.parametrize(("steps", "lr"), [(1, 0.1), (20, 0.1), (20, 0.01), (60, 0.3)])
@pytest.mark.parametrize("classes", [2, 10])
def test_equation_5_is_minimised_as_by_adam_on_two_scalars(steps: int, lr: float, classes: int) -> None:
    global_logits, personal_logits, to_global, to_local = draw(12, classes)
    similarity = similarity_of(global_logits, personal_logits)
    got = head_weight(global_logits, personal_logits, similarity, to_global - to_local, steps, lr)
    want = [
        two_scalars(*row, steps, lr)
        for row in zip(global_logits, personal_logits, to_global.tolist(), to_local.tolist(), strict=True)
    ]
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-10)


def test_weight_of_a_sample_does_not_depend_on_its_batch_mates() -> None:
    global_logits, personal_logits, to_global, to_local = draw(32)
    arguments = global_logits, personal_logits, similarity_of(global_logits, personal_logits), to_global - to_local
    together = head_weight(*arguments, 20, 0.1)
    alone = torch.cat([head_weight(*(part[row : row + 1] for part in arguments), 20, 0.1) for row in range(32)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_twenty_steps_keep_the_weight_off_0_and_1() -> None:
    global_logits, personal_logits, to_global, to_local = draw(500)
    weight = head_weight(
        global_logits, personal_logits, torch.zeros_like(to_local), 100 * (to_global - to_local), 20, 0.1
    )
    assert 0.01 < float(weight.min()) < 0.1
    assert 0.9 < float(weight.max()) < 0.99


def test_without_steps_both_heads_count_the_same() -> None:
    global_logits, personal_logits, to_global, to_local = draw(4)
    assert head_weight(global_logits, personal_logits, torch.ones(4), to_global - to_local, 0, 0.1).eq(0.5).all()


def test_history_folds_every_sample_after_it_was_used() -> None:
    features = torch.tensor([1.0, 2, 3, 10, 5, 6], dtype=torch.float64).unsqueeze(1)
    used, end = fold_history(features, features[0], 0.1)
    np.testing.assert_allclose(used.squeeze().numpy(), [1, 1, 1.1, 1.29, 2.161, 2.4449], atol=1e-12)
    assert float(end) == pytest.approx(0.1 * 6 + 0.9 * 2.4449)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_the_history_of_any_number_of_rows_is_the_recursion_of_the_paper(rows: int, causal: bool) -> None:
    features = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    history, expected = torch.zeros(3, dtype=torch.float64), []
    for n, feature in enumerate(features):
        if causal:
            expected.append(history)
        if causal or n > 0:
            history = 0.1 * feature + 0.9 * history
        if not causal:
            expected.append(history)
    used, end = fold_history(features, torch.zeros(3, dtype=torch.float64), 0.1, causal=causal)
    torch.testing.assert_close(used, torch.stack(expected))
    torch.testing.assert_close(end, history)


def test_the_work_of_the_history_does_not_grow_with_the_square_of_its_rows() -> None:
    """50,000 rows would need a matrix of 20 GB."""
    used, _ = fold_history(torch.ones(50_000, 2), torch.zeros(2), 0.1)
    assert float(used[-1, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_history_is_the_same_however_the_stream_is_cut(
    size: int, model: FrozenModel, streams: Tensor, enrolment: Enrolment
) -> None:
    adapter, stream = create("fedthe"), streams[0, 0, :12]
    whole, parts = adapter.init(model, **enrolment), adapter.init(model, **enrolment)
    expected = adapter.step(model, whole, stream)
    answers = []
    for batch in stream.split(size):
        step = adapter.step(model, parts, batch)
        parts = step.state
        answers.append(step.logits)
    torch.testing.assert_close(parts.tensors["history"], expected.state.tensors["history"], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(answers), expected.logits, rtol=0, atol=1e-3)
    assert int(parts.tensors["samples"]) == 12


def test_official_history_starts_a_later_batch_from_the_last_history_and_skips_its_first_sample() -> None:
    features = torch.tensor([1.0, 2, 3, 10], dtype=torch.float64).unsqueeze(1)
    first, end = fold_history(features[:2], features[0], 0.1, causal=False)
    later, _ = fold_history(features[2:], end, 0.1, causal=False)
    np.testing.assert_allclose(torch.cat([first, later]).squeeze().numpy(), [1, 1.1, 1.1, 1.99], atol=1e-12)
    alone, end = fold_history(features[2:3], end, 0.1, causal=False)
    assert float(end) == float(alone) == pytest.approx(1.1)  # with batches of one it never moves again


def test_step_is_algorithm_2_line_by_line(
    make_model: Callable[..., FrozenModel], streams: Tensor, enrolment: Enrolment
) -> None:
    model = make_model()
    adapter = create("fedthe", alpha=0.2, beta=0.4, steps=7, lr=0.2)
    state = adapter.init(model, **enrolment)
    head, local = state.tensors["personal_head"].double(), state.tensors["descriptor"].double()
    h_global, history = model.source.descriptor.double(), None
    for batch in streams[1, :2, :5]:
        step = adapter.step(model, state, batch)
        state = step.state
        for row, image in enumerate(batch):
            frozen = model.frozen(image[None])
            h, z_g = frozen.features[0].double(), frozen.logits[0].double()  # lines 1 and 3
            history = h if history is None else history
            smoothed = 0.4 * h + 0.6 * history  # line 2
            z_l = head @ h
            distances = float((smoothed - h_global).norm()), float((smoothed - local).norm())
            e = two_scalars(z_g, z_l, *distances, 7, 0.2)  # lines 5 to 7
            history = 0.2 * h + 0.8 * history  # line 8
            assert step.signals["global_weight"][row] == pytest.approx(e, abs=1e-4)
            np.testing.assert_allclose(step.logits[row], e * z_g + (1 - e) * z_l, atol=2e-3)
    np.testing.assert_allclose(state.tensors["history"], history, atol=1e-5)


def test_personal_head_is_trained_as_by_torchs_sgd() -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.rand(70, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (70,), generator=generator)
    head = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    sgd = torch.optim.SGD(head.parameters(), lr=0.01, weight_decay=5e-4)
    order = torch.Generator().manual_seed(11)
    for _ in range(100):
        for rows in torch.randperm(70, generator=order).split(32):
            sgd.zero_grad()
            nn.functional.cross_entropy(head(features[rows]), labels[rows]).backward()
            sgd.step()
    got = train_head(features, nn.functional.one_hot(labels).double(), seed=11)
    torch.testing.assert_close(got, head.weight.detach(), rtol=0, atol=1e-12)


def test_permuting_the_classes_permutes_the_personal_head() -> None:
    features, targets = torch.rand(40, 5, dtype=torch.float64), nn.functional.one_hot(torch.arange(40) % 3).double()
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(train_head(features, targets[:, order], 0), train_head(features, targets, 0)[order])


def test_enrolment_learns_the_client(model: FrozenModel, enrolment: Enrolment) -> None:
    state = create("fedthe").init(model, **enrolment)
    features = model.frozen(enrolment["x"]).features
    torch.testing.assert_close(state.tensors["descriptor"], features.mean(0))
    accuracy = ((features @ state.tensors["personal_head"].T).argmax(1) == enrolment["labels"]).float().mean()
    assert float(accuracy) > 0.85
    again, other = (create("fedthe", seed=seed).init(model, **enrolment) for seed in (0, 1))
    assert again.to_bytes() == state.to_bytes()
    assert other.to_bytes() != state.to_bytes()


def test_client_that_has_not_enrolled_is_answered_by_the_global_head_and_told_so(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter = create("fedthe")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.signals["enrolled"] == 0.0
    assert torch.equal(step.logits, model.frozen(streams[0, 0]).logits)
    assert step.state.nbytes == 0


def test_enrolled_client_is_told_so_and_gets_a_weight_per_sample(
    model: FrozenModel, streams: Tensor, enrolment: Enrolment
) -> None:
    adapter = create("fedthe")
    step = adapter.step(model, adapter.init(model, **enrolment), streams[0, 0])
    assert step.signals["enrolled"] == 1.0
    assert len(step.signals["global_weight"]) == len(step.signals["similarity"]) == 20
    assert not torch.equal(step.logits, step.frozen_logits)


def without_bias(network: nn.Module, **source: Tensor) -> FrozenModel:
    weight = network.linear5.weight.detach().clone()
    network.linear5 = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    network.linear5.weight = nn.Parameter(weight)
    return FrozenModel.from_module(network, classifier="linear5", source=Source(prior=torch.full((10,), 0.1), **source))


def test_equal_heads_make_the_answer_independent_of_the_weight(network: nn.Module, streams: Tensor) -> None:
    model = without_bias(copy.deepcopy(network), descriptor=torch.rand(64))
    head = model.tensor("linear5.weight")
    for beta in (0.0, 1.0):
        adapter = create("fedthe", beta=beta)
        step = adapter.step(model, adapter.init(model, personal_head=head, descriptor=torch.zeros(64)), streams[0, 0])
        torch.testing.assert_close(step.logits, step.frozen_logits, rtol=0, atol=1e-5)
        assert min(step.signals["similarity"]) > 1 - 1e-5


def test_mixing_equal_logits_changes_no_bit() -> None:
    logits = torch.randn(5, 3)
    assert torch.equal(mix(torch.rand(5), logits, logits), logits)


def test_zero_feature_vectors_and_a_feature_on_the_descriptor_stay_finite(network: nn.Module) -> None:
    constant = nn.Sequential()
    constant.features = nn.Flatten()
    constant.head = nn.Linear(4, 3)
    source = Source(prior=torch.full((3,), 1 / 3), descriptor=torch.zeros(4))
    model = FrozenModel.from_module(constant, classifier="head", source=source)
    adapter = create("fedthe")
    state = adapter.init(model, personal_head=torch.zeros(3, 4), descriptor=torch.zeros(4))
    step = adapter.step(model, state, torch.zeros(2, 4))
    assert bool(step.logits.isfinite().all())
    assert all(0 <= s <= 1 for s in step.signals["similarity"])
    assert step.signals["alignment"] == 0.0


def test_state_has_the_size_of_head_two_features_and_a_counter(
    model: FrozenModel, streams: Tensor, enrolment: Enrolment
) -> None:
    adapter = create("fedthe")
    state = adapter.init(model, **enrolment)
    assert state.nbytes == 4 * (10 * 64 + 64 + 64) + 8
    assert adapter.step(model, state, streams[0, 0]).state.nbytes == state.nbytes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: {"x": e["x"]},
        lambda e: {"labels": e["labels"]},
        lambda e: {**e, "descriptor": torch.zeros(64)},
        lambda e: {"personal_head": torch.zeros(10, 64)},
        lambda e: {"personal_head": torch.zeros(64, 10), "descriptor": torch.zeros(64)},
        lambda e: {"personal_head": torch.zeros(10, 64), "descriptor": torch.full((64,), torch.nan)},
        lambda e: {**e, "labels": e["labels"][:-1]},
        lambda e: {**e, "labels": e["labels"].float()},
        lambda e: {**e, "labels": e["labels"] - 1 - int(e["labels"].min())},
        lambda e: {**e, "labels": e["labels"] + 10},
        lambda e: {"x": e["x"][:0], "labels": e["labels"][:0]},
        lambda e: {**e, "x": e["x"].mul(torch.inf)},
    ],
)
@pytest.mark.parametrize("name", ["fedthe", "fedthe_plus"])
def test_unusable_enrolment_is_refused(
    name: str, spoil: Callable[[Enrolment], Enrolment], model: FrozenModel, enrolment: Enrolment
) -> None:
    with pytest.raises(InputError):
        create(name).init(model, **spoil(enrolment))


@pytest.mark.parametrize("name", ["fedthe", "fedthe_plus"])
def test_model_without_a_global_descriptor_is_refused(name: str, make_model: Callable[..., FrozenModel]) -> None:
    adapter, model = create(name), make_model(descriptor=None)
    with pytest.raises(MissingSource, match="descriptor"):
        require(adapter, model)
    with pytest.raises(MissingSource, match="descriptor"):
        adapter.init(model)


def test_enrolled_tensors_are_copies(model: FrozenModel) -> None:
    head, descriptor = torch.zeros(10, 64), torch.zeros(64)
    state: State = create("fedthe").init(model, personal_head=head, descriptor=descriptor)
    head += 1
    descriptor += 1
    assert not state.tensors["personal_head"].any()
    assert not state.tensors["descriptor"].any()


def test_logits_that_overflow_are_an_error_without_a_warning(logit_model: Callable[..., FrozenModel]) -> None:
    model, adapter = logit_model([0.5, 0.5], torch.float32, descriptor=torch.zeros(2)), create("fedthe")
    state = adapter.init(model, personal_head=torch.full((2, 2), 10.0), descriptor=torch.zeros(2))
    with pytest.raises(NumericalError):
        adapter.step(model, state, torch.full((2, 2), 3e38))
