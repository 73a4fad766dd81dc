"""The envelope around a state refuses everything but the bytes that were written, for whom they were written."""

import hashlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_service.state import ClientScope, StateCorrupt
from acclimate_service.state.encoding import Sealed, hashing, seal, unseal, unseal_pieces
from acclimate_service.state.records import Restored

CLIENT, MODEL = ClientScope("cam-7"), "0123456789abcdef"


@given(state=st.binary(max_size=300), adapter=st.text(max_size=60), seq=st.integers(0, 2**64 - 1))
def test_what_is_sealed_comes_back(state: bytes, adapter: str, seq: int):
    assert unseal(seal(CLIENT, MODEL, adapter, seq, state), CLIENT, MODEL, seq) == Restored(adapter, seq, state)


@given(state=st.binary(max_size=300), adapter=st.text(max_size=60), size=st.integers(1, 400))
def test_what_is_sealed_comes_back_from_pieces_of_any_size(state: bytes, adapter: str, size: int):
    sealed = seal(CLIENT, MODEL, adapter, 7, state)
    pieces = [sealed.blob[start : start + size] for start in range(0, len(sealed.blob), size)]
    assert unseal_pieces(pieces, sealed.digest, CLIENT, MODEL, 7) == Restored(adapter, 7, state)
    with pytest.raises(StateCorrupt, match="checksum"):
        unseal_pieces(pieces[:-1], sealed.digest, CLIENT, MODEL, 7)


@given(data=st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject):
    sealed = seal(CLIENT, MODEL, "atp", 7, b"some state")
    index = data.draw(st.integers(0, len(sealed.blob) - 1))
    broken = bytearray(sealed.blob)
    broken[index] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(StateCorrupt, match="checksum"):
        unseal(Sealed(bytes(broken), sealed.digest), CLIENT, MODEL, 7)


@pytest.mark.parametrize(
    ("client", "model", "seq"),
    [
        (ClientScope("cam-8"), MODEL, 7),
        (ClientScope("cam-7", tenant="other"), MODEL, 7),
        (CLIENT, "f" * 16, 7),
        (CLIENT, MODEL, 8),
    ],
    ids=["client", "tenant", "model", "version"],
)
def test_a_state_of_another_owner_is_refused(client: ClientScope, model: str, seq: int):
    with pytest.raises(StateCorrupt, match="another client, model or version"):
        unseal(seal(CLIENT, MODEL, "atp", 7, b"some state"), client, model, seq)


def resealed(blob: bytes) -> Sealed:
    """An envelope that was wrong before its checksum was taken."""
    return Sealed(blob, hashlib.sha256(blob).hexdigest())


@pytest.mark.parametrize("cut", [0, 10, 47])
def test_an_envelope_cut_short_is_refused(cut: int):
    blob = seal(CLIENT, MODEL, "atp", 7, b"some state").blob
    with pytest.raises(StateCorrupt):
        unseal(resealed(blob[:cut]), CLIENT, MODEL, 7)


@pytest.mark.parametrize("change", [lambda blob: blob[:-1], lambda blob: blob + b"!"], ids=["shorter", "longer"])
def test_a_state_of_another_length_is_refused(change):
    blob = seal(CLIENT, MODEL, "atp", 7, b"some state").blob
    with pytest.raises(StateCorrupt, match="its envelope says 10"):
        unseal(resealed(change(blob)), CLIENT, MODEL, 7)


def test_an_adapter_name_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most 255"):
        seal(CLIENT, MODEL, "a" * 256, 1, b"")


async def test_a_large_state_is_hashed_off_the_event_loop():
    assert await hashing(threading.get_ident, 10**6) != threading.get_ident()
    assert await hashing(threading.get_ident, 1000) == threading.get_ident()


async def test_a_state_tampered_with_in_redis_is_refused(driver, admin):
    await driver.committed(state=b"some state")
    head = driver.client.head(driver.model)
    blob = await admin.hget(head, "st")
    await admin.hset(head, "st", blob[:-1] + b"!")
    with pytest.raises(StateCorrupt):
        await driver.state()
    await admin.hset(head, "st", blob)
    assert await driver.state() == b"some state"


@pytest.mark.parametrize(("field", "value"), [("v", "2"), ("seq", "x"), ("tag", None)])
async def test_a_head_that_cannot_be_read_is_refused(driver, admin, field: str, value: str | None):
    await driver.committed()
    head = driver.client.head(driver.model)
    await (admin.hset(head, field, value) if value else admin.hdel(head, field))
    with pytest.raises(StateCorrupt):
        await driver.load()


async def test_a_marker_that_cannot_be_read_is_refused(driver, admin):
    attempt = driver.attempt("k")
    await driver.committed(attempt=attempt)
    await admin.hset(driver.client.markers, attempt.rid, "nonsense")
    with pytest.raises(StateCorrupt, match="marker"):
        await driver.load(attempt.rid)
