"""Journal entries: what is written is read, and nothing else is."""

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_service.state import Batch, ClientScope, StateCorrupt
from acclimate_service.state.encoding import Entry, decode_entry, encode_entry

CLIENT = ClientScope("cam-7")
IMAGES = Batch("uint8", (2, 1, 2, 3), bytes(range(12)), b'{"probabilities":true}')


def test_an_entry_is_read_as_it_was_written():
    entry = Entry(7, IMAGES, "cpu torch 2.9")
    assert decode_entry(encode_entry(CLIENT, entry), CLIENT, 7) == entry


@given(
    shape=st.lists(st.integers(0, 3), max_size=4),
    dtype=st.sampled_from([("uint8", 1), ("float16", 2), ("float32", 4)]),
    parameters=st.binary(max_size=20),
    skipped=st.integers(0, 2**53),
    engine=st.text(max_size=20),
    seq=st.integers(1, 2**63),
)
def test_every_entry_is_read_as_it_was_written(shape, dtype, parameters, skipped, engine, seq):
    name, item_bytes = dtype
    count = item_bytes
    for side in shape:
        count *= side
    entry = Entry(seq, Batch(name, tuple(shape), bytes(count), parameters, skipped), engine)
    assert decode_entry(encode_entry(CLIENT, entry), CLIENT, seq) == entry


def test_data_may_be_a_view_of_the_images():
    view = memoryview(bytes(range(24))).cast("B", (2, 12))
    entry = decode_entry(encode_entry(CLIENT, Entry(1, Batch("uint8", (2, 12), view), "")), CLIENT, 1)
    assert bytes(entry.batch.data) == bytes(range(24))
    assert entry.batch.nbytes == 24


def test_an_entry_of_another_client_or_version_is_refused():
    blob = encode_entry(CLIENT, Entry(7, IMAGES, "cpu"))
    for client, seq in ((ClientScope("cam-8"), 7), (CLIENT, 8)):
        with pytest.raises(StateCorrupt, match="another client or version"):
            decode_entry(blob, client, seq)


def test_every_damaged_byte_is_noticed():
    blob = encode_entry(CLIENT, Entry(7, IMAGES, "cpu"))
    for index in range(len(blob)):
        damaged = bytearray(blob)
        damaged[index] ^= 1
        with pytest.raises(StateCorrupt):
            decode_entry(bytes(damaged), CLIENT, 7)


def test_every_cut_is_noticed():
    blob = encode_entry(CLIENT, Entry(7, IMAGES, "cpu"))
    for length in range(len(blob)):
        with pytest.raises(StateCorrupt):
            decode_entry(blob[:length], CLIENT, 7)


def test_another_format_is_refused():
    blob = encode_entry(CLIENT, Entry(7, IMAGES, "cpu"))
    with pytest.raises(StateCorrupt, match="unknown format"):
        decode_entry(blob[:4] + struct.pack("B", 1) + blob[5:], CLIENT, 7)


@pytest.mark.parametrize(
    ("change", "accepted"),
    [({"dtype": "int64"}, "accepted are uint8, float16, float32"), ({"shape": (2, 3)}, "their shape says 6")],
)
def test_a_batch_that_contradicts_itself_is_refused(change, accepted):
    with pytest.raises(ValueError, match=accepted):
        dataclasses.replace(IMAGES, **change)
