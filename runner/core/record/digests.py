"""Digests of what a run depends on, to detect later changes: data files, and the user's modules."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

from runner.core.record.storage import read_record

log = logging.getLogger("runner")

DATA_PATH_KEYS = ("path", "validation_path", "test_path")  # keys of the files that a run reads
CHANGED_FIX = "restore the file, or to go on with it as it is: data.changed=accept"
MAX_FULL_BYTES = 2**26  # total bytes up to which all are read
MAX_STAMPED_FILES = 100_000  # of a user's data set
BLOCK_COUNT, BLOCK_BYTES = 1024, 2**14  # of larger data: this many blocks, evenly spaced


def digest_files(paths: Iterable[str], name: str = "") -> dict[str, Any]:
    """Return sha256 over the names, sizes and bytes of all files in `paths`.

    `of` says which bytes were hashed; `name` replaces that of a single file. Raises OSError.
    """
    files = [file for path in paths for file in _files(Path(os.path.expanduser(path)))]
    if name and len(files) == 1 and files[0][0] == files[0][1].name:
        files = [(name, files[0][1])]
    sizes = [file.stat().st_size for _, file in files]
    total, digest = sum(sizes), hashlib.sha256()
    for (name, _), size in zip(files, sizes, strict=True):
        digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
    if total <= MAX_FULL_BYTES:
        for _, file in files:
            digest.update(file.read_bytes())
        coverage = "all bytes"
    else:
        ends = list(accumulate(sizes))
        for position in (i * total // BLOCK_COUNT for i in range(BLOCK_COUNT)):
            number = bisect_right(ends, position)
            with files[number][1].open("rb") as stream:
                stream.seek(position - (ends[number] - sizes[number]))
                digest.update(stream.read(BLOCK_BYTES))
        coverage = f"names, sizes and {BLOCK_COUNT} blocks of {BLOCK_BYTES} bytes"
    return {"sha256": digest.hexdigest(), "of": coverage, "files": len(files), "bytes": total}


class DataFiles:
    """The files that a run reads, and their digest, computed once."""

    def __init__(self, data: object) -> None:
        """Find the paths in the config of `data`."""
        self.paths = {
            f"data.{key}": str(Path(os.path.expanduser(path)).absolute())
            for key in DATA_PATH_KEYS
            if (path := str(getattr(data, key, None) or "???")) != "???"
        }

    @cached_property
    def digest(self) -> dict[str, Any]:
        """The digest of all files, as provenance.json has it. Raises OSError."""
        return digest_files(self.paths.values())

    def describe(self) -> dict[str, Any]:
        """Return paths and digests, of all files and of data.path alone; {} if unreadable."""
        if not self.paths:
            return {}
        try:
            own = self.digest
            if len(self.paths) > 1:
                own = digest_files([self.paths["data.path"]])
        except OSError as error:
            log.warning("the data have no digest, by which changes are found: %s", error)
            return {}
        return {"paths": self.paths, "sha256": self.digest["sha256"], "own": own["sha256"]}


def stamp_arguments(arguments: Mapping[str, Any]) -> str:
    """Return a sha256 of names, sizes and times of the files that texts in `arguments` name.

    "" without one, or for more than MAX_STAMPED_FILES. For a user's data set, which is not read.
    """
    texts = [value for value in arguments.values() if isinstance(value, str) and value]
    paths = [path for text in texts if (path := Path(os.path.expanduser(text))).exists()]
    stamp, count = hashlib.sha256(), 0
    for path in paths:
        walk = [("", [], [""])] if path.is_file() else os.walk(path)
        entries = []
        for folder, _, names in walk:
            count += len(names)
            if count > MAX_STAMPED_FILES:
                return ""
            for file in (Path(path, folder, name) for name in names):
                with suppress(OSError):
                    status = file.stat()
                    name = os.path.relpath(file, path)
                    entries.append(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0")
        stamp.update("".join(sorted(entries)).encode("utf-8", "surrogatepass"))
    return stamp.hexdigest() if paths else ""


def change_problem(files: DataFiles, since: str, then: str, what: str = "") -> str:
    """Return the message that `what` (data.path) has another digest than `then`. Raises OSError."""
    now = files.digest["sha256"]
    digests = f"sha256 {then[:12]}… then, {now[:12]}… now"
    return f"{what or files.paths['data.path']} has changed since {since}: {digests}"


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of a file, or of all in a folder but hidden ones and outputs of runs."""
    if path.is_file():
        return [(path.name, path)]
    outputs = Path("outputs").absolute()
    names = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
    return sorted(
        (name.as_posix(), file)
        for name, file in names
        if not any(part.startswith(".") for part in name.parts)
        and not file.absolute().is_relative_to(outputs)
    )


# -- the user's modules ----------------------------------------------------------------------------

PROVENANCE = "provenance.json"
MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
INSTALLED = {"site-packages", "dist-packages"}
FOREIGN_PACKAGES = sys.stdlib_module_names | {"runner", "torch"}
MAX_NAMES = 3  # in a message
MAX_FILES, MAX_BYTES = 5_000, 2**26  # beyond these, sizes are recorded in place of digests


