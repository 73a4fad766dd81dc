"""The dashboard behind the deployed nginx, in front of two replicas: one truth, whichever of them answers."""

from pathlib import Path

import httpx
import pytest

from acclimate_client import Client
from acclimate_store.samples import load_streams

pytestmark = pytest.mark.slow
STREAMS = Path(__file__).parents[2] / "model_store" / "samples" / "fashion-hybrid" / "streams.npz"
NAMES = [f"phone-{number}" for number in range(8)]
DEADLINE_MS = 60_000
NOTHING = "\N{EN DASH}"


@pytest.fixture(scope="module")
def balancer(replicas, balance):
    return balance(*(one.port for one in replicas))


@pytest.fixture(scope="module")
def served(balancer):
    """Clients of both replicas: which replica answered each, by its port."""
    at = dict[str, str]()
    with Client(balancer.url) as client:
        for name, stream in zip(NAMES, load_streams(STREAMS), strict=False):
            client.configure(name, "atp+fedcal")
            for start in (0, 20):
                client.predict(name, stream.images[start : start + 20])
            reply = httpx.get(f"{balancer.url}/clients/{name}")
            at[name] = balancer.logged(reply.headers["X-Caller-Request-Id"])["upstream"].rpartition(":")[2]
    assert len(set(at.values())) == 2
    return at


@pytest.fixture
def page(served, browser):  # whose loop keeps asyncio.run from what is started later
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(DEADLINE_MS)
    yield page
    page.close()


def told(replicas, path):
    """What each replica says, asked itself."""
    return [httpx.get(f"{one.url}{path}", timeout=30).json() for one in replicas]


def row(page, client):
    return page.locator("tbody tr", has=page.locator(f"a:text-is('{client}')"))


def test_the_table_of_clients_is_what_either_replica_says(balancer, replicas, served, page):
    listed = [{each["client_id"]: each for each in one["clients"]} for one in told(replicas, "/clients?limit=100")]
    assert listed[0] == listed[1]
    page.goto(f"{balancer.url}/ui")
    for _ in range(2):  # loaded anew, by another replica perhaps
        for name, each in listed[0].items():
            row(page, name).wait_for()
            cells = row(page, name).locator("th, td").all_inner_texts()
            agreement = f"{100 * each['agreement']:.0f} %"
            assert (cells[0], cells[1], cells[-2], agreement in cells) == (
                name,
                each["adapter"],
                str(each["version"]),
                True,
            )
        page.reload()


def test_a_client_is_what_either_replica_says_also_after_the_other_took_it_over(balancer, replicas, served, page):
    name = NAMES[0]
    page.goto(f"{balancer.url}/ui#/clients/{name}")
    page.locator("summary", has_text="Entropy").click()
    rows = page.locator("details[open] tbody tr")
    rows.first.wait_for()
    other = next(one for one in replicas if str(one.port) != served[name])
    with Client(other.url) as client:  # as where the balancer lost a replica from its list
        version = client.predict(name, load_streams(STREAMS)[0].images[40:60]).state.version
    page.locator(f"details[open] tbody td:text-is('{version}')").first.wait_for()
    timelines = [one["points"] for one in told(replicas, f"/clients/{name}/timeline")]
    assert timelines[0] == timelines[1]
    shown = [each.locator("td").all_inner_texts()[:3] for each in rows.all()]
    entropies = [f"{each['signals']['entropy']:.3g}" if each["batches"] else NOTHING for each in timelines[0]]
    points = zip(timelines[0], entropies, strict=True)
    wanted = [[str(each["version"]), str(each["batches"]), entropy] for each, entropy in points]
    assert shown == wanted[::-1]
    page.locator("dd", has_text=f"{version}").first.wait_for()


def test_health_names_both_replicas_whichever_answers(balancer, replicas, served, page):
    there = [sorted(each["id"] for each in one["replicas"]) for one in told(replicas, "/replicas")]
    assert there[0] == there[1]
    assert len(there[0]) == 2
    page.goto(f"{balancer.url}/ui#/health")
    table = page.get_by_role("region", name="Replicas")
    for _ in range(3):
        table.locator("thead th").nth(2).wait_for()
        assert sorted(table.locator("thead th").all_inner_texts()[1:]) == there[0]
        states = table.locator("tr", has_text="State").first.locator("td").all_inner_texts()
        assert states == ["✓ ready", "✓ ready"]
        page.reload()
