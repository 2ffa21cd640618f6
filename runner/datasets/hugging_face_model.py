"""model=hf: a Hugging Face transformers model in a local folder, pretrained or not."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.core.device import memory
from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.format import count_noun
from runner.core.interfaces.batch import Sizes
from runner.core.models.weights import list_names, read_weights
from runner.core.security.files.policy import FilePolicy
from runner.datasets.hugging_face_files import (
    import_transformers,
    load_pretrained,
    silence_transformers,
    vocabulary_digest,
)

log = logging.getLogger("runner")

KEY = "model.path"
AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "language_modelling": "AutoModelForCausalLM",
}
MODULE_REPLACING = ("quantization_config", "fusion_config")
"""Config entries that replace modules of the model."""


def build_pretrained(
    folder: Path, sizes: Sizes, policy: FilePolicy | None
) -> tuple[nn.Module, list[Choice]]:
    """Build the model in fp32 on the CPU, sized by the data; pretrained unless `policy` is None.

    Raises ConfigError for a folder or data that do not fit, SecurityError for refused weights.
    """
    transformers = import_transformers(KEY)
    if sizes.vocab is None:
        problem = "needs token ids, which the data lacks"
        raise ConfigError("model", f"hf {problem}", "use data=text, data=tokens, or another model")
    settings = load_pretrained(folder, KEY, transformers.AutoConfig.from_pretrained)
    _apply_sizes(settings, sizes, str(folder))
    auto = getattr(transformers, AUTO_CLASSES[sizes.task])
    with torch.device("meta"):
        empty: Any = _build_untrained(auto, settings, str(folder))
    size = sum(p.numel() * p.element_size() for p in empty.parameters())
    if size > (available := memory.available_bytes()):
        problem = f"the weights that {folder}/config.json describes take {size:,} bytes, but only "
        raise ConfigError(KEY, f"{problem}{available:,} are available", "use a smaller model")
    if policy is None:
        model = _build_untrained(auto, settings, str(folder))
        return model, _match_padding(model, sizes.padding)
    weights = read_weights(folder, policy)
    state: dict[str, Any] = {}
    for part in weights.parts(policy):
        state |= part
    try:
        with silence_transformers(transformers):
            model, info = type(empty).from_pretrained(
                None,
                config=settings,
                state_dict=state,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        problem = f"{weights.path}: cannot be loaded into the model: {reason}"
        raise ConfigError(KEY, problem) from error
    trust = weights.trust.name.lower()
    reason = "; ".join([trust, *weights.notes, *_describe_loading(model, info)])
    choice = Choice(KEY, f"{weights.path}, sha256 {weights.sha256}", reason)
    log.info("%s: %s: %s", KEY, choice.value, choice.reason)
    return model, [choice, *_match_padding(model, sizes.padding)]


def save_pretrained_files(model: Any, tokenizer: Path, folder: Path) -> None:
    """Write config.json and the tokenizer's files beside the weights, for `from_pretrained`.

    `model` was made by `build_pretrained`. Raises OSError, and ConfigError if `tokenizer` is no
    longer readable.
    """
    settings = deepcopy(model.config)
    settings.architectures, settings.use_cache = [type(model).__name__], True
    settings.save_pretrained(folder)
    if not vocabulary_digest(tokenizer):
        return
    auto = import_transformers(KEY).AutoTokenizer
    load_pretrained(tokenizer, KEY, auto.from_pretrained, use_fast=True).save_pretrained(folder)


def _apply_sizes(settings: Any, sizes: Sizes, path: str) -> None:
    """Set the data's sizes in the model's config; ConfigError if the model cannot have them."""
    for name in MODULE_REPLACING:
        if getattr(settings, name, None) is not None:
            raise ConfigError(KEY, f"{path} has a {name}", "name the folder of the plain model")
    max_positions = getattr(settings, "max_position_embeddings", None)
    if isinstance(max_positions, int) and (sizes.sequence or 0) > max_positions:
        problem = f"{sizes.sequence} is more than the {max_positions} positions of {path}"
        raise ConfigError("data.sequence", problem, f"data.sequence={max_positions}")
    if (sizes.vocab or 0) > settings.vocab_size:
        problem = f"{path} has {settings.vocab_size} tokens, but the data's ids go up to "
        fix = f"leave out data.tokenizer: the one of {path} is used"
        raise ConfigError("data.tokenizer", f"{problem}{(sizes.vocab or 0) - 1}", fix)
    settings._attn_implementation = None  # not the folder's, which may name code on a server
    settings.use_cache = False  # for generation: it keeps activations that training frees
    if getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = sizes.padding
    if sizes.task != "language_modelling":
        names = sizes.class_names or tuple(map(str, range(sizes.classes or 1)))
        settings.num_labels = len(names) if sizes.task == "classification" else sizes.classes
        settings.id2label = dict(enumerate(names))
        settings.label2id = {name: number for number, name in enumerate(names)}


def _match_padding(model: Any, padding: int | None) -> list[Choice]:
    """Set the id that the data are padded with as the model's padding, and return the choice.

    A decoder classifies at the last token that is no padding: with another id a prediction would
    depend on the longest text of its batch. Left alone where positions count from the padding's id
    (RoBERTa): these do not depend on padding that follows the text.
    """
    stated = model.config.pad_token_id
    tables = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    from_padding = any("position" in name and m.padding_idx is not None for name, m in tables)
    if padding is None or stated == padding or from_padding:
        return []
    model.config.pad_token_id = padding
    reason = f"the tokenizer pads with it; config.json of the model says {stated}"
    return [Choice("model.pad_token_id", padding, reason)]


def _build_untrained(auto: Any, settings: Any, path: str) -> nn.Module:
    try:
        model: nn.Module = auto.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        problem = f"{path}: {auto.__name__} does not support it: {reason}"
        raise ConfigError(KEY, problem, "name a model for the data's task") from error
    return model


def _describe_loading(model: Any, info: dict[str, Any]) -> list[str]:
    """Return which tensors are loaded and which are fresh; ConfigError for a misfit in the body."""
    names, body = [*model.state_dict()], f"{model.base_model_prefix}."
    misfits = {entry[0]: entry[1:] for entry in info["mismatched_keys"]}
    fresh = sorted({*info["missing_keys"], *misfits})
    if body_misfits := [name for name in misfits if name.startswith(body)]:
        stored_shape, expected_shape = (list(shape) for shape in misfits[body_misfits[0]][:2])
        problem = f"{body_misfits[0]} has shape {stored_shape}, expected {expected_shape}"
        raise ConfigError(KEY, problem, "its config.json belongs to another model")
    if len(fresh) >= len(names):
        problem = "none of its weights is in the model"
        raise ConfigError(KEY, problem, "name a model's folder, or use model.pretrained=false")
    parts = [f"{len(names) - len(fresh):,} of {count_noun(len(names), 'tensor')}"]
    if fresh:
        parts.append(f"fresh: {list_names(fresh)}")
    if unused := sorted(info["unexpected_keys"]):
        parts.append(f"left out of the file: {list_names(unused)}")
    return parts
