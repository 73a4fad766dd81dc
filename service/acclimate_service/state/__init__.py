"""The state of every client, in Redis: exactly once, whatever fails.

`StateStore` is the door; `connect` and `Wire` bring it to a Redis, `check` refuses one that could lose state.
"""

from acclimate_service.state.checks import Durability, StoreFacts, check, check_windows, inspect
from acclimate_service.state.errors import Effect, StateCorrupt, StateError, StoreFull, StoreUnavailable, StoreUnfit
from acclimate_service.state.keys import ClientScope, fingerprint, new_id, random_rid
from acclimate_service.state.limits import Limits
from acclimate_service.state.records import (
    Absent,
    Attempt,
    Basis,
    CommitOutcome,
    Committed,
    Conflict,
    Deleted,
    DeleteOutcome,
    Description,
    Gone,
    Head,
    Incomplete,
    Loaded,
    Marker,
    Mismatch,
    Moved,
    ReadOutcome,
    Replay,
    ResetOutcome,
    Restored,
    Snapshot,
    Used,
)
from acclimate_service.state.store import StateStore
from acclimate_service.state.wire import Wire, connect

__all__ = [
    "Absent",
    "Attempt",
    "Basis",
    "ClientScope",
    "CommitOutcome",
    "Committed",
    "Conflict",
    "DeleteOutcome",
    "Deleted",
    "Description",
    "Durability",
    "Effect",
    "Gone",
    "Head",
    "Incomplete",
    "Limits",
    "Loaded",
    "Marker",
    "Mismatch",
    "Moved",
    "ReadOutcome",
    "Replay",
    "ResetOutcome",
    "Restored",
    "Snapshot",
    "StateCorrupt",
    "StateError",
    "StateStore",
    "StoreFacts",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnfit",
    "Used",
    "Wire",
    "check",
    "check_windows",
    "connect",
    "fingerprint",
    "inspect",
    "new_id",
    "random_rid",
]
