"""A request that cannot be answered, said in the words of the domain; `http.problems` turns it into a reply."""

from collections.abc import Mapping
from typing import Literal

CommittedField = bool | Literal["unknown"]


class Problem(Exception):
    """A request that cannot be answered.

    Args:
        code: a key of `http.problems.STATUS`, stable for programs.
        detail: what was wrong and what is accepted, for people.
        committed: whether the client's state changed all the same.
        headers: further headers of the reply.
    """

    def __init__(
        self, code: str, detail: str, committed: CommittedField = False, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.committed = committed
        self.headers = headers or {}
