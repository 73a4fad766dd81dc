"""Simulated clients have the shift they are said to have, and no image and no corruption has two roles."""

import re

import numpy as np
import pytest

from acclimate_learning.clients import FAMILIES_OF, Pool, Population, Shift, class_counts, own_clients, simulate
from acclimate_learning.errors import LearningError

SMALL = Population(teachers=6, judges=6, teacher_images=20, judge_images=30)


@pytest.fixture(scope="module")
def marked() -> Pool:
    """Images that say in their first two pixels which they are: 3000 of 10 classes."""
    number = np.arange(3000)
    images = np.full((3000, 1, 8, 8), 128, np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = number // 256, number % 256
    return Pool(images, number % 10)


@pytest.mark.parametrize("number", [40, 200, 37])
def test_partitions_count_images_as_they_say(number: int) -> None:
    draw = np.random.default_rng(0)
    step = np.sort(class_counts("step", 10, number, draw))[::-1]
    assert step.sum() == number
    assert step[0] - step[1] <= 1
    assert step[:2].sum() == pytest.approx(0.8 * number, abs=2)
    assert step[2] - step[-1] <= 1
    two = class_counts("pathological:2", 10, number, draw)
    assert (two.sum(), (two > 0).sum()) == (number, 2)
    even, uneven = (
        np.mean([class_counts(f"dirichlet:{c}", 10, number, draw).max() for _ in range(50)]) for c in (100, 0.1)
    )
    assert even < 0.25 * number < uneven


@pytest.mark.parametrize("partition", ["even", "dirichlet:0", "dirichlet:x", "pathological:11"])
def test_partitions_that_cannot_be_are_refused(partition: str) -> None:
    with pytest.raises(LearningError, match=r"use step, dirichlet:0\.3 or pathological:2"):
        class_counts(partition, 10, 40, np.random.default_rng(0))


def test_no_image_is_in_two_roles(marked: Pool) -> None:
    population = Population(shift="label", teachers=30, judges=30, teacher_images=40, judge_images=60)
    seen = {
        role: {(int(i[0, 0, 0]), int(i[0, 0, 1])) for c in simulate(marked, population, role) for i in c.images}
        for role in ("teach", "tune", "judge")
    }
    assert all(len(images) > 200 for images in seen.values())
    assert not seen["teach"] & seen["judge"]
    assert not seen["teach"] & seen["tune"]
    assert not seen["tune"] & seen["judge"]


def test_clients_are_shifted_as_they_say_by_the_corruptions_of_their_role(marked: Pool) -> None:
    for role, families in FAMILIES_OF.items():
        clients = simulate(marked, SMALL, role)
        kinds = [client.kind for client in clients]
        assert kinds == (["feature", "label", "both"] * 2)[: len(kinds)]
        for client in clients:
            counts = np.bincount(client.labels, minlength=10)
            shifted = counts.max() > 0.3 * len(client.labels)
            assert shifted == (client.kind in ("label", "both"))
            corrupted = (client.images[:, 0, 4, 4] != 128).any() or client.shift.startswith(("elastic", "motion"))
            name = client.shift.partition(" ")[0]
            assert (name in families) == (client.kind in ("feature", "both"))
            if client.kind == "label":
                assert not corrupted


@pytest.mark.parametrize(("shift", "every"), [("feature", 1), ("mixed", 3)])
def test_every_corruption_and_severity_is_had_once_before_any_comes_again(
    shift: Shift, every: int, marked: Pool
) -> None:
    """In a mixed population two of three clients have one."""
    for role, families in FAMILIES_OF.items():
        numbers = len(families) * 2 * (3 if every == 3 else 1)
        population = Population(
            shift=shift, teachers=numbers, judges=2 * numbers, teacher_images=20, judge_images=20, seed=2
        )
        had = [c.shift.split(" ")[:2] for c in simulate(marked, population, role)[:numbers] if c.kind != "label"]
        names = [name for name, _ in had]
        for start in range(0, len(names), len(families)):
            assert sorted(names[start : start + len(families)]) == sorted(families)
        assert names[: len(families)] != names[len(families) : 2 * len(families)], "else the order is always the same"
        severities = [severity for _, severity in had]
        for start in range(0, len(severities) - 4, 5):
            assert sorted(severities[start : start + 5]) == list("12345")


def test_the_same_seed_gives_the_same_clients_and_another_one_others(marked: Pool) -> None:
    first, second = (simulate(marked, SMALL, "judge") for _ in range(2))
    assert all(np.array_equal(a.images, b.images) for a, b in zip(first, second, strict=True))
    other = simulate(marked, Population(teachers=6, judges=6, teacher_images=20, judge_images=30, seed=1), "judge")
    assert not np.array_equal(first[0].images, other[0].images)


def test_too_few_images_are_said(marked: Pool) -> None:
    said = r"up to 400 images of a class, and of one there are \d+ for those that judge; .*: --judge-images (\d+)$"
    with pytest.raises(LearningError, match=said) as caught:
        simulate(marked, Population(judge_images=1000), "judge")
    found = re.search(said, str(caught.value))
    assert found is not None
    fits = int(found[1])
    assert {len(client.labels) for client in simulate(marked, Population(judge_images=fits), "judge")} == {fits}
    with pytest.raises(LearningError, match=r"for those that teach; .*: --teacher-images \d+$"):
        simulate(marked, Population(teacher_images=1000), "teach")


def test_real_clients_keep_their_images_and_are_each_in_one_role(pool: Pool) -> None:
    assert pool.owners is not None
    roles = {role: {c.name for c in simulate(pool, SMALL, role)} for role in ("teach", "tune", "judge")}
    assert sorted(name for names in roles.values() for name in names) == sorted(set(pool.owners.tolist()))
    client = own_clients(pool)[0]
    np.testing.assert_array_equal(client.images, pool.images[pool.owners == client.name])
    with pytest.raises(LearningError, match="names 1 clients; at least 5"):
        simulate(Pool(pool.images, pool.labels, np.array(["one"] * len(pool.labels))), SMALL, "teach")
