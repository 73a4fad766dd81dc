"""States that come from outside, and what they must prove before a client goes on from one."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from acclimate_adapters import Adapter, Labelled, State, StateCorrupt, StateMismatch, enrols, learns
from acclimate_adapters.guard import finite
from acclimate_service.errors import Problem
from acclimate_store import Bundle

_LONGEST_HISTORY = 2**53
_TAG = re.compile(r'"v(\d{1,15})"')


def etag(version: int) -> str:
    """The entity tag of a state."""
    return f'"v{version}"'


@dataclass(frozen=True, slots=True)
class Precondition:
    """The header If-Match: versions that may be replaced.

    Args:
        versions: None accepts any.
        exists: True accepts only a client that is there.
    """

    versions: frozenset[int] | None = None
    exists: bool = False

    @classmethod
    def parse(cls, header: str | None) -> "Precondition":
        """Read the header; None when the caller sent none.

        Raises:
            Problem: `invalid_request`.
        """
        if header is None:
            return cls()
        if header.strip() == "*":
            return cls(exists=True)
        tags = [_TAG.fullmatch(tag.strip()) for tag in header.split(",")]
        versions = frozenset(int(tag[1]) for tag in tags if tag is not None)
        if len(tags) != sum(tag is not None for tag in tags):
            detail = f"If-Match is {header[:40]!r}; it takes the ETag of an exported state, such as {etag(5)}, or *"
            raise Problem("invalid_request", detail)
        return cls(versions, exists=True)

    def check(self, version: int) -> None:
        """Refuse a state of another version; 0 is that of a client nobody has seen.

        Raises:
            Problem: `precondition_failed`.
        """
        if (self.versions is not None and version not in self.versions) or (self.exists and version == 0):
            found = etag(version) if version else "not there"
            raise Problem(
                "precondition_failed", f"the client's state is {found}, not what If-Match names; export it anew"
            )


def read(data: bytes, adapter: Adapter, bundle: Bundle) -> State:
    """Parse a state and make sure that the adapter can go on from it.

    Args:
        data: what `State.to_bytes` wrote.
        adapter: of the client.
        bundle: the model.

    Raises:
        Problem: `invalid_state`, or `state_mismatch` for a state of another adapter, layout or model.
    """
    try:
        state = State.from_bytes(data)
        state.require(adapter.name, adapter.layout, bundle.model.content_hash)
    except StateCorrupt as error:
        raise Problem("invalid_state", f"{error}; send what GET /clients/{{id}}/state gave") from error
    except StateMismatch as error:
        raise Problem("state_mismatch", f"{error}; configure the client first, or send its own state") from error
    _check_content(state, adapter, bundle)
    _check_use(state, adapter, bundle)
    return state


def _check_content(state: State, adapter: Adapter, bundle: Bundle) -> None:
    forms = [_form(adapter.init(bundle.model))]
    if enrols(adapter):
        x = bundle.prepare(np.zeros((1, *bundle.manifest.input.shape), np.uint8))
        forms.append(_form(adapter.init(bundle.model, x=x, labels=torch.zeros(1, dtype=torch.int64))))
    if _form(state) not in forms:
        wanted = " or ".join(_spell(form) for form in forms)
        detail = f"the state holds {_spell(_form(state))}; adapter {adapter.name!r} takes {wanted}"
        raise Problem("invalid_state", detail)
    if not 0 <= state.step <= _LONGEST_HISTORY:
        raise Problem("invalid_state", f"the state counts {state.step} batches; accepted are 0 to {_LONGEST_HISTORY}")
    if not finite(state):
        raise Problem("invalid_state", "the state holds numbers that are not finite")


def _check_use(state: State, adapter: Adapter, bundle: Bundle) -> None:
    """Learn and take a step for nobody: counts and indices may be such that no step succeeds."""
    x = bundle.prepare(np.zeros((2, *bundle.manifest.input.shape), np.uint8))
    try:
        if learns(adapter):
            state = adapter.learn(bundle.model, state, Labelled(torch.zeros(2, dtype=torch.int64), x))
        sound = finite(adapter.step(bundle.model, state, x).state)
    except Exception as error:  # an adapter may raise anything on numbers that it never makes
        raise Problem(
            "invalid_state", f"adapter {adapter.name!r} cannot go on from the state: {error}"[:300]
        ) from error
    if not sound:
        raise Problem("invalid_state", f"a step from this state is not finite under adapter {adapter.name!r}")


def _form(state: State) -> dict[str, tuple[Any, ...]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), *tensor.shape) for name, tensor in state.tensors.items()}


def _spell(form: dict[str, tuple[Any, ...]]) -> str:
    parts = [f"{name} {kind}{[*shape]}" for name, (kind, *shape) in sorted(form.items())]
    return (", ".join(parts) or "no tensors")[:400]
