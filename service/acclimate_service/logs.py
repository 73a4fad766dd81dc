"""The log: lines for people or for programs, and one for each request. None names a client or a key."""

import hmac
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import orjson

ACCESS: Final = logging.getLogger("acclimate.access")
"""One line for each request: a warning of failures of the service, else for information."""
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HASH_DIGITS: Final = 16


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time (RFC 3339), level, logger, message, what else it has, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _OWN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_up(form: str, level: str) -> None:
    """Write what is logged from now on to standard error.

    Args:
        form: `text` or `json`.
        level: the lowest that is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def hashed(secret: str, client: str) -> str:
    """What the log calls a client; whoever lacks the secret cannot tell whose it is.

    Args:
        secret: of the deployment.
        client: its id, after that of its owner and a slash if it has one.
    """
    return hmac.new(secret.encode(), client.encode(), sha256).hexdigest()[:_HASH_DIGITS]


def note_request(level: int, method: str, route: str, status: int, seconds: float, ids: Mapping[str, str]) -> None:
    """Log a request that was answered.

    Args:
        level: of the line.
        method, route, status: what was asked, by its pattern, and how it was answered.
        seconds: that it took.
        ids: of the request, its caller, its client by its hash, and so on.
    """
    said = " ".join(f"{name}={value}" for name, value in ids.items())
    milliseconds = round(1000 * seconds, 1)
    fields = {"method": method, "route": route, "status": status, "milliseconds": milliseconds, **ids}
    ACCESS.log(level, "%s %s %d in %s ms %s", method, route, status, milliseconds, said, extra=fields)
