"""What a camera sends that is covered or stuck is answered and teaches nothing."""

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import ADAPTERS, Adapter, FrozenModel, Source, State, StateMismatch, Step, create, guarded_step
from acclimate_adapters.frames import LEFT_OUT, Frames, noises
from acclimate_adapters.merged import Work, guarded_steps
from acclimate_learning.corruptions import FAMILIES, corrupt

BLACK = (0 - 0.286) / 0.353  # as the network sees it
each_method = pytest.mark.parametrize("name", [*sorted(ADAPTERS), "atp+fedcal", "bn_adapt+em"])


def begun(name: str, model: FrozenModel, x: Tensor) -> tuple[Adapter, State]:
    """An adapter and a client of it that has sent a batch."""
    quick = {"memo": {"views": 2}, "fedthe_plus": {"views": 2, "tuning_steps": 1}}
    adapter = create(name, **quick.get(name, {}))
    return adapter, guarded_step(adapter, model, adapter.init(model), x).state


def together(adapter: Adapter, model: FrozenModel, state: State, x: Tensor) -> Step:
    """The guarded step that is taken beside one of another client."""
    other = Work(create("em"), create("em").init(model), torch.rand_like(x))
    step, _ = guarded_steps(model, [Work(adapter, state, x, compare=True), other])
    if isinstance(step, Exception):
        raise step
    return step


@each_method
@pytest.mark.parametrize("take", [guarded_step, together])
@pytest.mark.parametrize("rows", [1, 20])
def test_black_frames_are_answered_and_no_method_learns_from_them(
    rows: int, take: object, name: str, model: FrozenModel, streams: Tensor
) -> None:
    adapter, state = begun(name, model, streams[0, 0, :10])
    before = state.to_bytes()
    black = torch.full((rows, 1, 28, 28), BLACK)
    step = take(adapter, model, state, black)  # type: ignore[operator]
    assert step.state.to_bytes() == before
    assert step.signals["skipped"] == step.signals["fallback"] == 1
    assert torch.equal(step.logits, model.frozen(black).logits)


@each_method
@pytest.mark.parametrize("take", [guarded_step, together])
def test_black_frames_among_others_change_nothing_about_what_is_learned(
    take: object, name: str, model: FrozenModel, streams: Tensor
) -> None:
    adapter, state = begun(name, model, streams[0, 0, :10])
    mixed = torch.full((8, 1, 28, 28), BLACK)
    mixed[1::2] = streams[0, 1, :4]
    step, alone = take(adapter, model, state, mixed), take(adapter, model, state, streams[0, 1, :4])  # type: ignore[operator]
    assert step.state.to_bytes() == alone.state.to_bytes()
    assert step.signals["skipped"] == 0.5
    torch.testing.assert_close(step.logits[1::2], alone.logits)
    torch.testing.assert_close(step.logits[::2], model.frozen(mixed[::2]).logits)


@each_method
def test_frame_that_a_stuck_camera_sends_again_and_again_is_answered_and_not_folded_in(
    name: str, model: FrozenModel, streams: Tensor
) -> None:
    adapter, state = begun(name, model, streams[0, 0, :10])
    step = guarded_step(adapter, model, state, streams[0, 1, :1].expand(20, -1, -1, -1))
    assert step.state.to_bytes() == state.to_bytes()
    assert step.signals["skipped"] == 1
    torch.testing.assert_close(step.logits, adapter.step(model, state, streams[0, 1, :1]).logits.expand(20, -1))


@pytest.mark.parametrize("take", [guarded_step, together])
def test_state_of_another_adapter_is_refused_even_by_black_frames(
    take: object, model: FrozenModel, streams: Tensor
) -> None:
    _, state = begun("atp", model, streams[0, 0])
    with pytest.raises(StateMismatch):
        take(create("fedcal"), model, state, torch.full((3, 1, 28, 28), BLACK))  # type: ignore[operator]


def test_repeated_frames_among_others_are_folded_in_once(model: FrozenModel, streams: Tensor) -> None:
    adapter, state = begun("atp", model, streams[0, 0])
    x = streams[0, 1, [0, 1, 0, 2, 1, 0]]
    step, once = guarded_step(adapter, model, state, x), guarded_step(adapter, model, state, streams[0, 1, :3])
    assert step.state.to_bytes() == once.state.to_bytes()
    assert step.signals["skipped"] == 0.5
    assert torch.equal(step.logits, once.logits[[0, 1, 0, 2, 1, 0]])


