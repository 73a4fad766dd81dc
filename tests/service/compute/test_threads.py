"""Torch's threads: each thread of the service has its own number, and steps that torch has little part in take one."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import Pass
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.costs import Price, Prices, StepBudget
from acclimate_service.compute.process import background, one_thread, pool, take_threads
from acclimate_service.compute.steps import Job, StepParameters, Steps, image_batch
from acclimate_service.metrics import Metrics
from acclimate_service.replica import open_replica
from acclimate_service.settings import Settings
from acclimate_store import Bundle, Catalogue

BUNDLES = Path(__file__).parents[3] / "model_store/bundles"
PRICES = Prices(*[Price(call=0.001, row=0.001)] * 4)
"""Of nothing in particular."""


@pytest.fixture(autouse=True)
def _two():
    before = torch.get_num_threads()
    take_threads(2)
    yield
    take_threads(before)


def test_within_one_thread_torch_uses_no_other_and_afterwards_those_it_used_before():
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="x"), one_thread():
        raise ValueError("x")
    assert torch.get_num_threads() == 2


def test_threads_of_the_pool_are_held_to_one_whatever_is_set_when_they_begin():
    with pool() as threads:
        assert threads.submit(torch.get_num_threads).result() == 1
        torch.set_num_threads(2)
        assert threads.submit(torch.get_num_threads).result() == 1


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_work_in_the_background_yields_to_all_other_work():
    before = priority()
    with background() as threads:
        assert threads.submit(priority).result() > before
        assert threads.submit(torch.get_num_threads).result() == 1
    assert priority() == before


def test_where_no_thread_may_yield_it_works_all_the_same(monkeypatch):
    def forbidden(_):
        raise PermissionError

    monkeypatch.setattr(os, "nice", forbidden)
    with background() as threads:
        assert threads.submit(torch.get_num_threads).result() == 1


@pytest.mark.integration
async def test_what_a_service_does_beside_its_steps_is_held_to_one(tmp_path: Path):
    async with open_replica(Settings(data_dir=tmp_path, model_store=BUNDLES, threads=2)):
        torch.set_num_threads(2)  # as a step does that begins just now
        assert await asyncio.to_thread(torch.get_num_threads) == 1


@pytest.mark.parametrize(("name", "threads"), [("none", 1), ("fedcal", 1), ("bn_adapt", 2), ("atp", 2)])
def test_a_step_takes_one_thread_where_the_network_runs_elsewhere(name, threads):
    bundle, seen = Catalogue(BUNDLES).load("fashion-cnn", "1"), list[int]()

    def elsewhere(x: Tensor) -> Pass:
        seen.append(torch.get_num_threads())
        return bundle.model.frozen(x)

    model = bundle.model.with_runtime(elsewhere)
    configurations = Configurations(name, {})
    served = Bundle(bundle.manifest, model, "elsewhere")
    budget = StepBudget(model, configurations, PRICES, most_s=10)
    steps = Steps(served, configurations, Metrics(), budget)
    adapter = configurations.adapter(configurations.default)
    state = ClientState(configurations.default, adapter.init(model))
    images = np.random.default_rng(0).integers(0, 256, (3, *bundle.manifest.input.shape), np.uint8)
    steps.take([Job(state, image_batch(images), StepParameters(request_id="r"))])
    assert set(seen) <= {threads}
    assert torch.get_num_threads() == 2
    if threads == 1:
        assert seen
