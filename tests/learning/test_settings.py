"""Hyper-parameters are those that helped most where they were tried; a block of Surgical is a part of the network."""

import pytest

from acclimate_adapters import create
from acclimate_learning import settings
from acclimate_learning.clients import Pool, own_clients
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import judge
from acclimate_learning.settings import GRIDS, blocks, choose_settings
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


def test_what_has_nothing_to_choose_is_refused(bundle: Bundle, pool: Pool) -> None:
    with pytest.raises(LearningError, match="nothing is to be chosen for em; there are settings of surgical, dynfed"):
        choose_settings(bundle.model, bundle.manifest.input, own_clients(pool)[:1], "em")
