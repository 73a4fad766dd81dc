"""How much of Redis's memory a client takes: its state, earlier ones, journal, timeline, and what repeats are told."""

from acclimate_service.state.redis.keys import ClientScope
from acclimate_service.state.redis.scripts import FOOTPRINT
from acclimate_service.state.redis.wire import Wire


async def footprint(wire: Wire, client: ClientScope, model: str, sid: str = "") -> int:
    """Bytes of all keys of a client in one model scope, as Redis counts them; those of a lease or an upload
    are not among them, which end by themselves.

    Args:
        wire: exchanges with Redis.
        client: whose.
        model: model scope.
        sid: id of the live snapshot, where the caller knows it.

    Raises:
        StateError: Redis failed.
    """
    while True:
        keys = (
            client.head(model),
            client.snapshot(model, sid),
            *client.requests,
            client.journal(model),
            client.timeline(model),
            *client.kept(model),
        )
        status, told = (await wire.run(FOOTPRINT, keys, (sid,))).rows
        if status == b"OK":
            return int(told)
        sid = told.decode()  # another snapshot is live by now
