"""Every registered adapter through every check, in both precisions; to add an adapter is to add its examples here."""

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    ADAPTERS,
    Adapter,
    FrozenModel,
    InputError,
    Source,
    State,
    StateMismatch,
    Step,
    create,
    guarded_step,
)
from acclimate_adapters.adapter import step_cost
from acclimate_adapters.cost import Runs
from acclimate_adapters.network.model import Pass


@dataclass(frozen=True)
class Example:
    """An adapter with hyper-parameters worth checking.

    `neutral` are changes of hyper-parameters and of the source under which it must answer as the frozen model; None,
    with the reason, where no such setting exists.
    """

    name: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    neutral: tuple[Mapping[str, Any], Mapping[str, Any]] | None = ({}, {})
    no_neutral_because: str = ""
    enrolled: bool = False  # clients enrol with the anchors of the model

    def create(self) -> Adapter:
        adapter = create(self.name, **self.hyperparameters)
        return Enrolling(adapter) if self.enrolled else adapter

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.hyperparameters.values()), *["enrolled"] * self.enrolled])


@dataclass(frozen=True)
class Enrolling:
    """An adapter whose clients enrol with the anchors of the model."""

    adapter: Any

    def init(self, model: FrozenModel) -> State:
        inputs, labels = model.source.anchors
        return self.adapter.init(model, x=inputs, labels=labels)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        return self.adapter.step(model, state, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


PERSONAL_HEAD = "the personal head always has its say"
NOTHING_BENDS = {"style_rows": 1e9, "shrinkage": 1e9, "prior_rows": 1e9}  # the training side outweighs any client
ALL_ALIKE = torch.full((10, 10), 0.1)  # a confusion matrix that says nothing, so that no prior is estimated
NO_PRIOR_IS_EXACT = "the prior estimated from a few rows is never exactly that of the training data"
BATCH_NORM_STAYS_ON = "it normalises by the batch whatever its step size"

EXAMPLES = [
    Example("none"),
    Example("atp", {"mode": "online"}, neutral=({}, {"rates": {}})),
    Example("atp", {"mode": "batch"}, neutral=({}, {"rates": {}})),
    Example("atp+bbse", neutral=({}, {"rates": {}, "confusion": ALL_ALIKE})),
    Example("atp+em", {"atp": {"mode": "batch"}}, neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example(
        "atp+fedcal",
        {"atp": {"mode": "online"}, "fedcal": {"estimator": "fm", "window": 30}},
        neutral=({}, {"rates": {}, "prototypes": torch.zeros(10, 64)}),
    ),
    Example("balanced", neutral=(NOTHING_BENDS, {})),
    Example("balanced", {"memory": 0.9, "restart": "off"}, neutral=(NOTHING_BENDS, {})),
    Example("bbse", {"mode": "hard"}, neutral=({}, {"confusion": ALL_ALIKE})),
    Example("bbse", {"mode": "soft", "solver": "pinv"}, neutral=({}, {"confusion": ALL_ALIKE})),
    Example("bn_adapt", neutral=({"prior_strength": 1e9}, {})),
    Example("bn_adapt+fedcal", neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example(
        "consensus", neutral=None, no_neutral_because="it has no hyper-parameters, and T3A's veto is never complete"
    ),
    Example("dynfed", {"mode": "online"}, neutral=({}, {"rates": {}})),
    Example("dynfed", {"mode": "batch"}, neutral=({}, {"rates": {}})),
    Example("dynfed", {"arn": "mlp", "mode": "online"}, neutral=({"lam": 1.0}, {"rates": {}})),
    Example("dynfed", {"arn": "mlp", "mode": "batch"}, neutral=({"lam": 1.0}, {"rates": {}})),
    Example("em", neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example("fed_ade", neutral=({"eta_min": 0.0, "eta_max": 0.0}, {})),
    Example("fed_ade", {"eta_max": 0.1, "weights": "raw"}, neutral=({"eta_min": 0.0, "eta_max": 0.0}, {})),
    Example("fed_ade", {"layers": "all"}),  # nothing changes before the first round
    Example("fedcal", {"apply": "next"}, neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example("fedcal", {"estimator": "em"}, neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example("fedcal", {"estimator": "fm"}, neutral=({}, {"prototypes": torch.zeros(10, 64)})),
    Example("fedcal", {"window": 30, "rectify": "threshold"}, neutral=None, no_neutral_because=NO_PRIOR_IS_EXACT),
    Example("fedthe"),
    Example("fedthe", enrolled=True, neutral=None, no_neutral_because=PERSONAL_HEAD),
    Example("fedthe_plus"),
    Example(
        "fedthe_plus",
        {"views": 2, "tuning_steps": 1, "tuning_lr": 0.01},
        enrolled=True,
        neutral=None,
        no_neutral_because=PERSONAL_HEAD,
    ),
    Example("memo", {"views": 2, "lr": 0.01}, neutral=({"lr": 0.0}, {})),
    Example("portfolio"),  # without labels the frozen model answers
    Example("portfolio", {"arms": ("t3a", "memo(views=2)", "bn_adapt")}),
    Example("shot", {"lr": 0.01}, neutral=None, no_neutral_because=BATCH_NORM_STAYS_ON),
    Example("shot", {"lr": 0.01, "centroids": "soft"}, neutral=None, no_neutral_because=BATCH_NORM_STAYS_ON),
    Example("surgical", {"lr": 0.1}, neutral=({"lr": 0.0}, {})),
    Example("surgical", {"lr": 0.1, "modules": ("conv2", "bn2")}, neutral=({"lr": 0.0}, {})),
    Example("t3a", neutral=None, no_neutral_because="templates replace the classifier before the first batch"),
    Example("tent", {"lr": 0.01}, neutral=None, no_neutral_because=BATCH_NORM_STAYS_ON),
    Example("tent", {"optimizer": "adam"}, neutral=None, no_neutral_because=BATCH_NORM_STAYS_ON),
]


@pytest.fixture(
    scope="session",
    params=[torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=["float32", "float64"],
)
def precision(request: pytest.FixtureRequest) -> torch.dtype:
    """The precision of the model."""
    result: torch.dtype = request.param
    return result


@pytest.fixture(scope="session")
def make_model(
    precision: torch.dtype, network: nn.Module, source_quantities: Mapping[str, Any]
) -> Callable[..., FrozenModel]:
    """Freeze the network in that precision with some source quantities changed."""
    net = copy.deepcopy(network).to(precision)

    def make(**changes: Any) -> FrozenModel:
        return FrozenModel.from_module(net, classifier="linear5", source=Source(**{**source_quantities, **changes}))

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., FrozenModel]) -> FrozenModel:
    """The network in that precision with everything a source can carry."""
    return make_model()


@pytest.fixture(scope="session")
def streams(streams: Tensor) -> Tensor:
    """Batches of 12: two fill no window of the examples, three do."""
    return streams[:, :, :12]


each_example = pytest.mark.parametrize("example", EXAMPLES, ids=str)


class Stream(NamedTuple):
    """The first state of a client, and the steps of its three batches."""

    begin: State
    steps: list[Step]


@pytest.fixture(scope="session")
def alone(model: FrozenModel, streams: Tensor) -> Callable[..., Stream]:
    """A client of an example by itself, whose steps are taken once, as nothing changes them: `alone(example, 1)`."""
    taken: dict[tuple[str, int], Stream] = {}

    def stream(example: Example, client: int = 0) -> Stream:
        key = str(example), client
        if key not in taken:
            adapter = example.create()
            state = adapter.init(model)
            taken[key] = Stream(state, [])
            for batch in streams[client, :3]:
                taken[key].steps.append(adapter.step(model, state, batch))
                state = taken[key].steps[-1].state
        return taken[key]

    return stream


def hash_of(model: FrozenModel) -> dict[str, bytes]:
    return {name: model.tensor(name).numpy().tobytes() for name in model.modules}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def reread(state: State) -> State:
    return State.from_bytes(state.to_bytes())


def answers(adapter: Adapter, model: FrozenModel, stream: Tensor) -> list[Tensor]:
    state, logits = adapter.init(model), []
    for batch in stream:
        step = adapter.step(model, state, batch)
        state = step.state
        logits.append(step.logits)
    return logits


def test_every_registered_adapter_has_an_example() -> None:
    assert {example.name for example in EXAMPLES} >= ADAPTERS.keys()


@each_example
def test_step_changes_neither_its_inputs_nor_the_model(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = alone(example).steps[0].state
    x = streams[0, 1].clone()
    before = state.to_bytes(), x.clone(), hash_of(model)
    adapter.step(model, state, x)
    assert state.to_bytes() == before[0]
    assert same(x, before[1])
    assert hash_of(model) == before[2]


@each_example
def test_same_inputs_give_the_same_bits(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = alone(example).steps[0].state
    first, second = (adapter.step(model, state, streams[0, 1]) for _ in range(2))
    assert same(first.logits, second.logits)
    assert first.state.to_bytes() == second.state.to_bytes()
    assert first.signals == second.signals


@each_example
def test_step_after_saving_and_loading_is_the_same_step(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = alone(example).steps[0].state
    loaded = reread(state)
    a, b = (adapter.step(model, s, streams[0, 1]) for s in (state, loaded))
    assert same(a.logits, b.logits)
    assert a.state.to_bytes() == b.state.to_bytes()


@each_example
def test_interleaved_clients_answer_as_if_alone(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    states = [adapter.init(model), adapter.init(model)]
    for k in range(3):
        for c in (0, 1):
            step = adapter.step(model, states[c], streams[c, k])
            states[c] = step.state
            assert same(step.logits, alone(example, c).steps[k].logits)


@each_example
def test_logits_are_finite_and_the_state_counts_batches(
    example: Example, model: FrozenModel, alone: Callable[..., Stream]
) -> None:
    for k, step in enumerate(alone(example).steps):
        assert step.logits.shape == (12, 10)
        assert step.logits.dtype == model.dtype
        assert bool(step.logits.isfinite().all())
        assert step.state.step == k + 1


@each_example
def test_batch_of_one_is_answered(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = adapter.step(model, alone(example).begin, streams[0, 0, :1]).state
    step = adapter.step(model, state, streams[0, 0, 1:2])
    assert step.logits.shape == (1, 10)
    assert bool(step.logits.isfinite().all())
    assert all(bool(t.isfinite().all()) for t in step.state.tensors.values())


@each_example
def test_neutral_setting_answers_as_the_frozen_model(
    example: Example, make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    if example.neutral is None:
        assert example.no_neutral_because
        pytest.skip(example.no_neutral_because)
    hyperparameters, source = example.neutral
    adapter, model = create(example.name, **{**example.hyperparameters, **hyperparameters}), make_model(**source)
    batches = streams[0, :3].to(model.dtype)
    for logits, batch in zip(answers(adapter, model, batches), batches, strict=True):
        torch.testing.assert_close(logits.softmax(-1), model.frozen(batch).logits.softmax(-1), rtol=0, atol=1e-6)


@each_example
def test_state_of_another_adapter_layout_or_model_is_refused(
    example: Example, model: FrozenModel, make_model: Callable[..., FrozenModel], streams: Tensor
) -> None:
    adapter = example.create()
    state = adapter.init(model)
    strangers = [
        State("someone-else", state.layout, state.model, 0, state.tensors),
        State(state.adapter, state.layout + 1, state.model, 0, state.tensors),
        adapter.init(make_model(prior=torch.tensor([0.19] + [0.09] * 9))),
    ]
    for stranger in strangers:
        with pytest.raises(StateMismatch):
            adapter.step(model, stranger, streams[0, 0])


@each_example
def test_unusable_batch_is_refused_and_the_state_kept(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = alone(example).steps[0].state
    before = state.to_bytes()
    for pixel in (float("nan"), float("inf")):
        x = streams[0, 1].clone()
        x[3, 0, 5, 5] = pixel
        with pytest.raises(InputError):
            adapter.step(model, state, x)
    with pytest.raises(InputError):
        adapter.step(model, state, streams[0, 1, :0])
    assert state.to_bytes() == before


@each_example
def test_guarded_step_is_the_step_when_nothing_goes_wrong(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    plain = alone(example).steps[0]
    guarded = guarded_step(example.create(), model, alone(example).begin, streams[0, 0])
    assert same(plain.logits, guarded.logits)
    assert guarded.signals["fallback"] == 0


@each_example
def test_channels_last_answers_and_remembers_the_same(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter, other = example.create(), model.with_layouts(frozen=True, adapted=True)
    here = there = alone(example).begin
    for batch in streams[0, :2, :8]:
        expected, step = adapter.step(model, here, batch), adapter.step(other, there, batch)
        torch.testing.assert_close(step.logits.softmax(-1), expected.logits.softmax(-1), rtol=0, atol=1e-3)
        here, there = expected.state, step.state
    for name, tensor in here.tensors.items():
        torch.testing.assert_close(there.tensors[name], tensor, rtol=1e-2, atol=1e-3)
    assert same(adapter.step(model, there, batch).logits, adapter.step(model, reread(there), batch).logits)


SPOILT = {
    "shape": lambda tensor: tensor.reshape(-1)[:1] if tensor.dim() else tensor[None],  # broadcast, it would be taken
    "kind": lambda tensor: tensor.to(torch.complex64 if tensor.is_floating_point() else torch.int32),
}


@each_example
def test_the_cost_that_an_adapter_names_is_that_of_the_passes_it_takes(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, passes = example.create(), dict.fromkeys(("forward", "gradient"), Runs())
    state = alone(example).begin

    def run(self: FrozenModel, x: Tensor, tensors: Mapping[str, Tensor] | None = None, normalise: Any = None) -> Pass:
        kind = "gradient" if any(tensor.requires_grad for tensor in (tensors or {}).values()) else "forward"
        passes[kind] = passes[kind].and_also(Runs(1, len(x)))
        return original(self, x, tensors, normalise)

    original = FrozenModel.run
    monkeypatch.setattr(FrozenModel, "run", run)
    adapter.step(model, state, streams[0, 0, :7])
    declared = step_cost(adapter, model, 7)
    if example.name in ("balanced", "consensus"):  # a further pass, should the client have changed
        assert passes["forward"].and_also(Runs(1, 7)) == declared.forward
    elif example.hyperparameters.get("layers") == "all":  # the passes of the round that follows, too
        assert passes == {"forward": declared.forward, "gradient": Runs()}
    elif example.name == "fedthe_plus" and not example.enrolled:  # as if the client might enrol
        assert passes == {"forward": Runs(1, 7), "gradient": Runs()}
    else:
        assert passes == {"forward": declared.forward, "gradient": declared.gradient}
    assert adapter.step(model, state, streams[0, 0, :7]).logits.shape == (7, 10)


@each_example
def test_a_state_of_another_form_is_refused(
    example: Example, model: FrozenModel, streams: Tensor, alone: Callable[..., Stream]
) -> None:
    adapter = example.create()
    state = alone(example).steps[0].state
    state.require_form(adapter.form(model, state))
    spoilt = {"strange": {**state.tensors, "stranger": torch.zeros(1)}}
    for name, tensor in state.tensors.items():
        others = {key: each for key, each in state.tensors.items() if key != name}
        spoilt |= {f"{name} of another {kind}": {**others, name: spoil(tensor)} for kind, spoil in SPOILT.items()}
        if name.endswith("rows") or not tensor.is_floating_point():  # what is counted
            spoilt[f"{name} below 0"] = {**others, name: torch.full_like(tensor, -1)}
        if others:  # none at all is the state of a client that has not enrolled
            spoilt[f"no {name}"] = others
    for what, tensors in spoilt.items():
        other = State(state.adapter, state.layout, state.model, state.step, tensors)
        try:
            adapter.step(model, other, streams[0, 1])
        except StateMismatch:
            continue
        pytest.fail(f"{what}: it was not refused")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32], indirect=True)
@each_example
def test_a_cuda_device_answers_as_the_cpu(
    example: Example, model: FrozenModel, cuda_model: FrozenModel, streams: Tensor
) -> None:
    adapter = example.create()
    here, there = adapter.init(model), adapter.init(cuda_model)
    for batch in streams[0, :2, :8]:
        expected, step = adapter.step(model, here, batch), adapter.step(cuda_model, there, batch)
        assert step.logits.is_cuda
        torch.testing.assert_close(step.logits.cpu().softmax(-1), expected.logits.softmax(-1), rtol=0, atol=2e-3)
        here, there = expected.state, reread(step.state)  # whose tensors are on the CPU
    assert here.nbytes == there.nbytes
    assert bool(adapter.step(cuda_model, here, streams[0, 3]).logits.isfinite().all())  # a client that changed replica


@pytest.mark.slow
@each_example
def test_neither_state_nor_hooks_nor_memory_grow_over_500_steps(
    example: Example, model: FrozenModel, streams: Tensor
) -> None:
    adapter = example.create()
    batches = streams[0].flatten(0, 1).reshape(36, 2, 1, 28, 28)

    def run(state: State, steps: int) -> State:
        for k in range(steps):
            state = adapter.step(model, state, batches[k % 36]).state
        return state

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    state = run(adapter.init(model), 100)  # enough for bounded windows to fill
    size, tensors = state.nbytes, live_tensors()
    state = run(state, 400)
    assert state.nbytes == size
    assert live_tensors() <= tensors
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model._net.modules())


class Watched:
    """A source that notes which of its quantities are read."""

    def __init__(self, source: Source) -> None:
        self._source, self.read = source, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name != "present":
            self.read.add(name.removesuffix("_matrix"))
        return getattr(self._source, name)


@each_example
def test_every_quantity_that_is_read_is_named_among_the_needs(
    example: Example, model: FrozenModel, streams: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, watched, anchored = example.create(), Watched(model.source), model.anchor_features
    fresh = copy.copy(model)
    fresh.source, fresh._derived = watched, {}  # what was derived before need not be read again
    del fresh.anchor_features

    def anchor_features(of: FrozenModel) -> Any:
        watched.read.add("anchors")
        return anchored

    monkeypatch.setattr(FrozenModel, "anchor_features", property(anchor_features), raising=False)
    state = adapter.init(fresh)
    if example.enrolled:
        watched.read.discard("anchors")  # they are the client's own images here
    for batch in streams[0, :2, :8]:
        state = guarded_step(adapter, fresh, state, batch).state
    assert watched.read <= adapter.needs
