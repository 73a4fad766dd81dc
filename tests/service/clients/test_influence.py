"""What one batch may do to a client's state at most, as the operator bounds it."""

import numpy as np
import pytest

from acclimate_adapters import State
from acclimate_service.settings import SettingsError, read_settings

BLOCKS = np.random.default_rng(0).integers(0, 256, (200, 1, 7, 7), dtype=np.uint8).repeat(4, 2).repeat(4, 3)
NOISE = np.random.default_rng(0).integers(0, 256, (8, 1, 28, 28), dtype=np.uint8)


@pytest.mark.parametrize(("influence", "rows"), [(0.0, 240), (1.0, 60), (2.0, 80)])
def test_a_large_batch_counts_for_as_many_mean_batches_as_the_operator_allows(make_replica, stream, influence, rows):
    replica = make_replica(influence=influence)
    with replica.sdk() as client:
        client.configure("loud", "fedcal")
        for images in stream(1, 2, 20):
            client.predict("loud", images)
        assert len(client.predict("loud", BLOCKS).labels) == 200
        state = State.from_bytes(client.export_state("loud"))
    assert int(state.tensors["rows"]) == rows


@pytest.mark.parametrize(("influence", "rows"), [(0.0, 28), (1.0, 20)])
def test_noise_counts_for_nothing_where_influence_is_bounded(make_replica, stream, influence, rows):
    replica = make_replica(influence=influence)
    with replica.sdk() as client:
        client.configure("loud", "fedcal")
        client.predict("loud", stream(1, 1, 20)[0])
        noise = client.predict("loud", NOISE)
        assert len(noise.labels) == 8
        assert noise.signals["skipped"] == (influence > 0)
        state = State.from_bytes(client.export_state("loud"))
    assert int(state.tensors["rows"]) == rows


def test_what_computes_is_named_by_its_bound(make_replica):
    """A journal that was written under another bound is not computed again as if nothing had changed."""
    made = [make_replica(influence=each, strict_replay=True) for each in (1.5, 0.0)]  # in one memory layout
    bounded, free = (replica.service.engine._machine.engine for replica in made)
    assert bounded == f"{free}, influence 1.5"


@pytest.mark.parametrize("value", ["-0.1", "nan", "much"])
def test_a_bound_below_0_is_refused(monkeypatch, value):
    monkeypatch.setenv("ACCLIMATE_INFLUENCE", value)
    with pytest.raises(SettingsError, match="ACCLIMATE_INFLUENCE: .*" + value):
        read_settings()
