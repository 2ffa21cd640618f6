"""Load Hugging Face folders with transformers: offline, without running their code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from runner.core.errors import ConfigError, install_command
from runner.core.record.text import shorten

T = TypeVar("T")

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "merges.txt", "*.model")
"""Files that map text to ids; if tokenizer.json exists, it alone counts."""
MAX_CONFIG_BYTES = 1 << 24
MAX_COUNTS = {
    r"(layer|depth|block|stage)s?$": 1024,  # each is built
    r"experts?$": 4096,
    r"labels?$": 1_000_000,
    r"position|_ctx$|length": 1 << 24,
    "": 1 << 31,  # sizes: the weights must fit into memory
}
"""Upper limits of numbers in config.json, by the first pattern that a name matches."""
REMOTE_CODE_WORDS = ("trust_remote_code", "custom code", "auto_map")


def import_transformers(key: str) -> Any:
    """Import transformers in offline mode; ConfigError if it is not installed."""
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        raise ConfigError(key, "needs transformers, not installed", install_command("hf"))
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read on import
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns after every fork
    return import_module("transformers")


@contextmanager
def silence_transformers(transformers: Any) -> Iterator[None]:
    """Suppress its progress bars and loading report."""
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


def load_pretrained(folder: Path, key: str, loader: Callable[..., T], **options: Any) -> T:
    """Call a `from_pretrained` of transformers on the folder, without remote code.

    Raises ConfigError with the first line of the error.
    """
    if not (folder / "config.json").is_file():
        fix = "name a folder with config.json and the tokenizer, as save_pretrained writes it"
        raise ConfigError(key, f"{folder} has no config.json", fix)
    check_config(folder / "config.json", key)
    try:
        return loader(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # tokenizers may raise any type
        text = shorten(" ".join(str(error).split()), 300)
        if any(word in text for word in REMOTE_CODE_WORDS):
            problem = f"{folder} needs custom code (trust_remote_code), which is never run"
            fix = "use a model class of transformers, or your own: model._target_=…"
            raise ConfigError(key, problem, fix) from None
        problem = f"{folder} cannot be read ({type(error).__name__}: {text})"
        raise ConfigError(key, problem, "name a folder that save_pretrained wrote") from error


def check_config(path: Path, key: str) -> None:
    """Raise ConfigError for a config.json with counts that would take minutes, or gigabytes.

    A damaged one is left to transformers, which says what is wrong.
    """
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(key, f"{path} has more than {MAX_CONFIG_BYTES >> 20} MiB")
    with suppress(OSError, ValueError, RecursionError):
        for name, number in _numbers(json.loads(path.read_bytes()), ""):
            most = next(most for form, most in MAX_COUNTS.items() if re.search(form, name))
            if number > most:
                problem = f"{path} has {shorten(name, 60)}={number:g}, more than {most:,}"
                raise ConfigError(key, problem, "name the folder of another model")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield each number in nested dicts and lists, with the name of its key."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else ((name, v) for v in value):
            yield from _numbers(inner, key)


def encode_texts(tokenizer: bytes, texts: list[str]) -> None:
    """Encode texts by a tokenizer.json: in the sandbox, as both may be made to take all memory.

    Raises the panics of the library alone: other errors are reported when it is loaded.
    """
    from tokenizers import Tokenizer

    with suppress(Exception):
        loaded = Tokenizer.from_str(tokenizer.decode())
        for text in texts:
            loaded.encode(text)


def vocabulary_digest(folder: Path) -> str:
    """Return one sha256 of the vocabulary files, or of the file; "" if there are none."""
    files = [folder] if folder.is_file() else [*folder.glob(VOCABULARY_FILES[0])]
    files = files or sorted(f for pattern in VOCABULARY_FILES[1:] for f in folder.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if files else ""
