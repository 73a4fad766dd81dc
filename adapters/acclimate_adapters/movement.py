"""How far a client's network has moved from the global one."""

import torch

from acclimate_adapters.adapter import Adapter, Moving
from acclimate_adapters.compression.sensitivity import scale
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import State


def movement(adapter: Adapter, model: FrozenModel, state: State) -> dict[str, float]:
    """Size of the adaptation by module: root mean square of the change, relative to the `scale` of the module.

    Args:
        adapter: whose state it is; one that is not `Moving` moves nothing.
        model: the frozen model.
        state: of the client.
    """
    moved = adapter.moved(model, state) if isinstance(adapter, Moving) else {}
    if not moved:
        return {}
    lengths = torch.stack(torch._foreach_norm([each.float() for each in moved.values()])).tolist()
    scales = model.derived(_scales)
    return {
        name: length / change.numel() ** 0.5 / scales[name]
        for (name, change), length in zip(moved.items(), lengths, strict=True)
    }


def _scales(model: FrozenModel) -> dict[str, float]:
    return {name: scale(model, name) for name in model.modules}
