"""Parquet files as chunks of texts. The only file that needs `pyarrow`, which is optional."""

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.data.records import Chunk, Source

_ROWS = 256  # read together, so that few long texts are in memory
_INSTALL = 'Parquet needs the package pyarrow: pip install "megatron[parquet]"'


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ValueError(_INSTALL) from None


def _open(path: str) -> Any:
    arrow = _pyarrow()
    try:
        return arrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {_one_line(error)}") from None


def problems(path: str, keys: Sequence[str]) -> list[str]:
    """A sentence for each thing that keeps the columns `keys` of a file from being read as texts."""
    try:
        with _open(path) as file:
            schema = file.schema_arrow
    except ValueError as error:
        return [str(error)]
    absent = [key for key in keys if key not in schema.names]
    if absent:
        return [f"--json-keys {' '.join(absent)}: {path} has the columns {', '.join(schema.names)}"]
    wrong = [key for key in keys if not _is_text(schema.field(key).type)]
    return [f"{path}: the column {key} holds {schema.field(key).type}, not texts" for key in wrong]


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def read_chunks(source: Source, keys: Sequence[str], chunk_bytes: int) -> Iterator[Chunk]:
    """The rows of a file in chunks of about `chunk_bytes`: the bytes under each of `keys`, None where there is none."""
    arrow = _pyarrow()
    numbers: list[int] = []
    records: list[tuple[bytes | None, ...]] = []
    total = row = told = 0
    try:
        with _open(source.path) as file:
            whole, rows = os.path.getsize(source.path), max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(_ROWS, columns=list(keys), use_threads=False):
                for record in zip(*(_cells(arrow, batch.column(key)) for key in keys), strict=True):
                    row += 1
                    numbers.append(row)
                    records.append(record)
                    total += sum(len(cell or b"") for cell in record)
                    if total >= chunk_bytes:
                        yield Chunk(source, numbers, records, whole * row // rows - told)
                        numbers, records, total, told = [], [], 0, whole * row // rows
            if records:
                yield Chunk(source, numbers, records, whole - told)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{source.path} is cut short or damaged: {_one_line(error)}") from None


def _cells(arrow: Any, column: Any) -> Iterator[bytes | None]:
    # as bytes, so that what is not UTF-8 is told like in any other file
    return (cell.as_py() for cell in column.cast(arrow.large_binary()))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
