"""Folders that Hugging Face's `datasets` wrote by `save_to_disk`: arrow streams and JSON.

They are read by pyarrow alone, memory-mapped; `datasets` is not needed. A folder of several splits
has one such folder for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from runner.core.data.paths import check_link
from runner.core.errors import DataError
from runner.core.security.files.policy import FilePolicy

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MAX_JSON_BYTES = 1 << 24  # bytes of a JSON file


def is_saved(path: Path) -> bool:
    """Whether `path` is a saved split, or a saved dataset without splits."""
    return (path / STATE).is_file() and (path / INFO).is_file()


def split_names(path: Path) -> list[str]:
    """Return the split names of a saved DatasetDict in its own order; [] for other folders."""
    if not (path / SPLITS).is_file():
        return []
    names = _read_json(path / SPLITS, "splits")
    return [name for name in map(str, names) if is_saved(path / name)]


def read_saved(path: Path, policy: FilePolicy | None = None) -> Any:
    """Read all columns as a memory-mapped arrow table; class numbers become names.

    Raises DataError for damaged files, and SecurityError for symlinks out of the folder.
    """
    import pyarrow

    features = _read_json(path / INFO, "features")
    try:
        names = [str(file["filename"]) for file in _read_json(path / STATE, "_data_files")]
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"{STATE} lists no files in its folder")
        parts = []
        for name in names:
            file = check_link(path / name, path, policy)
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as stream:
                parts.append(stream.read_all())
        table = pyarrow.concat_tables(parts)
        table.validate(full=True)  # offsets of a damaged file may point outside of its buffers
        for number, column in enumerate(table.column_names):
            classes = (features.get(column) or {}).get("names")
            if (features.get(column) or {}).get("_type") == "ClassLabel" and classes:
                decoded = _decode_classes(table.column(column), [*map(str, classes)])
                table = table.set_column(number, column, decoded)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"data.path: {path}: not a save_to_disk dataset: {reason}") from None
    return table


def _decode_classes(codes: Any, classes: Sequence[str]) -> Any:
    """Convert a column of class numbers to names; -1 (no class) becomes null."""
    import pyarrow
    from pyarrow import compute

    numbers = codes.combine_chunks().cast(pyarrow.int32())
    numbers = compute.if_else(compute.equal(numbers, -1), None, numbers)
    dictionary = pyarrow.array(classes, pyarrow.string())
    decoded = pyarrow.DictionaryArray.from_arrays(numbers, dictionary)  # checks that all are in it
    return pyarrow.chunked_array([decoded])


class SavedImages(Sequence[BytesIO]):
    """The encoded images of a saved dataset, memory-mapped and read by index."""

    def __init__(self, path: Path, policy: FilePolicy | None) -> None:
        features = _read_json(path / INFO, "features")
        images = [n for n, f in features.items() if (f or {}).get("_type") == "Image"]
        classes = [n for n, f in features.items() if (f or {}).get("_type") == "ClassLabel"]
        if len(images) != 1 or len(classes) > 1:
            counts = f"{len(images)} columns of images and {len(classes)} of classes"
            fix = "save it with one of each (Image and ClassLabel)"
            raise DataError(f"data.path: {path} has {counts}; {fix}")
        table = read_saved(path, policy)
        self.path, self.column = path, table.column(images[0])
        self.kept = np.arange(len(self.column))  # rows; others are left out
        self.class_names = tuple(map(str, features[classes[0]]["names"])) if classes else ()
        self.labels: np.ndarray | None = None
        if classes:
            codes = table.column(classes[0]).combine_chunks().indices
            if codes.null_count:
                raise DataError(f"data.path: {path}: {codes.null_count} rows have no class (-1)")
            self.labels = codes.to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: Any) -> Any:
        """Return the encoded bytes of one image; DataError if only its path was saved."""
        row = int(self.kept[index])
        content = (self.column[row].as_py() or {}).get("bytes")
        if content is None:
            problem = f"row {row} has no bytes, only the path of a file"
            raise DataError(f"data.path: {self.path}: {problem}; embed the images")
        return BytesIO(content)


def _read_json(path: Path, key: str) -> Any:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        return json.loads(path.read_bytes())[key]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"data.path: {path} cannot be read: {error}") from None
