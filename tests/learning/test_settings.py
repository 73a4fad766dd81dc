"""Hyper-parameters are those that helped most where they were tried; a block of Surgical is a part of the network."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from acclimate_adapters import create
from acclimate_learning import settings
from acclimate_learning.clients import Pool, own_clients
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import judge
from acclimate_learning.settings import GRIDS, blocks, choose_settings, judge_settings
from acclimate_store import Bundle


def test_a_network_has_four_blocks_and_its_classifier(bundle: Bundle) -> None:
    """As in the recorded benchmark."""
    assert blocks(bundle.model) == (
        ("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("linear4", "bn4"), ("linear5",),
    )  # fmt: skip


@pytest.mark.parametrize("adapter", GRIDS)
def test_all_that_is_tried_can_be_served(adapter: str, bundle: Bundle) -> None:
    tried = list(GRIDS[adapter](bundle.model))
    assert len({str(options) for options in tried}) == len(tried) > 2
    for options in tried:
        create(adapter, **options).init(bundle.model)


def test_the_best_is_chosen_and_of_equals_the_first(
    bundle: Bundle, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [{"lr": 100.0}, {"lr": 0.0}, {"lr": 0.0, "modules": ["bn1"]}, {"lr": 50.0}]
    monkeypatch.setattr(settings, "GRIDS", {"surgical": lambda model: iter(tried)})
    clients, spec = own_clients(pool)[:1], bundle.manifest.input
    gains = [judge(bundle.model, spec, clients, "surgical", options).gains.mean() for options in tried]
    assert gains[0] < 0 == gains[1] == gains[2] > gains[3], "without a step nothing changes, with a huge one it harms"
    assert choose_settings(bundle.model, spec, clients, "surgical") == tried[1]


def test_who_can_enrol_is_judged_by_what_it_did_not_enrol_with_and_by_images_of_another(
    bundle: Bundle, pool: Pool
) -> None:
    spec, model, options = bundle.manifest.input, bundle.model, {"lr": 0.01, "beta": 0.1}
    clients = [replace(c, images=c.images[:50], labels=c.labels[:50]) for c in own_clients(pool)[:3]]
    told = judge_settings(model, spec, clients, "fedthe", options)
    fedthe = create("fedthe", **options)
    for number, own in enumerate(clients):
        other = clients[(number + 1) % 3]
        first, labels = spec.normalise(own.images[:20]), torch.from_numpy(own.labels[:20])
        state, right = fedthe.init(model, x=first, labels=labels), 0
        for part in range(3):
            images = np.concatenate([own.images[20:], other.images[20:]])[20 * part : 20 * part + 20]
            truth = np.concatenate([own.labels[20:], other.labels[20:]])[20 * part : 20 * part + 20]
            step = fedthe.step(model, state, spec.normalise(images))
            state, right = step.state, right + int((step.logits.argmax(1).numpy() == truth).sum())
        assert told.accuracy[number] == pytest.approx(right / 60)
    assert not np.array_equal(told.accuracy, told.frozen), "else nobody enrolled"


def test_only_who_takes_labelled_images_enrols(bundle: Bundle, pool: Pool) -> None:
    clients = own_clients(pool)[:1]
    with pytest.raises(LearningError, match="em takes no labelled images of a client"):
        judge(bundle.model, bundle.manifest.input, clients, "em", enrolment=clients)


def test_what_has_nothing_to_choose_is_refused(bundle: Bundle, pool: Pool) -> None:
    with pytest.raises(LearningError, match="nothing is to be chosen for em; there are settings of fedthe, surgical"):
        choose_settings(bundle.model, bundle.manifest.input, own_clients(pool)[:1], "em")
