"""Which labels are asked for: by the replies, of a client, and of all clients of a model."""

import asyncio

import pytest

from acclimate_client import AsyncClient, LabelledRow
from acclimate_client.errors import ClientUnknownError, GuardOffError
from acclimate_service.guard import questions
from acclimate_service.guard.questions import Questions
from acclimate_service.guard.record import Question
from acclimate_service.keys import SCOPES, create
from acclimate_service.state import ClientScope


@pytest.fixture
def asking(make_replica):
    """A service that asks for a fifth of the rows, of an adapter that often differs from the frozen model."""
    return make_replica(adapter="tent", ask_budget=0.2)


def send(sdk, client, batches):
    """Batches of a client; what their replies asked for, the newest first."""
    said = [sdk.predict(client, images) for images in batches]
    return [(each.request_id, each.ask) for each in reversed(said) if each.ask]


def listed(replica, path="/asks", **params):
    reply = replica.http.get(path, params=params)
    assert reply.status_code == 200, reply.text
    return reply.json()


def of_client(body):
    return [(each["request_id"], tuple(each["rows"])) for each in body["asks"]]


def test_a_client_has_the_questions_of_its_replies_until_they_are_answered(asking, stream):
    with asking.sdk() as sdk:
        asked = send(sdk, "cam", stream(0, 6))
        assert len(asked) > 2
        body = listed(asking, "/clients/cam/asks")
        assert of_client(body) == asked
        left = [each["expires_in_rows"] for each in body["asks"]]
        assert left == sorted(left, reverse=True)
        assert 2048 - 60 <= left[-1] < left[0] <= 2048 - 10
        assert 0 < body["expires_in_s"] <= asking.service.settings.state_ttl_s
        (client,) = listed(asking)["clients"]
        assert (client["client_id"], of_client(client)) == ("cam", asked)

        request_id, rows = asked[1]
        told = sdk.feedback("cam", [LabelledRow(request_id, rows[0], 1), LabelledRow(request_id, 0, 1)])
        assert told.rows.counted >= 1
        left = [row for row in rows if row not in (0, rows[0])]
        after = [asked[0], *([(request_id, tuple(left))] if left else []), *asked[2:]]
        assert of_client(listed(asking, "/clients/cam/asks")) == after
        assert of_client(listed(asking)["clients"][0]) == after

        everything = [ask.labelled(2) for ask in sdk.asks()]
        assert sdk.feedback("cam", everything).rows.counted == len(everything) > 0
        assert listed(asking, "/clients/cam/asks")["asks"] == []
        assert listed(asking)["clients"] == []


def test_labels_that_were_asked_for_are_told_apart_from_others(asking, stream):
    with asking.sdk() as sdk:
        asked = send(sdk, "cam", stream(0, 4))
        told = sdk.feedback("cam", [LabelledRow(request_id, row, 1) for request_id, rows in asked for row in rows])
        evidence = told.guard.evidence
        assert evidence.labelled == evidence.asked == sum(len(rows) for _, rows in asked)
        assert (evidence.frozen.accuracy, evidence.frozen.high) == (None, 1.0)
        others = sdk.feedback("cam", [LabelledRow(request_id, row, 1) for request_id, _ in asked for row in range(10)])
        both = others.guard.evidence
        assert (both.labelled - evidence.labelled, both.asked) == (others.rows.counted, evidence.asked)
        assert 0 <= both.frozen.low <= both.frozen.accuracy <= both.frozen.high <= 1
        assert sdk.get("cam").guard == others.guard
        (fleet,) = sdk.evidence("fashion-cnn").adapters
        assert fleet.evidence.asked <= both.asked


@pytest.mark.parametrize(
    "change",
    [
        lambda sdk: sdk.reset("cam"),
        lambda sdk: sdk.configure("cam", "bn_adapt"),
        lambda sdk: sdk.import_state("cam", sdk.export_state("cam")),
        lambda sdk: sdk.rollback("cam"),
        lambda sdk: sdk.delete("cam"),
    ],
    ids=["reset", "configure", "import", "rollback", "delete"],
)
def test_what_takes_the_rows_away_takes_the_questions_away(make_replica, stream, change):
    replica = make_replica(adapter="tent", ask_budget=0.2, inline_max=2**24)
    with replica.sdk() as sdk:
        assert send(sdk, "cam", stream(0, 4))
        assert listed(replica)["clients"]
        change(sdk)
        assert listed(replica)["clients"] == []
        reply = replica.http.get("/clients/cam/asks")
        assert reply.status_code == 404 or reply.json()["asks"] == []


def test_nothing_is_left_of_what_a_deleted_client_was_asked(asking, stream):
    with asking.sdk() as sdk:
        send(sdk, "cam", stream(0, 4))
        assert asking.redis.keys("*:q:*")
        sdk.delete("cam")
    assert asking.redis.keys("*:q:*") == asking.redis.keys("*:qt:*") == []


