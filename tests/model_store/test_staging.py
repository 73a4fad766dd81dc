import threading

import numpy as np
import pytest
import torch

from acclimate_store.staging import Staging

CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


@pytest.fixture(params=DEVICES)
def staging(request: pytest.FixtureRequest) -> Staging:
    return Staging(torch.device(request.param))


def batch(seed: int, *shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (20, 1, 28, 28), (7, 3, 32, 32), (0, 1, 2, 2)])
def test_a_batch_arrives_as_it_was_sent(staging: Staging, dtype: type, shape: tuple[int, ...]) -> None:
    sent = batch(0, *shape, dtype=dtype)
    arrived = staging.send(sent)
    assert arrived.cpu().numpy().dtype == dtype
    np.testing.assert_array_equal(arrived.cpu().numpy(), sent)


def test_later_batches_leave_those_that_arrived_alone(staging: Staging) -> None:
    sent = [batch(seed, 20, 1, 28, 28) for seed in range(7)]
    arrived = [staging.send(each) for each in sent]
    for one, other in zip(sent, arrived, strict=True):
        np.testing.assert_array_equal(other.cpu().numpy(), one)


def test_read_only_and_scattered_memory_will_do(staging: Staging) -> None:
    sent = np.frombuffer(batch(1, 64).tobytes(), np.uint8).reshape(4, 1, 4, 4)[::2, :, :, ::-1]
    np.testing.assert_array_equal(staging.send(sent).cpu().numpy(), sent)


def test_each_size_class_has_two_buffers_in_turn(staging: Staging) -> None:
    for rows in (1, 5, 5, 5, 100):
        staging.send(batch(0, rows, 1, 28, 28))
    assert sorted(staging._buffers) == [4096, 131072]
    before = staging._buffers[4096]
    staging.send(batch(0, 1, 1, 28, 28))
    assert staging._buffers[4096] == before[::-1]


def test_threads_do_not_mix_their_batches(staging: Staging) -> None:
    wrong = []

    def send(seed: int) -> None:
        sent = batch(seed, 20, 1, 28, 28)
        for _ in range(20):
            if not np.array_equal(staging.send(sent).cpu().numpy(), sent):
                wrong.append(seed)

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_type_that_torch_does_not_have_is_refused(staging: Staging) -> None:
    with pytest.raises(TypeError, match="can't convert"):
        staging.send(np.array(["a"]))