def user_packages(settings: Mapping[str, Any]) -> set[str]:
    """Return the packages that a config, by dotted keys, trusts or takes a class from."""
    targets = (str(x) for key, x in settings.items() if x and key.endswith("._target_"))
    names = {*(settings.get("security.trusted") or ()), *(t.partition(".")[0] for t in targets)}
    return {str(name) for name in names if str(name).partition(".")[0] not in FOREIGN_PACKAGES}


def digest_modules(
    packages: Collection[str], known: Mapping[str, str | int] | None = None
) -> dict[str, str | int]:
    """Return name and sha256 of the loaded modules of `packages`, or beside one not installed.

    Those in `known` are kept: a file may be edited while the run uses the loaded module.
    """
    if not packages:
        return {}
    folders = tuple(filter(None, map(_source_folder, packages)))
    prefixes = tuple(f"{package}." for package in packages)
    digests, total = dict(known or {}), 0
    for name, module in sorted(sys.modules.copy().items()):
        file = str(getattr(module, "__file__", None) or "")
        if name in digests or not file or not MODULE_NAME.fullmatch(name):
            continue
        is_beside = not _is_installed(file) and os.path.abspath(file).startswith(folders)
        is_foreign = name.partition(".")[0] in FOREIGN_PACKAGES
        if f"{name}.".startswith(prefixes) or (is_beside and not is_foreign):
            with suppress(OSError):
                size = os.stat(file).st_size
                total += size
                within = len(digests) < MAX_FILES and total <= MAX_BYTES
                digests[name] = file_digest(file) if within else size
    return digests


def changed_files(folder: Path, step: int | None = None) -> list[str]:
    """Return the files of modules that differ from those that the run in `folder` has loaded.

    Of the session that wrote the checkpoint of `step`, or of any. A name that is not on today's
    module path is left out, since the module that imported it has changed as well.
    """
    modules = _recorded_modules(folder, step)
    files = {name: find_module_file(name) for name, _ in modules}
    changed = {name for name, then in modules if (file := files[name]) and _differs(file, then)}
    return [os.path.relpath(str(files[name])) for name in sorted(changed)]


def warn_changed_code(source: Path, step: int | None) -> None:
    """Log files that differ from those of a run or checkpoint `source`, of `step` if known."""
    path = source.absolute()
    folder = next((p for p in (path, *path.parents[:2]) if (p / PROVENANCE).is_file()), None)
    if folder is not None and (files := changed_files(folder, step)):
        names = ", ".join(files[:MAX_NAMES])
        more = f" and {len(files) - MAX_NAMES} more" if files[MAX_NAMES:] else ""
        log.warning("%s%s: the code differs from that of the run in %s", names, more, source)


def _differs(file: str, then: str | int) -> bool:
    try:
        return then != (file_digest(file) if isinstance(then, str) else os.stat(file).st_size)
    except OSError:
        return False


def _recorded_modules(folder: Path, step: int | None) -> list[tuple[str, str | int]]:
    """Return the modules in a run's record: of all sessions, or of that which reached `step`."""
    pairs: list[tuple[str, str | int]] = []
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sessions = json.loads(read_record(folder / PROVENANCE))["sessions"]
        sessions = [s for s in sessions if s.get("modules")]
        if step is not None:
            reached = [s for s in sessions if s["step"] < max(1, step)]
            sessions = reached[-1:]
        for session in sessions:
            for name, then in session["modules"].items():
                if MODULE_NAME.fullmatch(name) and isinstance(then, str | int):
                    pairs.append((name, then))
    return list(dict.fromkeys(pairs))


def find_module_file(name: str) -> str | None:
    """Return the file of a module on today's module path, without importing anything."""
    if (module := sys.modules.get(name)) is not None:
        return getattr(module, "__file__", None)
    # the job has the current folder last on its module path; this process may not have it
    path: Any = [*sys.path, os.getcwd()]
    spec, parts = None, name.split(".")
    for i, part in enumerate(parts):
        # not by the whole name: folders without __init__.py then need their parent to be imported
        spec = PathFinder.find_spec(part, path)
        path = None if spec is None else spec.submodule_search_locations
        path = getattr(path, "_path", path)
        if spec is None or (path is None and i + 1 < len(parts)):
            return None
    return spec.origin if spec is not None and spec.has_location else None


def file_digest(file: str) -> str:
    """Return the sha256 of a file. Raises OSError."""
    status = os.stat(file)
    return _digest_version(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=MAX_FILES)
def _digest_version(file: str, mtime_ns: int, size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _source_folder(package: str) -> str:
    """Return the folder that holds a loaded package that is not installed; else ""."""
    module = sys.modules.get(package.partition(".")[0])
    file = str(getattr(module, "__file__", None) or "")
    roots = [*map(str, getattr(module, "__path__", ()))] or [file]
    if module is None or not roots[0] or _is_installed(roots[0]):
        return ""
    return os.path.join(os.path.dirname(os.path.abspath(roots[0])), "")


def _is_installed(file: str) -> bool:
    # by text: a path object for each of thousands of modules takes a tenth of a short run
    return not INSTALLED.isdisjoint(file.replace(os.altsep or os.sep, os.sep).split(os.sep))
