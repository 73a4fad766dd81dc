"""Every adapter served: the catalogue, and clients that choose."""

from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest

from acclimate_adapters import ADAPTERS, create
from acclimate_client.errors import InvalidConfigurationError, KeyReusedError, UnavailableAdapterError
from acclimate_service.compute.adapters import CHAINS, summary

NAMES = sorted(set(ADAPTERS) - {"gated", "failing"})
CHOICES = [
    *((name, {}) for name in NAMES),
    *((name, {}) for name in CHAINS),
    ("atp", {"mode": "batch"}),
    ("fedcal", {"estimator": "em", "window": 30}),
    ("fed_ade", {"layers": "all"}),
    ("atp+fedcal", {"atp": {"mode": "batch"}, "fedcal": {"estimator": "em"}}),
]
FAST = [choice for choice in CHOICES if choice[0] not in ("memo", "fedthe_plus")]


@pytest.fixture(scope="module")
def every(anchored_store, tmp_path_factory, run_service):
    """A service that has everything for every adapter."""
    with run_service(data_dir=tmp_path_factory.mktemp("every"), model_store=anchored_store, adapter="none") as replica:
        yield replica


@pytest.fixture(scope="module")
def sdk(every):
    with every.sdk() as client:
        yield client


def close(answers, expected):
    return all(np.allclose(a, e, rtol=0, atol=1e-5) for a, e in zip(answers, expected, strict=True))


def title(choice):
    return f"{choice[0]}-{len(choice[1])}"


def test_the_catalogue_describes_every_adapter_and_chain_with_a_schema(sdk):
    described = {adapter.name: adapter for adapter in sdk.adapters()}
    assert list(described) == [*NAMES, *CHAINS]
    for name, adapter in described.items():
        assert adapter.available
        assert adapter.missing == ()
        assert adapter.description.endswith(".")
        jsonschema.Draft202012Validator.check_schema(adapter.hyperparameters)
        jsonschema.validate({}, adapter.hyperparameters)
        create(name)
    assert {name for name, adapter in described.items() if adapter.enrols} == {"fedthe", "fedthe_plus"}


def test_the_catalogue_says_what_the_model_lacks_and_what_clients_begin_with(replica):
    with replica.sdk() as sdk:
        described = {adapter.name: adapter for adapter in sdk.adapters()}
    assert (described["fed_ade"].available, described["fed_ade"].missing) == (False, ("anchors",))
    assert described["atp+fedcal"].available
    document = replica.http.get("/adapters").json()
    assert document["default"] == {"adapter": "atp", "hyperparameters": {}}
    assert document["model"] == {"name": "fashion-cnn", "version": "1"}


def test_the_operator_is_told_what_can_be_served_and_what_the_rest_lacks(serial, anchored):
    assert summary(anchored.bundle.model) == f"adapters {', '.join(NAMES)}"
    served = ", ".join(name for name in NAMES if name != "fed_ade")
    assert summary(serial.bundle.model) == f"adapters {served}; not served: fed_ade lacks anchors"


@pytest.mark.parametrize("choice", CHOICES, ids=title)
def test_a_client_of_any_adapter_gets_the_answers_of_an_uninterrupted_run_and_can_be_reset(
    sdk, anchored, stream, choice
):
    name, hyperparameters = choice
    client_id, batches = f"switch-{title(choice)}".replace("+", "."), stream(1, 3, 8)
    sdk.predict(client_id, batches[0])
    configured = sdk.configure(client_id, name, **hyperparameters)
    assert (configured.adapter, configured.hyperparameters) == (name, hyperparameters)
    assert configured.changed is (name != "none")
    versions, answers = [], []
    for images in batches:
        prediction = sdk.predict(client_id, images, probabilities=True)
        assert prediction.adapter == name
        versions.append(prediction.state.version)
        answers.append(prediction.probabilities)
    begin = configured.state.version + 1
    assert versions == [begin, begin + 1, begin + 2]
    assert close(answers, anchored.probabilities(name, batches, **hyperparameters))
    assert sdk.reset(client_id).adapter == name
    anew = sdk.predict(client_id, batches[0], probabilities=True)
    assert (anew.adapter, anew.state.status) == (name, "reset")
    assert close([anew.probabilities], answers[:1])


def test_clients_with_different_adapters_are_served_at_once(every, anchored, stream):
    batches = stream(2, 4, 6)

    def run(choice):
        name, hyperparameters = choice
        client_id = f"mixed-{title(choice)}".replace("+", ".")
        with every.sdk(max_retries=4) as sdk:
            sdk.configure(client_id, name, **hyperparameters)
            return [sdk.predict(client_id, images, probabilities=True).probabilities for images in batches]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, FAST))
    for (name, hyperparameters), answer in zip(FAST, answers, strict=True):
        assert close(answer, anchored.probabilities(name, batches, **hyperparameters)), name


def test_a_client_may_be_configured_before_its_first_batch(sdk, every, stream):
    configured = sdk.configure("early", "atp", mode="batch")
    assert (configured.changed, configured.state.version, configured.state.status) == (True, 1, "cold")
    assert configured.state.committed is True
    found = sdk.get("early")
    assert (found.adapter, found.hyperparameters) == ("atp", {"mode": "batch"})
    assert sdk.predict("early", stream(0, 1)[0]).state.version == 2


