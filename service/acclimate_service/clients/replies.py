"""From what became of a request to what its caller is told."""

from collections.abc import Mapping
from typing import Any

from acclimate_service.clients.requests import Reply
from acclimate_service.compute import answers
from acclimate_service.compute.configuration import Configurations
from acclimate_service.state import Applied, ClientScope, Looked, StateStore


class Replies:
    """Makes the replies for the clients of one model.

    Args:
        store: the states.
        model: content hash of the model.
        configurations: the adapters.
    """

    def __init__(self, store: StateStore, model: str, configurations: Configurations) -> None:
        self._store = store
        self._model = model
        self._configurations = configurations

    async def of(self, client: ClientScope, applied: Applied) -> Reply:
        """The reply to a request that is part of the client's history.

        Raises:
            StateError: Redis failed; the request is part of the history all the same.
        """
        if applied.answer is not None:
            answer = answers.decode(applied.answer)
        else:
            answer = {"adapter": await self.adapter_of(client), **answers.UNAVAILABLE}
        return Reply(answer, applied.seq, _status(answer, applied.status), True, applied.replayed, applied.lost)

    def of_look(self, looked: Looked) -> Reply:
        """The reply to a batch that changes nothing."""
        answer = answers.decode(looked.answer)
        return Reply(answer, looked.seq, _status(answer, looked.status), False)

    async def adapter_of(self, client: ClientScope) -> str:
        """Name of the adapter a client runs, or would begin with."""
        stored = await self._store.describe(client, self._model)
        adapter: str = self._configurations.describe(stored.config if stored else "")["adapter"]
        return adapter


def _status(answer: Mapping[str, Any], found: str) -> str:
    """Where the state was found, unless there is something to be said about the answer itself."""
    guarded = answer.get("guard", {}).get("answering") == "frozen"
    return "guarded" if guarded and found != "rolled_back" else found
