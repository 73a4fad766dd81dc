import json
import re

import pytest
import safetensors.torch
import torch
from torch import Tensor

from acclimate_adapters import State, StateCorrupt, StateMismatch
from acclimate_adapters.state import Form


@pytest.fixture
def state() -> State:
    return State("atp", 1, "0123456789abcdef", 3, {"b": torch.arange(4.0), "a": torch.ones(2, 2, dtype=torch.float64)})


def test_bytes_and_back_is_the_same_state(state: State) -> None:
    back = State.from_bytes(state.to_bytes())
    assert (back.adapter, back.layout, back.model, back.step) == ("atp", 1, "0123456789abcdef", 3)
    assert back.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)


def test_equal_states_give_equal_bytes(state: State) -> None:
    reordered = State(state.adapter, state.layout, state.model, state.step, dict(reversed(state.tensors.items())))
    assert len({s.to_bytes() for s in [state, reordered] * 20}) == 1


def test_state_without_tensors_survives() -> None:
    assert State.from_bytes(State("none", 1, "f" * 16).to_bytes()).tensors == {}


def test_strided_tensors_are_stored_as_their_values() -> None:
    strided = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(State.from_bytes(State("a", 1, "f", 0, {"t": strided}).to_bytes()).tensors["t"], strided)


def test_tensors_that_share_memory_are_stored_each_for_itself() -> None:
    memory = torch.arange(6.0)
    state = State("a", 1, "f", 0, {"whole": memory, "again": memory, "part": memory[2:4]})
    loaded = State.from_bytes(state.to_bytes())
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in state.tensors.items())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:50],
        lambda data: data[:-1],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"acclimate", b"something"),
        lambda data: b"\x80\x04K\x01.",  # a pickle
    ],
    ids=["empty", "head only", "a byte short", "absurd length", "no header", "pickle"],
)
def test_bytes_that_are_no_state_are_refused(state: State, damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(StateCorrupt):
        State.from_bytes(damage(state.to_bytes()))


def test_tensors_cannot_be_replaced_from_outside(state: State) -> None:
    with pytest.raises(TypeError):
        state.tensors["a"] = torch.zeros(1)  # type: ignore[index]


@pytest.mark.parametrize(
    "wanted", [("tent", 1, "0123456789abcdef"), ("atp", 2, "0123456789abcdef"), ("atp", 1, "fedcba9876543210")]
)
def test_state_for_something_else_is_refused_with_what_differs(state: State, wanted: tuple[str, int, str]) -> None:
    with pytest.raises(StateMismatch, match="was made for"):
        state.require(*wanted)
    state.require("atp", 1, "0123456789abcdef")


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(1), "has shape [1], not [3]"),
        (torch.zeros(3, dtype=torch.float64), "is of torch.float64, not torch.float32"),
        (torch.tensor([0.0, 1.0, -1e-6]), "holds numbers outside 0..1"),
        (torch.tensor([0.0, 1.0, torch.nan]), "holds numbers outside 0..1"),
        (torch.tensor([0.0, 1.0, 1.0]), None),
    ],
    ids=["shape", "kind", "range", "nan", "edge"],
)
def test_a_tensor_of_another_shape_kind_or_range_is_refused(tensor: Tensor, problem: str | None) -> None:
    state, form = State("a", 1, "m", tensors={"w": tensor}), Form((3,), (torch.float32,), 0, 1)
    if problem is None:
        state.require_form({"w": form})
    else:
        with pytest.raises(StateMismatch, match=re.escape(f"w of the state {problem}")):
            state.require_form({"w": form})
    with pytest.raises(StateMismatch, match="lacks the tensors v and holds w instead"):
        state.require_form({"v": form})


@pytest.mark.parametrize("field", ["step", "layout"])
@pytest.mark.parametrize("value", [-5, 1.9, True, "3", 2**53 + 1, None])
def test_a_header_with_anything_but_a_count_is_corrupt(field: str, value: object) -> None:
    header = {"adapter": "a", "layout": 1, "model": "m", "step": 3, field: value}
    data = safetensors.torch.save({"w": torch.zeros(1)}, {"acclimate": json.dumps(header)})
    with pytest.raises(StateCorrupt, match="where int belongs"):
        State.from_bytes(data)
