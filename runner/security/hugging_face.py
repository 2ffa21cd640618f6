"""Folders in Hugging Face's format: transformers works offline, and runs no code of theirs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from runner.errors import ConfigError, install_command
from runner.record.text import shorten

T = TypeVar("T")

VOCABULARY = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
"""What says which id a text has; the first pattern that is there is enough where it is JSON."""
REMOTE = ("trust_remote_code", "custom code", "auto_map")


def import_transformers(key: str) -> Any:
    """The package, told not to use the network; ConfigError where it is not installed."""
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        raise ConfigError(key, "needs transformers, not installed", install_command("hf"))
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read at its import
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns after each fork
    return import_module("transformers")


@contextmanager
def silenced(transformers: Any) -> Iterator[None]:
    """Without its progress bars and its report of what was loaded, which ours replaces."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_from(folder: Path, key: str, loader: Callable[..., T], **options: Any) -> T:
    """What a `from_pretrained` of transformers makes of the folder's JSON files, without weights.

    Never with code out of the folder. Raises ConfigError with the first line of what is wrong.
    """
    if not (folder / "config.json").is_file():
        fix = "name a folder with config.json and the tokenizer, as save_pretrained writes it"
        raise ConfigError(key, f"{folder} has no config.json", fix)
    try:
        return loader(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # a tokenizer's library may raise anything on what it cannot read
        text = shorten(" ".join(str(error).split()), 300)
        if any(word in text for word in REMOTE):
            problem = f"{folder} needs code of its own (trust_remote_code), which is never run"
            fix = "use a model that transformers has a class for, or write one: model._target_=…"
            raise ConfigError(key, problem, fix) from None
        problem = f"{folder} cannot be read ({type(error).__name__}: {text})"
        raise ConfigError(key, problem, "name a folder that save_pretrained wrote") from error


def vocabulary_digest(folder: Path) -> str:
    """One sha256 of the files that say which ids texts have; "" where there are none."""
    files = [*folder.glob(VOCABULARY[0])]
    files = files or sorted(file for pattern in VOCABULARY[1:] for file in folder.glob(pattern))
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest() if files else ""
