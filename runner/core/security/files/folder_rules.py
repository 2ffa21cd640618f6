"""Rules for the files beside weights: links, shard indexes, and configs that run code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.core.findings import Reason
from runner.core.security.checksummed_json import MANIFEST
from runner.core.security.files.file_bytes import hash_file
from runner.core.security.files.formats import FileRefusal, is_model_name, leads_outside, printable
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import check_link, is_in_run_tree, link_roots

INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 1 << 24
REQUIRED_CONFIGS = ("config.json", "model_index.json")  # endings of names that libraries read
MAX_CONFIG_BYTES = {".json": 1 << 23, ".yaml": 1 << 20, ".yml": 1 << 20}  # by suffix
CODE_KEY = re.compile(
    r"_target_|_instantiator|class_path|auto_map|custom_pipelines?|trust_remote_code|py/\w+"
)
"""Keys of configs that make their readers import a class or run a file."""
LIBRARIES = ("diffusers", "peft", "sentence_transformers", "timm", "transformers")
YAML_TAG = re.compile(
    "!|tag:yaml.org,2002:(null|bool|int|float|binary|timestamp|omap|pairs|set|str|seq|map)"
)
YAML_FALSE = ("", "~", "null", "false", "no", "off")
WAY_OUT = "name the weight file itself, or add the sha256 of this one to security.pinned"


def check_folder(
    folder: Path, policy: FilePolicy, roots: Sequence[Path] | None = None
) -> list[Reason]:
    """Return refusals of files beside weights; links may lead to `roots`, else the folder."""
    reasons: list[Reason] = []
    for path in () if is_in_run_tree(folder, policy) else sorted(folder.iterdir()):
        try:
            _check_file(path, link_roots(folder) if roots is None else roots)
        except FileRefusal as refusal:
            if not (policy.pinned and path.is_file() and hash_file(path)[0] in policy.pinned):
                reasons.append(replace(refusal.reason, where=printable(path.name)))
    return reasons


def read_index(path: Path) -> dict[str, str]:
    """Return the file name by tensor. Raises FileRefusal unless all are files in its folder."""
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {MAX_INDEX_BYTES >> 20} MiB")
        by_name: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        names = list(by_name.values())
        if not names:
            raise ValueError("its weight_map lists no files in its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        evidence = f"is not a shard index: {printable(error, 160)}"
        raise FileRefusal("index.malformed", "", evidence) from None
    for name in names:
        if not name or leads_outside(name) or name != Path(name).name:
            evidence = f"names {printable(repr(name), 160)}, which is no file in its folder"
            raise FileRefusal("index.path", "", evidence)
    return by_name


def _check_file(path: Path, roots: Sequence[Path]) -> None:
    suffix = path.suffix.lower()
    if suffix in MAX_CONFIG_BYTES or is_model_name(path.name):
        check_link(path, roots)
    if suffix not in MAX_CONFIG_BYTES or path.name == MANIFEST or not path.is_file():
        return
    if path.name.lower().endswith(INDEX_SUFFIX):
        try:
            read_index(path)
        except FileRefusal as refusal:  # an index of other things is not read
            is_of_model = is_model_name(path.name[: -len(INDEX_SUFFIX)])
            if refusal.reason.code == "index.path" or is_of_model:
                raise
        return
    is_required = path.name.endswith(REQUIRED_CONFIGS)
    if path.stat().st_size > MAX_CONFIG_BYTES[suffix]:
        if is_required or suffix != ".json":  # other large ones are data or vocabularies
            evidence = f"has more than {MAX_CONFIG_BYTES[suffix] >> 20} MiB, too much for a config"
            raise FileRefusal("config.size", "", evidence, WAY_OUT)
        return
    try:
        if suffix == ".json":
            json.loads(path.read_bytes(), object_pairs_hook=_check_entries)
        else:
            _check_yaml(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if is_required:  # no program reads the others either
            evidence = f"cannot be read: {printable(error, 160)}"
            raise FileRefusal("config.malformed", "", evidence, WAY_OUT) from None


def _check_entries(entries: list[tuple[str, Any]]) -> bool:
    """Check a JSON object; return whether it has entries, in its place."""
    for key, value in entries:
        is_code = CODE_KEY.fullmatch(key) and value
        if is_code and (type(value) not in (int, float) or key == "trust_remote_code"):
            raise _code_refusal(key, value)
        if type(value) is str and (
            (key == "parent_library" and value.partition(".")[0] not in LIBRARIES)
            or (key.endswith("attn_implementation") and "/" in value)
        ):
            raise _code_refusal(key, value)
    return bool(entries)


def _check_yaml(data: bytes) -> None:
    """Check a stream of YAML by its events, so that no alias expands and nothing is constructed."""
    import yaml  # type: ignore[import-untyped]  # rarely needed

    key = ""
    try:
        for event in yaml.parse(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            text = getattr(event, "value", None)
            tag = getattr(event, "tag", None)
            if tag and not YAML_TAG.fullmatch(tag):
                raise FileRefusal("config.tag", "", f"has the tag {tag}", WAY_OUT)
            is_end = isinstance(event, yaml.CollectionEndEvent | yaml.DocumentEndEvent)
            if key and not is_end and (text is None or text.lower() not in YAML_FALSE):
                raise _code_refusal(key, text or "…")
            key = text if text is not None and CODE_KEY.fullmatch(text) else ""
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _code_refusal(key: str, value: Any) -> FileRefusal:
    shown = f" = {value}" if type(value) is str else ""
    evidence = f"has {key}{shown}, which makes a program that reads it run code"
    return FileRefusal("config.code", "", evidence, WAY_OUT)
