"""Which states stay in a device's memory: those of the clients that came last, within a budget of bytes."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from acclimate_service.compute.client_state import ClientState


def device_bytes(state: ClientState) -> int:
    """Bytes of a state that are not in the host's memory."""
    return sum(tensor.nbytes for tensor in state.state.tensors.values() if tensor.device.type != "cpu")


def to_host(state: ClientState) -> ClientState:
    """The same state in the host's memory; the next step takes it back to the device. Waits for the device."""
    tensors = {name: tensor.cpu() for name, tensor in state.state.tensors.items()}
    return replace(state, state=replace(state.state, tensors=tensors))


class DeviceCache:
    """Keeps count of the states on a device, and names those that have to leave it, least recently used first.

    Args:
        budget: bytes of the device's memory.
        weigh: bytes of a state on the device.
        move: how a state leaves it; runs in a thread of its own.
    """

    def __init__(
        self,
        budget: int,
        weigh: Callable[[ClientState], int] = device_bytes,
        move: Callable[[ClientState], ClientState] = to_host,
    ) -> None:
        self.move = move
        self.nbytes = 0
        self._whole = self._budget = budget
        self._weigh = weigh
        self._there: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._there)

    def divide(self, parts: int) -> None:
        """Keep to one of so many parts of the budget, from the next state on that is noted."""
        self._budget = self._whole // parts

    def used(self, client: str, state: ClientState | None) -> list[str]:
        """Note the state that a client has now, if any, and give the clients whose states have to leave.

        They count as gone at once, until they are used again.
        """
        self.nbytes -= self._there.pop(client, 0)
        nbytes = 0 if state is None else self._weigh(state)
        if nbytes:
            self._there[client] = nbytes
            self.nbytes += nbytes
        leaving = []
        while self.nbytes > self._budget:
            name, freed = self._there.popitem(last=False)
            self.nbytes -= freed
            leaving.append(name)
        return leaving
