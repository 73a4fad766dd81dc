"""Files of rows with named columns: Parquet, and Arrow as the library `datasets` of Hugging Face saves it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from acclimate_store.errors import SampleError


def saved_to_disk(path: Path) -> list[Path]:
    """The files of a data set that `save_to_disk` wrote; raises SampleError if there is none, or several."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in path.glob("*/state.json"))
        raise SampleError(
            f"{path} holds several data sets; name one of them: {', '.join(str(path / s) for s in splits)}"
        )
    try:
        state = json.loads((path / "state.json").read_bytes())
        files = [path / each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SampleError(f"{path / 'state.json'} is not that of a saved data set: {error!r}") from error
    if not files:
        raise SampleError(f"{path} is a saved data set without rows")
    return files


class Table(NamedTuple):
    """A file of rows; `batches` gives some columns of at most so many rows at a time."""

    schema: Any
    rows: int
    batches: Callable[[int, Sequence[str]], Iterator[Any]]


def open_tables(files: Sequence[Path], path: Path) -> list[Table]:
    """Open the files of a data set.

    Args:
        files: of the same columns.
        path: of the data set, for messages.

    Raises:
        SampleError: they cannot be read, or pyarrow is not there to do it.
    """
    if find_spec("pyarrow") is None:
        raise SampleError(f'{path} needs pyarrow to be read; pip install "acclimate[parquet]"')
    from pyarrow import ArrowInvalid

    try:
        return [_table(file) for file in files]
    except (OSError, ArrowInvalid) as error:
        raise SampleError(f"{path} cannot be read: {error}") from error


def _table(file: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    if file.suffix == ".parquet":
        found = parquet.ParquetFile(file)
        return Table(found.schema_arrow, found.metadata.num_rows, lambda n, names: found.iter_batches(n, columns=names))

    def opened() -> Any:
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))

    def batches(size: int, names: Sequence[str]) -> Iterator[Any]:
        for batch in opened():
            part = batch.select(names)
            yield from (part.slice(start, size) for start in range(0, part.num_rows, size))

    return Table(opened().schema, sum(batch.num_rows for batch in opened()), batches)


def label_names(metadata: Mapping[bytes, bytes]) -> list[str] | None:
    """Names of the classes, where the file says them as the `datasets` library does."""
    try:
        names: list[str] = json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, ValueError, TypeError):
        return None
    return names
