"""Today's service goes on from what earlier versions left in Redis, killed in the middle of their work.

`tools/record_states.py` wrote the files: every key as Redis dumped it, and what that version answered next.
"""

import base64
import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from acclimate_adapters import State
from acclimate_client import LabelledRow
from acclimate_store.samples import load_streams

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
ROOT = Path(__file__).parents[3]


def groups():
    for path in RECORDED:
        for name in json.loads(path.read_text())["groups"]:
            yield pytest.param((path, name), id=f"{path.stem}-{name}")


@pytest.fixture(scope="module", params=groups())
def recorded(request, run_service, tmp_path_factory):
    """A service of today on the keys of a group, and the group."""
    path, name = request.param
    document = json.loads(path.read_text())
    group = document["groups"][name]
    settings = {key.lower(): value for key, value in group["settings"].items()}
    with ExitStack() as stack:
        data_dir = tmp_path_factory.mktemp("recorded")
        replica = stack.enter_context(
            run_service(**{"data_dir": data_dir, "state_budget": 1 / 8, "guard": "adapt", **settings})
        )
        for key, kept in group["keys"].items():
            replica.redis.restore(key, max(kept["pttl"], 1), base64.b64decode(kept["dump"]))
            assert replica.redis.type(key).decode() == kept["type"]
        yield replica, group


def test_every_client_is_as_it_was_and_is_answered_as_the_version_that_wrote_it_would_have(recorded):
    replica, group = recorded
    streams = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    with replica.sdk() as sdk:
        for name, client in group["clients"].items():
            info = sdk.get(name)
            assert (info.adapter, info.hyperparameters) == (client["adapter"], client["hyperparameters"])
            named = {"bytes": "base_bytes"}  # as it was called
            stored = {field: getattr(info.state, named.get(field, field)) for field in client["stored"]}
            assert stored == client["stored"], name
            exported = sdk.export_state(name)
            assert len(exported) == client["exported"]["bytes"]
            # What a journal holds is computed here, and its last bits are those of this processor.
            if not stored["journal_entries"]:
                assert hashlib.sha256(exported).hexdigest() == client["exported"]["sha256"], name
            further = client["further"]
            images = streams[further["stream"]].images[slice(*further["rows"])]
            prediction = sdk.predict(name, images, probabilities=True)
            assert prediction.state.version == further["version"] == stored["version"] + 1
            assert list(prediction.labels) == further["labels"]
            print(
                name,
                stored["journal_entries"],
                np.abs(np.array(prediction.probabilities) - further["probabilities"]).max(),
            )
            assert np.allclose(prediction.probabilities, further["probabilities"], rtol=0, atol=1e-5), name


def test_labels_that_were_told_count_once_and_speak_for_their_client_as_before(recorded):
    replica, group = recorded
    with replica.sdk() as sdk:
        for name, client in group["clients"].items():
            if client["guard"]["labelled"]:
                told = sdk.feedback(name, [LabelledRow(client["last_request"], 0, 0)])
                assert told.rows.duplicate + told.rows.contradicting == 1, told
                evidence = {field: getattr(told.guard.evidence, field) for field in client["guard"]}
                assert evidence == client["guard"], name


def test_exports_of_the_version_that_wrote_them_are_taken_and_written_again_byte_by_byte(recorded):
    replica, group = recorded
    with replica.sdk() as sdk:
        for name, client in group["clients"].items():
            if client["exported"]["whole"] is None:
                continue
            data = base64.b64decode(client["exported"]["whole"])
            assert hashlib.sha256(data).hexdigest() == client["exported"]["sha256"]
            assert State.from_bytes(data).to_bytes() == data
            sdk.configure(f"import-{name}", client["adapter"], **client["hyperparameters"])
            sdk.import_state(f"import-{name}", data)
            assert sdk.export_state(f"import-{name}") == data
