"""Reading the columns of a parquet file a batch at a time, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.data.budget import CELL, NUMBER, Budget
from runner.errors import ConfigError, DataError
from runner.security.gate.policy import Bounds

ROWS = 1 << 16  # that are decoded at a time
SMALLER = "leave out rows or columns when it is written"
KNOWN = "if you know where it comes from, save it as csv"


def read_parquet(
    path: Path, budget: Budget, check_names: Callable[[Path, list[str]], None]
) -> dict[str, list[Any]]:
    """The columns by name, numbers or texts; a text that is there a million times is kept once.

    DataError for what is no such file, or becomes larger than it may: as its footer says, before
    anything is read, and as it turns out to be. A page is decoded whole, which is 2 GiB at most.
    """
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError:
        raise ConfigError(
            "data.path", "reading parquet needs pyarrow", 'pip install "runner[parquet]"'
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            check_names(path, file.schema_arrow.names)
            texts = [field.name for field in file.schema_arrow if _is_text(path, field, types)]
            _check_footer(path, file.metadata)
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            columns: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
            once: dict[str, dict[str, str]] = {name: {} for name in texts}
            decoded = rows = 0
            for batch in file.iter_batches(ROWS, use_threads=False):
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if name in once:
                        decoded += _take_texts(column, columns[name], once[name], budget)
                    else:
                        budget.take(NUMBER * len(column), f"column {name!r}", SMALLER)
                        decoded += column.nbytes
                        columns[name] += column.to_pylist()
                rows += batch.num_rows
                _check_decoded(path, decoded, f"{rows:,} rows or more")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    return columns


def _take_texts(column: Any, values: list[Any], once: dict[str, str], budget: Budget) -> int:
    """Put a batch's texts after those there are; how many bytes of the file's were decoded."""
    used = column.indices.drop_null().unique()  # of a dictionary that may be of all batches
    words = dict(zip(used.to_pylist(), column.dictionary.take(used).to_pylist(), strict=True))
    new = [word for word in words.values() if word is not None and word not in once]
    held = sum(map(len, new))
    budget.take(8 * len(column) + held + CELL * len(new), "its texts", SMALLER)
    once.update(zip(new, new, strict=True))
    found: dict[int | None, str | None] = {None: None}
    found.update((place, None if word is None else once[word]) for place, word in words.items())
    values += [found[place] for place in column.indices.to_pylist()]
    return int(column.indices.nbytes) + held


def _check_footer(path: Path, about: Any) -> None:
    """Before anything is read: a small file may say that it holds more than fits anywhere."""
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    chunks = (group.column(i) for group in groups for i in range(group.num_columns))
    said = max(
        8 * rows * about.num_columns,
        sum(group.total_byte_size for group in groups),
        sum(chunk.total_uncompressed_size for chunk in chunks),
    )
    _check_decoded(path, said, f"{rows:,} rows of {about.num_columns:,} columns")


def _check_decoded(path: Path, held: int, what: str) -> None:
    size = path.stat().st_size
    if held > Bounds().may_inflate(size):
        raise DataError(
            f"data.path: {path}: refused: its {size:,} bytes become {held:,} ({what}); {KNOWN}"
        )


def _is_text(path: Path, field: Any, types: Any) -> bool:
    """Whether a column holds texts; a DataError where it holds neither these nor numbers."""
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    numbers = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    if types.is_string(kind) or types.is_large_string(kind):
        return True
    if not any(check(kind) for check in numbers):
        raise DataError(
            f"{path}: column {field.name!r} is of type {kind}, neither numbers nor texts; convert "
            "it, or leave it out when the file is written"
        )
    return False