def test_a_question_on_its_way_while_another_replica_deletes_the_client_is_taken_away(
    asking, make_replica, stream, monkeypatch
):
    other = make_replica(redis_url=asking.service.settings.redis_url)
    tell = Questions._tell

    async def late(*told):
        assert (await asyncio.to_thread(other.http.delete, "/clients/cam")).status_code == 204
        return await tell(*told)

    monkeypatch.setattr(Questions, "_tell", late)
    with asking.sdk() as sdk:
        sdk.predict("cam", stream(0, 1)[0])
    assert listed(asking)["clients"] == []
    assert asking.redis.keys("*:q:*") == []


def test_any_replica_lists_the_questions_whoever_asked_them(asking, make_replica, stream):
    other = make_replica(redis_url=asking.service.settings.redis_url)
    with asking.sdk() as sdk:
        asked = send(sdk, "cam", stream(0, 4))
    listed(asking)
    assert of_client(listed(other)["clients"][0]) == asked
    assert of_client(listed(other, "/clients/cam/asks")) == asked


def test_pages_lead_to_all_clients_those_first_that_were_asked_last(asking, stream):
    batches = stream(0, 4)
    with asking.sdk() as sdk:
        for client in range(5):
            send(sdk, f"cam-{client}", batches)
    found, after = [], ""
    for _ in range(4):
        page = listed(asking, limit=2, cursor=after)
        found.append([each["client_id"] for each in page["clients"]])
        after = page["next"]
        if after is None:
            break
    assert found == [["cam-4", "cam-3"], ["cam-2", "cam-1"], ["cam-0"]]
    with asking.sdk() as sdk:
        assert [ask.client_id for ask in sdk.asks("cam-1")] == ["cam-1"] * len([*sdk.asks("cam-1")])
        everything = [*sdk.asks()]

    async def collected():
        async with AsyncClient(str(asking.http.base_url)) as client:
            return [ask async for ask in client.asks()]

    assert asyncio.run(collected()) == everything
    assert {ask.client_id for ask in everything} == {f"cam-{client}" for client in range(5)}


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "cursor=x", "cursor=1&cursor=2", "page=2"])
def test_pages_that_there_are_not_are_refused(asking, assert_problem, query):
    assert_problem(asking.http.get(f"/asks?{query}"), 422, "invalid_request", committed=False)


def test_a_paused_client_is_asked_nothing_that_nobody_would_remember(asking, stream):
    batches = stream(0, 5)
    with asking.sdk() as sdk:
        asked = send(sdk, "cam", batches[:4])
        sdk.pause("cam")
        assert not send(sdk, "cam", batches[4:] * 4)
        assert of_client(listed(asking, "/clients/cam/asks")) == asked


def test_without_a_guard_or_a_client_there_are_no_questions(make_replica, asking):
    with asking.sdk() as sdk, pytest.raises(ClientUnknownError):
        [*sdk.asks("nobody")]
    with make_replica(guard="off").sdk() as sdk:
        for client in (None, "cam"):
            with pytest.raises(GuardOffError):
                [*sdk.asks(client)]


def test_tenants_see_questions_of_their_own_clients_alone(make_replica, stream, tmp_path):
    made = {tenant: create(tenant, SCOPES) for tenant in ("one", "two")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    replica = make_replica(adapter="tent", ask_budget=0.2, keys_file=tmp_path / "keys")
    with replica.sdk(api_key=made["one"][0]) as one, replica.sdk(api_key=made["two"][0]) as two:
        send(one, "cam", stream(0, 4))
        assert {ask.client_id for ask in one.asks()} == {"cam"}
        assert [*two.asks()] == []
        with pytest.raises(ClientUnknownError):
            [*two.asks("cam")]


def test_the_list_has_so_many_clients_those_that_were_asked_last(asking, monkeypatch):
    monkeypatch.setattr(questions, "MOST_CLIENTS", 3)
    service = asking.service
    told = Questions(service.wire, service.limits, service.metrics.background, "0" * 16, "default")

    async def fill():
        for number in range(4):
            client = ClientScope(f"cam-{number}")
            told.tell(client, "", 1, [Question("r", (number,))])
            await told.told()
        page = await told.page("", 10)
        await told.aclose()
        return page

    page = asking.run(fill())
    assert [each.client for each in page.clients] == ["cam-3", "cam-2", "cam-1"]
    assert page.following == ""


def test_a_journal_computes_the_same_questions_again(make_replica, stream):
    """A large state is read again from its batches, by a replica that was told another budget meanwhile."""
    replica = make_replica(adapter="atp", ask_budget=0.2)
    with replica.sdk() as sdk:
        asked = send(sdk, "cam", stream(0, 12))
        assert len(asked) > 1
        assert sdk.get("cam").state.journal_entries > 0
    other = make_replica(redis_url=replica.service.settings.redis_url, ask_budget=0.9)
    assert of_client(listed(other, "/clients/cam/asks")) == asked
