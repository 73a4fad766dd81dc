"""CUDA graphs: what launches hundreds of kernels one by one is captured once and then replayed as a whole."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

CAPACITY: Final = 8
"""Graphs that are kept."""
PATIENCE: Final = 8
"""Calls of one signature before it is captured: as many as a capture runs, so that mixed sizes cost little more."""
REMEMBERED: Final = 64
"""Signatures whose calls are counted."""
WARM_UP: Final = 3
"""Runs before a capture, in which libraries choose their kernels and reserve what they work in."""


class Outcome(NamedTuple):
    """What a function gives."""

    tensors: tuple[Tensor, ...]  # without autograd's history
    notes: tuple[str, ...] = ()  # what depends on nothing but the shapes of the arguments


Function: TypeAlias = Callable[[Sequence[Tensor]], Outcome]
"""Pure, and without a look at what is in its tensors: that would wait for the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A function at arguments of fixed shapes.

    Args:
        inputs: what it reads.
        outcome: where it writes.
        replay: does so once more.
    """

    inputs: tuple[Tensor, ...]
    outcome: Outcome
    replay: Callable[[], None]

    def __call__(self, arguments: Sequence[Tensor]) -> Outcome:
        """The function at these arguments; the tensors are the caller's own."""
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(self.inputs, list(arguments))
            self.replay()
            tensors = tuple(torch.empty_like(tensor) for tensor in self.outcome.tensors)
            torch._foreach_copy_(tensors, self.outcome.tensors)
        return Outcome(tensors, self.outcome.notes)


class Capture(Protocol):
    """How functions are captured."""

    def possible(self) -> bool:
        """Whether the caller's thread may capture and replay now."""
        ...

    def __call__(self, function: Function, arguments: Sequence[Tensor]) -> Captured:
        """Capture a function at arguments like these, which are only read; called without gradient."""
        ...


class CudaCapture:
    """Captures on a stream of its own, into memory that all graphs share: none is replayed beside another.

    Who works on another stream than the default one, be it to capture a graph of his own, is not served.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def possible(self) -> bool:
        """As `Capture`."""
        return torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device)

    def __call__(self, function: Function, arguments: Sequence[Tensor]) -> Captured:
        """As `Capture`; raises whatever the function raises because it is being captured."""
        graph = torch.cuda.CUDAGraph()
        home = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            inputs = tuple(argument.clone() for argument in arguments)
            self._side.wait_stream(home)
            try:
                # entered here, too, because a capture that fails does not leave the stream itself
                with torch.cuda.stream(self._side):
                    for _ in range(WARM_UP):
                        function(inputs)
                    # other threads go on allocating, reading and writing meanwhile
                    with torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local"):
                        outcome = function(inputs)
            finally:
                home.wait_stream(self._side)
        return Captured(inputs, outcome, graph.replay)


class Graphs:
    """Calls functions, or replays a graph where a call is like many before.

    Calls are alike if they are of one function, by its key, with arguments of the same shapes and types. May be used by
    several threads at once.

    Args:
        capture: None calls every function plainly, as on a CPU.
        capacity: graphs that are kept; the one used longest ago goes first.
        patience: plain calls before a capture, at least 1.

    Attributes:
        captured: how many graphs were made.
        failures: of functions that cannot be captured, by key, what was said; they go on being called plainly.
    """

    def __init__(self, capture: Capture | None, *, capacity: int = CAPACITY, patience: int = PATIENCE) -> None:
        self._capture = capture
        self._capacity, self._patience = capacity, patience
        self._graphs: OrderedDict[Hashable, Captured] = OrderedDict()
        self._calls: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.RLock()
        self.captured = 0
        self.failures: dict[Hashable, str] = {}

    @property
    def active(self) -> bool:
        """Whether graphs are made at all."""
        return self._capture is not None

    def fresh(self) -> "Graphs":
        """Others of the same kind, for functions that have the same keys but are not the same."""
        return Graphs(self._capture, capacity=self._capacity, patience=self._patience)

    def call(self, key: Hashable, function: Function, arguments: Sequence[Tensor]) -> Outcome:
        """The function at these arguments.

        Args:
            key: names the function and every constant in it.
            function: what to call.
            arguments: tensors on the device of the graphs.

        Raises:
            Exception: whatever the function raises.
        """
        capture = self._capture
        if capture is None or not capture.possible():
            return function(arguments)
        signature = key, *((argument.shape, argument.dtype) for argument in arguments)
        with self._lock:
            graph = self._graphs.get(signature)
            if graph is None and self._calls.get(signature, 0) >= self._patience and key not in self.failures:
                graph = self._remember(capture, key, signature, function, arguments)
            if graph is not None:
                self._graphs.move_to_end(signature)
                return graph(arguments)
        outcome = function(arguments)
        with self._lock:
            self._count(signature)
        return outcome

    def _count(self, signature: Hashable) -> None:
        """Count a call that went well: one that raises says nothing about whether the function can be captured."""
        self._calls[signature] = self._calls.pop(signature, 0) + 1
        if len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)

    def _remember(
        self, capture: Capture, key: Hashable, signature: Hashable, function: Function, arguments: Sequence[Tensor]
    ) -> Captured | None:
        del self._calls[signature]
        try:
            with torch.inference_mode(False), torch.no_grad():
                graph = capture(function, arguments)
        except Exception as error:  # the plain calls before went well, so it is the capture that fails
            self.failures[key] = f"{type(error).__name__}: {error}"
            return None
        self._graphs[signature] = graph
        self.captured += 1
        if len(self._graphs) > self._capacity:
            self._graphs.popitem(last=False)
        return graph


def filled(x: Tensor) -> Tensor:
    """The rows of x [B, ...], B >= 1, and rows of zeros up to the next power of two."""
    missing = (1 << (len(x) - 1).bit_length()) - len(x)
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def graphs_for(device: torch.device) -> Graphs:
    """Graphs of a CUDA device; plain calls elsewhere."""
    return Graphs(CudaCapture(device) if device.type == "cuda" else None)
