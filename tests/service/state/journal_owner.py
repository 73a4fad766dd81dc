"""A replica that writes a journal, for the tests of its scripts."""

from dataclasses import dataclass, replace

from redis.asyncio import Redis

from acclimate_service.state import Batch
from acclimate_service.state.journal import Appended, Flipped, Opened
from acclimate_service.state.outcomes import Attempt
from acclimate_service.state.records import Basis

LARGE = {"inline_max": 8, "chunk_bytes": 100}
STATE = b"s" * 300


def batch(content: bytes = b"batch") -> Batch:
    return Batch("uint8", (len(content),), content)


@dataclass
class Owner:
    """A replica that writes the journal of a driver's client."""

    driver: object
    basis: Basis
    fence: str

    @property
    def journal(self):
        return self.driver.store.journal

    async def append(self, key: str | None = None, content: bytes = b"batch", attempt: Attempt | None = None):
        attempt = attempt or self.driver.attempt(key)
        where = self.driver.client, self.driver.model
        outcome = await self.journal.append(*where, self.basis, self.fence, attempt, batch(content), "cpu")
        if isinstance(outcome, Appended):
            self.basis = outcome.basis
        return outcome

    async def snapshot(self, basis: Basis | None = None, fence: str | None = None):
        """Upload and flip the state of a version."""
        basis, where = basis or self.basis, (self.driver.client, self.driver.model)
        snapshot, sealed = await self.journal.upload(*where, basis, "atp", STATE)
        outcome = await self.journal.flip(*where, basis, self.fence if fence is None else fence, snapshot, sealed)
        if isinstance(outcome, Flipped):
            self.basis = replace(self.basis, sid=snapshot.sid)
        return outcome

    async def undo(self, before: Basis, attempt: Attempt, number: int = 0):
        """Take an entry back; `number` is that of the newest numbered batch before it."""
        return await self.journal.undo(self.driver.client, self.driver.model, before, number, self.fence, attempt)


async def open_journal(driver, nonce: str = "1" * 16, *, force: bool = False, basis: Basis | None = None):
    basis = basis or (await driver.load()).basis
    return await driver.store.journal.open(driver.client, driver.model, basis, nonce, "{}", force=force)


async def owner_of(driver, nonce: str = "1" * 16, *, force: bool = False) -> Owner:
    opened = await open_journal(driver, nonce, force=force)
    assert isinstance(opened, Opened)
    head = opened.head
    return Owner(driver, Basis(opened.life, head.seq, head.tag, head.sid), head.fence)


async def journal_of(driver, admin: Redis) -> set[bytes]:
    return set(await admin.hkeys(driver.client.journal(driver.model)))
