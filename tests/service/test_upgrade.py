"""Another version of a model takes the place of the one that clients were served: what goes on, and what begins anew.

The one before is still there, as in a rolling upgrade, and has the clients in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from acclimate_adapters import Source
from acclimate_client import LabelledRow
from acclimate_client.errors import StateMismatchError
from acclimate_service.serving import _elsewhere
from acclimate_service.state import ClientScope
from acclimate_store import Catalogue, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import MODEL_FILE
from acclimate_store.samples import load_streams

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"
BATCH = 20
MOMENTS, CONFUSION, RATES = "1.1", "1.2", "1.3"
"""Versions of one model, which differ in these quantities."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of the shipped network, each of which changes one thing of the first: that has no moments."""
    shipped = Catalogue(BUNDLES).load("fashion-cnn")
    told = shipped.manifest
    weights = load_file(BUNDLES / told.key / MODEL_FILE)
    other = {name: 0.99 * tensor if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    first = replace(shipped.model.source, moments={})
    root = tmp_path_factory.mktemp("versions")

    def publish(version: str, source: Source = first, weights: Mapping[str, Tensor] = weights, **changes: Any) -> None:
        net = build(told.architecture, told.architecture_options)
        net.load_state_dict(weights)
        named = {"name": "fashion", "version": version, "files": {}, **changes}
        write_bundle(root, told.model_copy(update=named), net, source)

    publish("1")
    publish(MOMENTS, shipped.model.source)
    publish(CONFUSION, replace(first, confusion=0.9 * torch.eye(10) + 0.01))
    publish(RATES, replace(first, rates={name: 0.5 * rate for name, rate in (first.rates or {}).items()}))
    publish("2", classes=told.classes[::-1])
    publish("3", input=told.input.model_copy(update={"mean": (0.5,)}))
    publish("4", weights=other, evidence=None)
    return root


@pytest.fixture(scope="module")
def serve(
    run_service: Callable[..., Any], store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Serve a version, on one Redis that all share."""
    with ExitStack() as stack:
        run = partial(run_service, model_store=store, data_dir=tmp_path_factory.mktemp("data"))
        first = stack.enter_context(run(model="fashion/1"))
        running = {"1": first}

        def serve(version: str) -> Any:
            if version not in running:
                running[version] = stack.enter_context(
                    run(model=f"fashion/{version}", redis_url=first.service.settings.redis_url)
                )
            return running[version]

        yield serve


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    (stream, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    return [stream.images[start : start + BATCH] for start in range(0, 5 * BATCH, BATCH)]


def send(replica: Any, client: str, batches: list[Any], **options: Any) -> list[Any]:
    with replica.sdk() as sdk:
        return [sdk.predict(client, batch, probabilities=True, **options) for batch in batches]


def configure(replica: Any, client: str, adapter: str, **hyperparameters: Any) -> None:
    with replica.sdk() as sdk:
        sdk.configure(client, adapter, **hyperparameters)


def same(given: list[Any], alone: list[Any]) -> bool:
    return all(np.allclose(a.probabilities, b.probabilities, atol=1e-6) for a, b in zip(given, alone, strict=True))


@pytest.mark.parametrize("adapter", ["atp", "em", "fedcal", "bn_adapt+em", "fedthe"])
def test_added_moments_reset_nobody(adapter: str, serve: Any, batches: list[Any]) -> None:
    moved, alone = (f"{which}-{adapter}".replace("+", ".") for which in ("moved", "alone"))
    configure(serve("1"), moved, adapter)
    configure(serve("1"), alone, adapter)
    given = send(serve("1"), moved, batches[:3]) + send(serve(MOMENTS), moved, batches[3:])
    assert same(given, send(serve("1"), alone, batches))
    assert given[3].state.status == "restored"
    assert given[-1].state.version == 6  # the configuration was the first change


def test_two_versions_of_one_model_hand_a_client_to_and_fro(serve: Any, batches: list[Any]) -> None:
    alone = send(serve("1"), "straight", batches)
    given = [send(serve(v), "to-and-fro", [batch])[0] for v, batch in zip(("1", MOMENTS) * 3, batches, strict=False)]
    assert same(given, alone)
    assert [each.state.version for each in given] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("version", "adapter", "goes_on"),
    [
        (CONFUSION, "atp", True),
        (CONFUSION, "bbse", False),
        (CONFUSION, "atp+bbse", False),
        (RATES, "atp", False),
        (RATES, "t3a", True),
    ],
)
def test_a_client_begins_anew_where_a_quantity_that_its_adapter_reads_differs(
    version: str, adapter: str, goes_on: bool, serve: Any, batches: list[Any]
) -> None:
    client = f"{adapter}-{version}".replace("+", ".")
    configure(serve("1"), client, adapter)
    send(serve("1"), client, batches[:3])
    given = send(serve(version), client, batches[3:])
    assert given[0].adapter == adapter
    assert given[0].state.status == ("restored" if goes_on else "reset")
    assert given[0].state.version > 4
    if not goes_on:
        configure(serve(version), f"{client}-new", adapter)
        assert same(given, send(serve(version), f"{client}-new", batches[3:]))


def test_a_state_of_no_use_is_shown_to_nobody_and_stays_until_it_is_replaced(serve: Any, batches: list[Any]) -> None:
    configure(serve("1"), "looked-at", "atp", mode="online")
    send(serve("1"), "looked-at", batches[:3])
    (looked,) = send(serve(RATES), "looked-at", batches[3:4], adapt=False)
    (frozen,) = send(serve(RATES), "nobody", batches[3:4], adapt=False)
    assert (looked.state.version, looked.state.status) == (4, "reset")
    configure(serve(RATES), "nobody-yet", "atp", mode="online")
    assert same([looked], send(serve(RATES), "nobody-yet", batches[3:4], adapt=False))
    assert frozen.adapter == "atp"
    (back,) = send(serve("1"), "looked-at", batches[3:4])
    assert (back.state.version, back.state.status) == (5, "warm")


def test_a_repeat_of_what_another_version_answered_is_not_computed_by_this_one(serve: Any, batches: list[Any]) -> None:
    big = np.concatenate([batches[0]] * 12)
    first, second = serve("1"), serve(RATES)
    with first.sdk() as sdk:
        given = sdk.predict("repeated", big, idempotency_key="k")
    first.redis.delete("acc:{default/repeated}:a", "acc:{default/repeated}:y")
    with second.sdk() as sdk:
        again = sdk.predict("repeated", big, idempotency_key="k")
    assert given.state.version == again.state.version == 1
    assert again.state.replayed == "unavailable"


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_another_order_of_classes_another_normalisation_and_other_weights_are_another_model(
    version: str, serve: Any, batches: list[Any]
) -> None:
    client = f"other-{version}"
    send(serve("1"), client, batches[:3])
    configure(serve("1"), f"chosen-{version}", "fedcal", window=40)
    send(serve("1"), f"chosen-{version}", batches[:1])
    before = send(serve("1"), f"stays-{version}", batches)

    given = send(serve(version), client, batches[3:])
    assert [each.state.version for each in given] == [1, 2]
    assert given[0].state.status == "cold"
    assert given[0].adapter == ("none" if version == "4" else "atp")  # nothing was chosen: the default of this version
    assert same(given, send(serve(version), f"{client}-new", batches[3:]))

    (chosen,) = send(serve(version), f"chosen-{version}", batches[1:2])
    with serve(version).sdk() as sdk:
        info = sdk.get(f"chosen-{version}")
    assert (chosen.state.status, info.adapter, info.hyperparameters) == ("cold", "fedcal", {"window": 40})

    assert same(before, send(serve("1"), f"{client}-again", batches))  # and the first version goes on as it was
    assert send(serve("1"), f"stays-{version}", batches[:1])[0].state.status == "warm"


@pytest.mark.parametrize("begun", [True, False])
def test_the_default_of_a_version_is_kept_by_whoever_chose_it(begun: bool, serve: Any, batches: list[Any]) -> None:
    """Choosing what it has changes nothing of a client but what it gets under another model."""
    client = f"chose-the-default-{begun}"
    if begun:
        assert send(serve("1"), client, batches[:2])[0].adapter == "atp"
    configure(serve("1"), client, "atp")
    send(serve("1"), client, batches[:1])
    for batch in batches[:2]:
        (answer,) = send(serve("4"), client, [batch])
        assert answer.adapter == "atp"
    (another,) = send(serve("4"), f"{client}-not", batches[:1])
    assert another.adapter == "none", "else this shows nothing"
    with serve("1").sdk() as sdk:
        sdk.delete(client)
    send(serve("1"), client, batches[:1])
    (answer,) = send(serve("4"), client, batches[:1])
    assert answer.adapter == "none", "whoever comes after it under this name chose nothing"


def test_states_of_other_models_are_counted_at_the_start(
    run_service: Any, store: Path, tmp_path: Path, batches: list[Any]
) -> None:
    with run_service(model="fashion/1", model_store=store, data_dir=tmp_path) as first:
        assert first.http.get("/models").json()["models"][0]["states_of_other_models"]["clients"] == {}
        for number in range(3):
            send(first, f"cam-{number}", batches[:1])
        url = first.service.settings.redis_url or first.service.private_redis.url
        with run_service(model=f"fashion/{MOMENTS}", model_store=store, redis_url=url) as same_model:
            told = same_model.http.get("/models").json()["models"][0]["states_of_other_models"]
            assert told == {"clients": {}, "complete": True}
            assert _elsewhere(same_model.service) == ()
        with run_service(model="fashion/2", model_store=store, redis_url=url) as other:
            told = other.http.get("/models").json()["models"][0]["states_of_other_models"]
            assert told == {"clients": {"fashion/1 to fashion/1.3": 3}, "complete": True}
            (line,) = _elsewhere(other.service)
            assert "3 of fashion/1 to fashion/1.3; clients that come to fashion/2 with one begin anew" in line


def test_a_state_goes_to_another_version_of_the_model_and_to_no_other_model(serve: Any, batches: list[Any]) -> None:
    send(serve("1"), "exported", batches[:2])
    with serve("1").sdk() as sdk:
        data = sdk.export_state("exported")
    alone = send(serve("1"), "exported", batches[2:])
    with serve(MOMENTS).sdk() as sdk:
        sdk.import_state("imported", data)
    assert same(send(serve(MOMENTS), "imported", batches[2:]), alone)
    for version in (RATES, "2", "3"):
        with serve(version).sdk() as sdk, pytest.raises(StateMismatchError):
            sdk.import_state(f"imported-{version}", data)


@pytest.mark.parametrize("version", [RATES, "4"])
def test_a_paused_client_stays_paused(version: str, serve: Any, batches: list[Any]) -> None:
    client = f"paused-{version}"
    configure(serve("1"), client, "atp", mode="batch")
    send(serve("1"), client, batches[:1])
    assert serve("1").http.put(f"/clients/{client}", json={"adaptation": "paused"}).status_code == 200
    for batch in batches[:2]:
        (answer,) = send(serve(version), client, [batch])
        assert not answer.state.committed
    resumed = serve(version).http.put(f"/clients/{client}", json={"adaptation": "running"})
    assert resumed.status_code == 200, resumed.text
    (answer,) = send(serve(version), client, batches[:1])
    assert answer.state.committed
    with serve(version).sdk() as sdk:
        assert sdk.get(client).hyperparameters == {"mode": "batch"}


def test_a_client_goes_back_to_no_state_of_another_version_that_is_of_no_use(serve: Any, batches: list[Any]) -> None:
    configure(serve("1"), "back", "bbse")
    send(serve("1"), "back", batches[:2])
    configure(serve("1"), "back", "em")
    send(serve("1"), "back", batches[:2])
    refused = serve(CONFUSION).http.post("/clients/back/rollback")
    kept = serve("1").http.get("/clients/back").json()["state"]["kept"]
    assert kept, "else this shows nothing"
    assert refused.status_code == 404, refused.text
    assert "another version of the model" in refused.json()["detail"]


def test_evidence_of_the_fleet_is_about_one_version(serve: Any, batches: list[Any]) -> None:
    def labelled(replica: Any) -> int:
        with replica.sdk() as sdk:
            return sum(row.evidence.labelled for row in sdk.evidence("fashion").adapters)

    (given,) = send(serve("1"), "labelled", batches[:1])
    before = labelled(serve(MOMENTS))
    with serve("1").sdk() as sdk:
        sdk.feedback("labelled", [LabelledRow(given.request_id, row, 0) for row in range(10)])
    assert labelled(serve("1")) == 10
    assert labelled(serve(MOMENTS)) == before


def shown(replica: Any, client: str) -> int:
    """Labelled rows that GET shows of a client."""
    reply = replica.http.get(f"/clients/{client}")
    assert reply.status_code == 200, reply.text
    return int(reply.json()["guard"]["labelled"])


def tell(replica: Any, client: str, images: Any, rows: int) -> None:
    (given,) = send(replica, client, [images])
    with replica.sdk() as sdk:
        sdk.feedback(client, [LabelledRow(given.request_id, row, 0) for row in range(rows)])


def test_labels_that_were_told_before_an_upgrade_are_shown_from_the_first_look_on(
    serve: Any, batches: list[Any]
) -> None:
    for client, adapter in (("stays", "atp"), ("learns", "atp"), ("restarts", "atp"), ("begins-anew", "bbse")):
        configure(serve("1"), client, adapter, **({"mode": "online"} if adapter == "atp" else {}))
        tell(serve("1"), client, batches[0], 10)
    new = serve(CONFUSION)
    assert [shown(new, client) for client in ("stays", "learns", "restarts")] == [10, 10, 10]
    assert shown(new, "begins-anew") == 0, "its adapter reads what has changed"
    send(new, "stays", batches[1:2])
    assert shown(new, "stays") == 10
    tell(new, "learns", batches[1], 5)
    assert shown(new, "learns") == 15
    with new.sdk() as sdk:
        sdk.reset("restarts")
    assert shown(new, "restarts") == 0


def test_of_a_client_that_expired_the_next_existence_has_no_labels(serve: Any, batches: list[Any]) -> None:
    replica = serve("1")
    tell(replica, "expired", batches[0], 10)
    assert shown(replica, "expired") == 10
    replica.keys("expired")
    replica.redis.delete(*replica.redis.keys("acc:{default/expired}:*"))
    replica.run(forgotten(replica, "expired"))
    send(replica, "expired", batches[:1])
    assert shown(replica, "expired") == 0


async def forgotten(replica: Any, client: str) -> None:
    replica.service.sessions.drop(client)


def test_a_deleted_client_leaves_nothing_with_any_version(serve: Any, batches: list[Any]) -> None:
    old, new = serve("1"), serve(MOMENTS)
    for replica in (old, new):
        tell(replica, "deleted", batches[0], 5)
        replica.run(replica.service.rounds._cohorts.note("deleted"))
    name = old.service.fleet._pools._name(ClientScope("deleted")).encode()

    def left() -> list[bytes]:
        """Fields and members that name it."""
        hashes, indices = (list(old.redis.scan_iter("acc:*~*", _type=kind)) for kind in ("hash", "zset"))
        fields = [field for key in hashes for field in old.redis.hkeys(key) if name in field]
        return fields + [member for key in indices for member in old.redis.zrange(key, 0, -1) if b"deleted" in member]

    assert len(left()) >= 3, "two pools and a cohort"
    with new.sdk() as sdk:
        sdk.delete("deleted")
    assert left() == []


def test_states_that_were_written_before_versions_were_noted_are_found(
    serve: Any, run_service: Any, store: Path, tmp_path: Path, batches: list[Any]
) -> None:
    alone = send(serve("1"), "all-along", batches)
    with run_service(model="fashion/1", model_store=store, data_dir=tmp_path) as old:
        given = send(old, "from-before", batches[:2])
        old.redis.delete("acc:{default/~models}:v")
        old.redis.hdel(f"acc:{{default/from-before}}:{old.service.bundle.model.content_hash}:h", "ver")
        url = old.service.settings.redis_url
        with run_service(model=f"fashion/{MOMENTS}", model_store=store, redis_url=url) as new:
            given += send(new, "from-before", batches[2:])
    assert same(given, alone)
