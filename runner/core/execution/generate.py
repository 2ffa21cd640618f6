"""Texts of a trained language model: tokens drawn one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.errors import ConfigError, DataError
from runner.core.execution.evaluation import inference
from runner.core.interfaces.batch import call_model
from runner.core.interfaces.run import Run
from runner.core.models.transformer import GPT
from runner.core.objectives.model_output import logits
from runner.core.preserved_state import RandomGenerators

SEED_LIMIT = 1 << 64  # of torch's generators


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    tokens: int = 200
    temperature: float = 1.0  # 0: the likeliest
    top_k: int | None = None  # the likeliest to draw from; None: all
    seed: int = 0


def generate(run: Run, ids: Tensor, sampling: Sampling) -> Tensor:
    """Return prompts and what follows, [batch, n + tokens], for int64 prompts [batch, n].

    The weights are those that are evaluated, averaged ones if there are; no random state changes.
    Our GPT keeps the keys and values of earlier tokens, transformers' models generate on their own,
    and any other model is called with the whole context for each token. The context is at most as
    long as the samples trained on; when it is full, its older half is dropped.
    """
    vocab = run.sizes.vocab or 0
    if run.sizes.task != "language_modelling":
        raise ConfigError("predict.prompt", "needs a language model", "leave it out")
    if ids.shape[1] == 0 or (vocab and not 0 <= int(ids.min()) <= int(ids.max()) < vocab):
        raise ConfigError("predict.prompt", "has no ids that the model knows", "give another text")
    ids = ids.to(run.device.torch)
    with inference(run) as forward:
        if _is_pretrained(run.model):
            return _generate_pretrained(run.model, ids, sampling)
        next_logits = _cached_logits(run.model) if isinstance(run.model, GPT) else None
        context = run.sizes.sequence or ids.shape[1] + sampling.tokens
        return _draw(next_logits or partial(_all_logits, forward), ids, context, sampling)


def _draw(
    next_logits: Callable[[Tensor, int], Tensor], ids: Tensor, context: int, sampling: Sampling
) -> Tensor:
    """Extend `ids` by tokens of `next_logits`, which gets at most `context` of the last ones."""
    generator = torch.Generator(ids.device).manual_seed(sampling.seed % SEED_LIMIT)
    finite = torch.ones((), dtype=torch.bool, device=ids.device)
    start = max(0, ids.shape[1] - context)
    for _ in range(sampling.tokens):
        if ids.shape[1] - start > context:
            start = ids.shape[1] - max(1, context // 2)
        scores = next_logits(ids[:, start:], start).double()
        finite &= scores.isfinite().all()
        ids = torch.cat([ids, _choose(scores.nan_to_num(), sampling, generator)], 1)
    if not finite:  # host sync: once a text
        raise DataError("the model's outputs are not finite, so no text can be drawn from them")
    return ids


def _choose(scores: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return one id for each row of scores [batch, vocab], as [batch, 1]."""
    if sampling.temperature == 0:
        return scores.argmax(1, keepdim=True)
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    shares = (scores / sampling.temperature).softmax(1)
    return torch.multinomial(shares, 1, generator=generator)


def _all_logits(forward: Callable[..., Any], ids: Tensor, start: int) -> Tensor:
    """Return the logits of the next token, [batch, vocab], by a forward of the whole context."""
    return logits(call_model(forward, ids))[:, -1]


def _cached_logits(model: GPT) -> Callable[[Tensor, int], Tensor]:
    """Return a function as `_all_logits` that computes new tokens only."""
    caches: list[list[Tensor]] = []
    cached_start = 0

    def next_logits(ids: Tensor, start: int) -> Tensor:
        nonlocal cached_start
        if start != cached_start:  # positions have changed
            caches.clear()
            cached_start = start
        known = caches[0][0].shape[2] if caches else 0
        return logits(model.extend(ids[:, known:], caches))[:, -1]

    return next_logits


def _is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers; another one's `generate` may take anything."""
    bases = [cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.")]
    return any(cls.__name__ == "PreTrainedModel" for cls in bases)


def _generate_pretrained(model: nn.Module, ids: Tensor, sampling: Sampling) -> Tensor:
    """Call transformers' own generation, which ends early at an end-of-text token."""
    untyped: Any = model
    positions = getattr(untyped.config, "max_position_embeddings", None)
    total = ids.shape[1] + sampling.tokens
    if isinstance(positions, int) and total > positions:
        problem = f"{total} tokens, the prompt's included, exceed the model's {positions} positions"
        raise ConfigError("predict.tokens", problem, "use fewer")
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0}
        options["top_k"] = sampling.top_k or 0
    generators = RandomGenerators()  # it has no generator of its own
    try:
        torch.manual_seed(sampling.seed % SEED_LIMIT)
        made: Tensor = untyped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.tokens,
            use_cache=True,
            pad_token_id=getattr(untyped.config, "pad_token_id", None) or 0,
            **options,
        )
    finally:
        generators.restore()
    return made