def test_the_reply_says_that_the_state_was_reset(sdk, stream):
    sdk.predict("told", stream(0, 1)[0])
    configured = sdk.configure("told", "em", steps=3)
    assert (configured.state.status, configured.state.version, configured.state.committed) == ("reset", 2, True)


@pytest.mark.parametrize("again", [{}, {"mode": "online"}], ids=["equal", "a default spelt out"])
def test_an_unchanged_configuration_does_nothing_and_says_so(sdk, every, stream, again):
    client_id = f"same-{len(again)}"
    sdk.configure(client_id, "atp")
    sdk.predict(client_id, stream(0, 1)[0])
    before = every.keys(client_id)
    configured = sdk.configure(client_id, "atp", **again)
    assert (configured.changed, configured.state.version, configured.state.committed) == (False, 2, False)
    assert every.keys(client_id) == before


@pytest.mark.parametrize("known", [True, False], ids=["known client", "new client"])
def test_a_repeated_configuration_does_not_reset_again(sdk, stream, known):
    client_id, (one, two) = f"repeat-{known}", stream(0, 2)
    if known:
        sdk.predict(client_id, one)
    first = sdk.configure(client_id, "atp", mode="batch", idempotency_key="k")
    later = sdk.predict(client_id, two).state.version
    again = sdk.configure(client_id, "atp", mode="batch", idempotency_key="k")
    assert (again.adapter, again.hyperparameters, again.changed) == ("atp", {"mode": "batch"}, True)
    assert (again.state.version, again.state.replayed, again.state.committed) == (first.state.version, "stored", True)
    assert sdk.get(client_id).state.version == later
    sdk.configure(client_id, "em")
    assert sdk.configure(client_id, "atp", mode="batch", idempotency_key="k").state.replayed == "stored"
    assert sdk.get(client_id).adapter == "em"
    with pytest.raises(KeyReusedError):
        sdk.configure(client_id, "atp", mode="online", idempotency_key="k")


def test_a_configuration_is_seen_by_other_replicas_that_remember_the_client(make_replica, serial, stream):
    first = make_replica()
    second = make_replica(redis_url=first.service.settings.redis_url)
    one, two = stream(0, 2)
    with first.sdk() as here, second.sdk() as there:
        there.predict("cam", one)
        here.configure("cam", "fedcal", estimator="em")
        prediction = there.predict("cam", two, probabilities=True)
    assert (prediction.adapter, prediction.state.version) == ("fedcal", 3)
    assert close([prediction.probabilities], serial.probabilities("fedcal", [two], estimator="em"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"adapter": "apt"}, "there are atp, "),
        ({"adapter": "atp", "hyperparameters": {"mode": "sometimes"}}, "use one of online, batch"),
        ({"adapter": "tent", "hyperparameters": {"lr": 1e9}}, "from 0"),
        ({"adapter": "surgical", "hyperparameters": {"modules": ["fc"] * 7000}}, "'fc' is there more than once"),
        ({"adapter": "tent", "hyperparameters": {"lr": None}}, "use a number"),
        ({"adapter": "em", "hyperparameters": {"speed": 3}}, "it has steps"),
        ({"adapter": "em", "hyperparameters": {"name": "x"}}, "no hyper-parameter name"),
        ({"adapter": "em", "hyperparameters": {"layout": 2}}, "no hyper-parameter layout"),
        ({"adapter": "em+atp"}, "write 'atp+em'"),
        ({"adapter": "atp+em", "hyperparameters": {"steps": 3}}, "a mapping under its name"),
        ({"adapter": 7}, "must be an object"),
        ({"adapter": "em", "hyperparameters": []}, "must be an object"),
        ({"adapter": "em", "hyperparameter": {}}, "these members only"),
        (["em"], "must be an object"),
        ({}, "must be an object"),
    ],
)
def test_a_wrong_configuration_is_422_with_what_is_accepted_and_changes_nothing(every, assert_problem, body, says):
    reply = every.http.put("/clients/wrong", json=body)
    assert says in assert_problem(reply, 422, "invalid_configuration")["detail"]
    assert every.keys("wrong") == {}


def test_an_adapter_that_the_model_lacks_something_for_is_422(replica, assert_problem, stream):
    with replica.sdk() as sdk:
        sdk.predict("lacking", stream(0, 1)[0])
        before = replica.keys("lacking")
        with pytest.raises(UnavailableAdapterError, match="anchors"):
            sdk.configure("lacking", "fed_ade")
        with pytest.raises(UnavailableAdapterError, match="conv9"):
            sdk.configure("lacking", "surgical", modules=["conv9"])
        with pytest.raises(InvalidConfigurationError):
            sdk.configure("lacking", "em", steps=-1)
    assert replica.keys("lacking") == before


def test_other_bodies_are_refused(every, assert_problem):
    kind = {"Content-Type": "application/json"}
    assert_problem(every.http.put("/clients/x", content=b"{", headers=kind), 400, "malformed_body")
    assert_problem(every.http.put("/clients/x", content=b" " * 70_000, headers=kind), 413, "body_too_large")
    assert_problem(every.http.put("/clients/x", content=b"\xff", headers=kind), 400, "malformed_body")


def test_many_configurations_do_not_grow_the_memory(every, sdk):
    for number in range(300):
        sdk.configure("fickle", "tent", lr=0.001 + number / 1e6)
    cached = every.service.configurations.adapter.cache_info()
    assert cached.currsize <= 256
