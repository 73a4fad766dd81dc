"""Client for Acclimate: predictions that adapt to each client.

Example:
    >>> with Client("http://127.0.0.1:8000") as client:
    ...     prediction = client.predict("cam-7", images)
"""

from acclimate_client._checks import Labels
from acclimate_client._images import Images, Layout
from acclimate_client._version import __version__
from acclimate_client.async_client import AsyncClient
from acclimate_client.client import Client
from acclimate_client.errors import (
    AcclimateClientError,
    ConnectionFailed,
    ProblemError,
    Timeout,
    UnexpectedReplyError,
)
from acclimate_client.evidence import (
    AccuracyInterval,
    AdapterEvidence,
    Ask,
    Evidence,
    Guard,
    GuardDecision,
    LabelledRow,
    RowCounts,
)
from acclimate_client.models import AdapterDescription, AdapterInfo, InputInfo, ModelEvidence, ModelInfo, ModelRef
from acclimate_client.pages import (
    ClientPage,
    DeletedClients,
    ExportedState,
    FailedClient,
    ListedClient,
    StatePage,
    Usage,
)
from acclimate_client.results import (
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    FeedbackResult,
    ImportResult,
    KeptState,
    Prediction,
    ResetResult,
    RollbackResult,
    StateInfo,
    StoredState,
    Timeline,
    TimelinePoint,
)

__all__ = [
    "AcclimateClientError",
    "AccuracyInterval",
    "AdapterDescription",
    "AdapterEvidence",
    "AdapterInfo",
    "Ask",
    "AsyncClient",
    "Client",
    "ClientInfo",
    "ClientPage",
    "ConfigureResult",
    "ConnectionFailed",
    "DeletedClients",
    "EnrolResult",
    "Evidence",
    "ExportedState",
    "FailedClient",
    "FeedbackResult",
    "Guard",
    "GuardDecision",
    "Images",
    "ImportResult",
    "InputInfo",
    "KeptState",
    "LabelledRow",
    "Labels",
    "Layout",
    "ListedClient",
    "ModelEvidence",
    "ModelInfo",
    "ModelRef",
    "Prediction",
    "ProblemError",
    "ResetResult",
    "RollbackResult",
    "RowCounts",
    "StateInfo",
    "StatePage",
    "StoredState",
    "Timeline",
    "TimelinePoint",
    "Timeout",
    "UnexpectedReplyError",
    "Usage",
    "__version__",
]