def test_noise_of_a_covered_sensor_is_flat_and_the_darkest_real_picture_is_not(streams: Tensor) -> None:
    levels = torch.randint(0, 4, (20, 1, 28, 28), generator=torch.Generator().manual_seed(0))
    assert Frames.of((levels / 255 - 0.286) / 0.353).folded == ()
    for client in streams:
        for batch in client:
            assert Frames.of(batch).complete


@pytest.mark.parametrize("name", ["atp", "balanced", "em", "memo"])
def test_noise_is_answered_and_not_folded_in_where_influence_is_bounded(
    name: str, model: FrozenModel, streams: Tensor
) -> None:
    adapter, state = begun(name, model, streams[0, 0, :8])
    x = streams[0, 1, :8].clone()
    x[[1, 6]] = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    step = guarded_step(adapter, model, state, x, influence=1e6)
    assert step.signals["skipped"] == 0.25
    others = guarded_step(adapter, model, state, x[[0, 2, 3, 4, 5, 7]], influence=1e6)
    assert step.state.to_bytes() == others.state.to_bytes()
    torch.testing.assert_close(step.logits[[1, 6]], model.frozen(x[[1, 6]]).logits)
    (served,) = guarded_steps(model, [Work(adapter, state, x)], influence=1e6)
    assert isinstance(served, Step)
    assert served.signals["skipped"] == 0.25
    assert guarded_step(adapter, model, state, x).signals["skipped"] == 0


def test_every_kind_of_noise_is_told_from_every_picture_however_it_is_corrupted(streams: Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    for noise in (
        torch.randn(400, 3, 32, 32, generator=draw),
        (torch.rand(400, 1, 28, 28, generator=draw) < 0.3).float(),
    ):
        assert sum(noises(noise)) >= 390
    assert noises(torch.randn(2, 1, 8, 8)) == noises(torch.randn(2, 300)) == [False, False]
    pixels = ((streams[:, 0].flatten(0, 1) * 0.353 + 0.286) * 255).round().to(torch.uint8)
    for family in FAMILIES:
        most = 0.05 if family in ("impulse_noise", "gamma") else 0  # a quarter of the pixels black or white
        assert sum(noises(corrupt(pixels, family, 5, draw).float())) <= most * len(pixels), family


def test_colour_without_texture_is_flat_and_one_textured_channel_is_enough() -> None:
    x = torch.tensor([0.5, -1.0, 2.0]).reshape(1, 3, 1, 1).expand(2, 3, 8, 8).clone()
    x[1, 2] = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    assert Frames.of(x) == Frames((1,), (LEFT_OUT, 0))


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1, 1)])
def test_rows_that_are_no_pictures_are_never_flat(shape: tuple[int, ...]) -> None:
    rows = torch.arange(3.0).reshape(3, *[1] * (len(shape) - 1)).expand(shape)
    assert Frames.of(rows).complete


def test_frames_of_equal_sums_are_told_apart() -> None:
    x = torch.zeros(3, 1, 2, 2)
    x[0, 0, 0, 0] = x[1, 0, 1, 1] = x[2, 0, 0, 0] = 1.0
    assert Frames.of(x) == Frames((0, 1), (0, 1, 0))


def test_frames_whose_features_are_all_the_same_are_not_folded_in() -> None:
    class Blind(nn.Sequential):
        """Sees no difference between any two pictures."""

    net = Blind()
    net.add_module("norm", nn.BatchNorm2d(1))
    net.add_module("shut", nn.Threshold(1e9, 0.5))
    net.add_module("flat", nn.Flatten())
    net.add_module("head", nn.Linear(16, 2))
    model = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.tensor([0.5, 0.5])))
    adapter = create("fedcal")
    x = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    step = guarded_step(adapter, model, adapter.init(model), x)
    assert step.state.step == 0
    assert step.signals["skipped"] == 1
    assert step.signals["fallback"] == 0
    assert guarded_step(adapter, model, adapter.init(model), x[:1]).state.step == 1  # of one row nothing can be said
