"""The state of every client, in Redis: exactly once, whatever fails.

`Session` serves one client on one replica; `StateStore` is the door to Redis behind it. `connect` and `Wire` bring both
to a Redis or a Redis Cluster, `check` refuses one that could lose state, and `Announcements` hear what other replicas
say.
"""

from acclimate_service.state.census import Census, clients_of_version, take_census
from acclimate_service.state.contract import (
    Applied,
    Change,
    Earlier,
    Lineage,
    Looked,
    Policy,
    Present,
    Request,
    Start,
    always,
)
from acclimate_service.state.encoding import Batch, Point, event, hashing
from acclimate_service.state.errors import (
    ClientDeleted,
    ClientUnknown,
    Contended,
    Doubt,
    ForeignValue,
    JournalFull,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    OutOfOrder,
    Paused,
    RateExceeded,
    RequestRunning,
    StateCorrupt,
    StateError,
    StateUnreadable,
    StepFailed,
    StoreFull,
    StoreUnavailable,
    StoreUnfit,
    TooManyBytes,
    TooManyClients,
    VersionUnknown,
)
from acclimate_service.state.held import Context
from acclimate_service.state.limits import Limits
from acclimate_service.state.listing import Listed, Listing, StaleCursor
from acclimate_service.state.places import Places, Usage
from acclimate_service.state.presence import EVERY_S as PRESENCE_EVERY_S
from acclimate_service.state.presence import Presence
from acclimate_service.state.rates import Rates
from acclimate_service.state.records import Description, Head, Kept, Snapshot
from acclimate_service.state.redis.announcements import Announcements
from acclimate_service.state.redis.checks import Probe, StoreFacts, check, check_windows, inspect
from acclimate_service.state.redis.embedded import (
    EmbeddedRedis,
    EmbeddedRedisError,
    available_memory,
    find_server,
    running_at,
)
from acclimate_service.state.redis.keys import ClientScope, check_model, fingerprint, new_id, random_rid
from acclimate_service.state.redis.link import Link
from acclimate_service.state.redis.wire import DEADLINE, Argument, Wire, connect
from acclimate_service.state.replay_queue import ReplayQueue
from acclimate_service.state.session import Session
from acclimate_service.state.store import StateStore
from acclimate_service.state.tasks import Tasks
from acclimate_service.state.timeline import coarser

__all__ = [
    "DEADLINE",
    "PRESENCE_EVERY_S",
    "Announcements",
    "Applied",
    "Argument",
    "Batch",
    "Census",
    "Change",
    "ClientDeleted",
    "ClientScope",
    "ClientUnknown",
    "Contended",
    "Context",
    "Description",
    "Doubt",
    "Earlier",
    "EmbeddedRedis",
    "EmbeddedRedisError",
    "ForeignValue",
    "Head",
    "JournalFull",
    "Kept",
    "KeyReused",
    "KeyUsedBeforeDelete",
    "Limits",
    "Lineage",
    "Link",
    "Listed",
    "Listing",
    "Looked",
    "OtherModel",
    "OutOfOrder",
    "Paused",
    "Places",
    "Point",
    "Policy",
    "Presence",
    "Present",
    "Probe",
    "RateExceeded",
    "Rates",
    "ReplayQueue",
    "Request",
    "RequestRunning",
    "Session",
    "Snapshot",
    "StaleCursor",
    "Start",
    "StateCorrupt",
    "StateError",
    "StateStore",
    "StateUnreadable",
    "StepFailed",
    "StoreFacts",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnfit",
    "Tasks",
    "TooManyBytes",
    "TooManyClients",
    "Usage",
    "VersionUnknown",
    "Wire",
    "always",
    "available_memory",
    "check",
    "check_model",
    "check_windows",
    "clients_of_version",
    "coarser",
    "connect",
    "event",
    "find_server",
    "fingerprint",
    "hashing",
    "inspect",
    "new_id",
    "random_rid",
    "running_at",
    "take_census",
]
