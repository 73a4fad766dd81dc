"""Seeded histories on a real Redis with faults in every exchange, and the proof that the checker sees what is wrong.

`python tests/service/state/checker --seed N` replays one history and prints it.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from checker import directed, evidence, mutations
from checker.history import History
from checker.lab import Lab, open_lab, patched
from checker.profile import Profile

from acclimate_service.state import Limits
from acclimate_service.state.redis.embedded import EmbeddedRedis

FEW = 200
MANY = 10_000
BUDGET = (
    3000  # histories within which a missing safeguard must show; most do within 50, fewer where the machine is busy
)
QUICK = {
    "1 tag compare in commit",
    "3 versions for tags",
    "5 marker",
    "7 fingerprint compare",
    "8 discard of a refused result",
    "10 marker in reset",
    "17 key_min",
    "18 chunk count",
    "20 TTL in chunk",
    "21 journal cap",
    "kept states in DELETE",
    "timeline in DELETE",
    "number check",
    "pause check",
}
DIRECTED = dict(
    zip(
        directed.SCENARIOS,
        (
            mutations.VERSIONS,
            mutations.APPEND_TAG,
            mutations.LISTED,
            mutations.FETCHED,
            mutations.FLIP_TAG,
            mutations.RULE_T,
            mutations.LIFE,
            mutations.S2,
            mutations.S2,
            mutations.TOLD_AFTER,
            mutations.TOLD_OVER,
            mutations.KNOWN_AFTER,
            mutations.FORGOTTEN,
        ),
        strict=True,
    )
)


@pytest_asyncio.fixture
async def lab(redis_server: EmbeddedRedis, admin: object) -> AsyncIterator[Lab]:
    async with open_lab(redis_server.url) as lab:
        yield lab


async def test_histories_full_of_faults_break_no_promise(lab: Lab):
    report = await lab.run(range(FEW))
    assert not report.violations, report
    assert report.histories == FEW
    assert report.injected["snapshot"] > 0
    assert report.injected["lease_stolen"] > 0
    assert report.injected["late"] > 0
    assert report.injected["paused"] > 0


async def test_an_exchange_of_background_work_has_no_caller_who_could_give_up(lab: Lab):
    bench = directed.Bench(lab, Profile())
    store = bench.store(directed.Planned(load=["cancelled"]), Limits())
    assert (await store.load(bench.client, directed.MODEL)).head is None


@pytest.mark.slow
async def test_thousands_of_histories_break_no_promise(lab: Lab):
    report = await lab.run(range(60_000, 60_000 + MANY))
    print(report)
    assert not report.violations, report


@pytest.mark.slow
async def test_failing_steps_and_two_models_break_no_promise(lab: Lab):
    profile = Profile(failing_steps=0.25, second_model=1.0, duplicates=4.0)
    report = await lab.run(range(20_000, 20_300), profile)
    print(report)
    assert not report.violations, report


@pytest.mark.slow
async def test_uploads_that_expire_half_way_break_no_promise(lab: Lab):
    report = await lab.run(range(30_000, 30_300), Profile(limits={"upload_ttl_ms": 25}, size="large"))
    print(report)
    assert not report.violations, report


@pytest.mark.parametrize(
    "removed",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in mutations.MUTATIONS],
)
async def test_the_checker_sees_when_a_safeguard_is_missing(lab: Lab, removed: str):
    report = await lab.run(range(BUDGET), mutations.MUTATIONS[removed], at_once=8, until_violated=True)
    print(report)
    assert report.violations, f"nothing was seen in {report.histories} histories"


async def test_evidence_that_is_told_late_and_twice_beside_deletes_counts_once(lab: Lab):
    assert not await evidence.run(lab, range(FEW))


@pytest.mark.slow
async def test_so_it_does_in_thousands_of_histories(lab: Lab):
    assert not await evidence.run(lab, range(60_000, 62_000))


@pytest.mark.parametrize("removed", mutations.EVIDENCE)
async def test_the_checker_sees_when_evidence_counts_wrongly(lab: Lab, removed: str):
    assert await evidence.run(lab, range(FEW), mutations.EVIDENCE[removed])


@pytest.mark.parametrize("scenario", DIRECTED, ids=lambda scenario: scenario.__name__)
async def test_a_rare_history_goes_wrong_only_without_its_safeguard(lab: Lab, scenario):
    await lab.load_scripts(Profile())
    assert await scenario(lab, Profile()) == []
    mutation = DIRECTED[scenario]
    await lab.load_scripts(mutation)
    with patched(mutation):
        assert await scenario(lab, mutation) != []


@pytest.mark.integration
async def test_histories_under_a_redis_that_is_killed_break_no_promise(tmp_path):
    report = await directed.killed_server(tmp_path, range(40_000, 40_024))
    assert not report.violations, report


@pytest.mark.integration
async def test_without_an_append_only_file_they_do(tmp_path):
    report = await directed.killed_server(tmp_path, range(40_000, 40_024), durable=False)
    assert report.violations


async def test_an_equal_seed_gives_equal_plans(lab: Lab):
    one, two = History(7, Profile(), lab), History(7, Profile(), lab)
    plans = [[replica.limits for replica in history.replicas] for history in (one, two)]
    assert plans[0] == plans[1]
