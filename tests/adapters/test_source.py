import numpy as np
import pytest
import torch

from acclimate_adapters import Anchors, ConfigurationError, Source

PRIOR = torch.full((4,), 0.25)
ALIKE = torch.full((4, 4), 0.25)


def test_present_names_what_is_there() -> None:
    assert Source(prior=PRIOR).present == {"prior"}
    full = Source(
        prior=PRIOR,
        rates={},
        confusion=torch.eye(4),
        prototypes=torch.zeros(4, 2),
        descriptor=torch.zeros(2),
        anchors=Anchors(torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)),
        moments={"bn.row_var": torch.zeros(2)},
    )
    assert full.present == {"prior", "rates", "confusion", "prototypes", "descriptor", "anchors", "moments"}


def test_arrays_are_taken_and_copied() -> None:
    array = np.full(4, 0.25, np.float32)
    source = Source(prior=array)  # type: ignore[arg-type]
    array[:] = 9
    assert source.prior.tolist() == [0.25] * 4


def test_one_confusion_matrix_serves_both_modes_and_two_serve_their_own() -> None:
    assert torch.equal(Source(prior=PRIOR, confusion=torch.eye(4)).confusion_matrix("hard"), torch.eye(4))
    both = Source(prior=PRIOR, confusion={"soft": ALIKE, "hard": torch.eye(4)})
    assert torch.equal(both.confusion_matrix("soft"), ALIKE)
    with pytest.raises(ConfigurationError, match="soft"):
        Source(prior=PRIOR, confusion={"hard": torch.eye(4)}).confusion_matrix("soft")


@pytest.mark.parametrize(
    "quantities",
    [
        {"prior": torch.tensor([1.0])},
        {"prior": torch.tensor([0.5, 0.5, 0.0, 0.0])},
        {"prior": torch.tensor([0.5, 0.5, 0.5, 0.5])},
        {"prior": torch.tensor([0.5, 0.25, 0.25, torch.nan])},
        {"rates": {"conv.weight": float("inf")}},
        {"confusion": torch.eye(3)},
        {"confusion": {"soft": torch.zeros(4, 3)}},
        {"confusion": torch.eye(4) / 2},
        {"confusion": torch.eye(4) * 2 - ALIKE},
        {"prior": torch.tensor([0.5, 0.25, 0.25, 1e-50], dtype=torch.float64)},
        {"prototypes": torch.zeros(3, 2)},
        {"descriptor": torch.zeros(2, 2)},
        {"moments": {"bn.row_var": torch.tensor([torch.inf])}},
        {"anchors": Anchors(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64))},
    ],
    ids=str,
)
def test_quantities_that_no_adapter_could_use_are_refused(quantities: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Source(**{"prior": PRIOR, **quantities})  # type: ignore[arg-type]


def test_confusion_matrix_by_rows_is_refused_and_told_to_be_transposed() -> None:
    by_columns = torch.tensor([[0.9, 0.3], [0.1, 0.7]])
    Source(prior=[0.5, 0.5], confusion=by_columns)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"source.confusion.hard holds P\(predicted i \| true j\).*transpose"):
        Source(prior=[0.5, 0.5], confusion={"soft": by_columns, "hard": by_columns.T})  # type: ignore[arg-type]


def test_column_of_zeros_stands_for_a_class_without_rows() -> None:
    confusion = torch.tensor([[0.9, 0.0], [0.1, 0.0]])
    assert torch.equal(Source(prior=[0.5, 0.5], confusion=confusion).confusion_matrix("soft"), confusion)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rounded_confusion_matrix_is_still_one(dtype: torch.dtype) -> None:
    matrix = torch.rand(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Source(prior=torch.full((10,), 0.1), confusion=(matrix / matrix.sum(0)).to(dtype))
