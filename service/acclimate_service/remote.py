"""What the commands ask of a running service, over HTTP as any caller does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import orjson


class RemoteError(Exception):
    """There is no service that could be asked."""


class Refused(RemoteError):
    """The service answers, and says no."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A running service.

    Args:
        url: of it.
        key: for a service that asks for one.
        timeout_s: longest silence.
    """

    url: str
    key: str = field(default="", repr=False)
    timeout_s: float = 60

    @classmethod
    def of(cls, url: str, key_file: Path | None) -> "Remote":
        """As the options of a command say.

        Raises:
            RemoteError: the file of the key cannot be read.
        """
        try:
            return cls(url.rstrip("/"), key_file.read_text().strip() if key_file else "")
        except (OSError, UnicodeDecodeError) as error:
            raise RemoteError(f"the file of the key cannot be read: {error}") from error

    def ask(self, method: str, path: str, **query: str | int | None) -> bytes:
        """The body of a reply.

        Args:
            method, path: of a route.
            query: parameters; those that are None are left out.

        Raises:
            Refused: it is no success, with what the service says of that.
            RemoteError: nobody answers there.
        """
        with self._asked(method, path, query) as reply:
            return reply.read()

    def document(self, method: str, path: str, **query: str | int | None) -> Mapping[str, Any]:
        """The document of a reply; raises as `ask`."""
        return self._read(self.ask(method, path, **query))

    def put(self, path: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a document, and read that of the reply; raises as `ask`."""
        with self._asked("PUT", path, {}, orjson.dumps(content)) as reply:
            return self._read(reply.read())

    def lines(self, path: str, **query: str | int | None) -> Iterator[Mapping[str, Any]]:
        """The documents of a reply that has one on each line, as they come; raises as `ask`."""
        with self._asked("GET", path, query) as reply:
            yield from map(self._read, reply)

    @contextmanager
    def _asked(
        self, method: str, path: str, query: Mapping[str, str | int | None], content: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        given = urlencode({name: value for name, value in query.items() if value is not None})
        request = Request(f"{self.url}{path}{'?' if given else ''}{given}", content, method=method)
        if content is not None:
            request.add_header("Content-Type", "application/json")
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with urlopen(request, timeout=self.timeout_s) as reply:
                yield reply
        except HTTPError as error:
            raise Refused(f"{self.url} answers {error.code}: {_detail(error)}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise RemoteError(f"no service answers at {self.url}: {error}; give its address with --url") from error

    def _read(self, text: bytes) -> Mapping[str, Any]:
        try:
            document: Mapping[str, Any] = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RemoteError(f"no service answers at {self.url}, but something else: {error}") from error
        return document


def _detail(error: HTTPError) -> str:
    try:
        return str(orjson.loads(error.read())["detail"])
    except (ValueError, LookupError, TypeError):
        return str(error.reason)
