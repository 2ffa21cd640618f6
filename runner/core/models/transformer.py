"""The text models: a decoder for language modelling and an encoder that labels text."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core.errors import DataError
from runner.core.objectives.chunked_cross_entropy import OutputLayer

INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)
KERNEL_SIZE = 5  # of the classifier's convolution, in tokens


class SelfAttention(nn.Module):
    """Multi-head self-attention through torch's fused kernels."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] -> the same; `mask` is true where a key may be attended to."""
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=1)  # each [batch, heads, sequence, width / heads]
        # No dropout: it rules out the CPU's fused kernel, and the step of a small encoder would
        # take a third longer.
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.projection(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def extend(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        """[batch, n, width] -> the same, for n tokens after those of the cache.

        It has keys and values, to which those of the n tokens are added; n is 1 unless it is empty.
        """
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, *new = qkv.chunk(3, dim=1)
        cache[:] = [torch.cat(pair, 2) for pair in zip(cache, new, strict=True)] if cache else new
        is_first = cache[0].shape[2] == x.shape[1]
        y = F.scaled_dot_product_attention(query, cache[0], cache[1], is_causal=is_first)
        return self.projection(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a perceptron, pre-normalised, residual; dropout on the residual branches."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.projection = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] -> same shape."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        hidden = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.projection(hidden))  # type: ignore[no-any-return]

    def extend(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        """Return `forward` in evaluation mode, for tokens after those in the `cache`."""
        x = x + self.attention.extend(self.norm1(x), cache)
        hidden = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.projection(hidden)  # type: ignore[no-any-return]


def initialise_weights(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Initialise as GPT-2: N(0, 0.02), and by 1/sqrt(2 * depth) smaller for residual branches.

    The variance of the residual stream then does not grow with the depth, and a fresh model's loss
    is about ln(vocab).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith("projection")
            std = INIT_STD / sqrt(2 * len(blocks)) if residual else INIT_STD
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def position_embeddings(positions: nn.Embedding, length: int) -> Tensor:
    """Return the embeddings of the first `length` positions; DataError if there are fewer."""
    if length > positions.num_embeddings:
        problem = f"a sequence of {length} tokens, and the model has {positions.num_embeddings}"
        raise DataError(f"{problem} positions: truncate it, or train with data.sequence={length}")
    return positions.weight[:length]  # a slice's backward is a copy, a lookup's a scatter


class GPT(nn.Module):
    """A decoder that predicts each next token (Radford et al. 2019, without biases).

    [batch, up to `sequence`] token ids below `vocab` -> logits [batch, sequence, vocab].
    """

    def __init__(
        self, *, vocab: int, sequence: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout, True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = OutputLayer()
        initialise_weights(self, self.blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of each next token."""
        x = self.tokens(input_ids) + position_embeddings(self.positions, input_ids.shape[1])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        # tied embedding: one parameter under one name, so that saving, averaging and decay
        # cannot process it twice
        return self.output(self.norm(x), self.tokens.weight)  # type: ignore[no-any-return]

    def extend(self, input_ids: Tensor, caches: list[list[Tensor]]) -> Tensor:
        """Return the logits [batch, n, vocab] of n tokens after those in the blocks' caches.

        In evaluation mode; the caches are empty before the first tokens, and grow by the n.
        """
        start = caches[0][0].shape[2] if caches else 0
        caches[:] = caches or [[] for _ in self.blocks]
        end = start + input_ids.shape[1]
        x = self.tokens(input_ids) + position_embeddings(self.positions, end)[start:]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.extend(x, cache)  # type: ignore[operator]
        return self.output(self.norm(x), self.tokens.weight)  # type: ignore[no-any-return]


class TextClassifier(nn.Module):
    """Bidirectional encoder; classifies the mean over the tokens.

    `input_ids` [batch, up to `sequence`] below `vocab` -> [batch, classes]. `attention_mask` of
    the same shape is true (or 1) at tokens and false (or 0) at padding, which has no effect.

    A convolution first mixes neighbouring tokens: single bytes carry little information, and
    attention alone is slow to learn which ones belong together.
    """

    def __init__(
        self,
        *,
        vocab: int,
        sequence: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(sequence, width)
        self.neighbours = nn.Conv1d(width, width, KERNEL_SIZE, padding=KERNEL_SIZE // 2)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout, False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise_weights(self, self.blocks)
        # not tied to an output, so they need not be small, and the convolution needs a signal
        nn.init.normal_(self.tokens.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits or regression values, [batch, classes]."""
        x = self.tokens(input_ids)
        token_mask = key_mask = None
        if attention_mask is not None:
            token_mask = attention_mask.bool().unsqueeze(-1)  # [batch, sequence, 1]
            x = x * token_mask  # padding is 0, as beyond the text
            # without any key softmax would give NaN: an empty text attends to its padding, which
            # the pooling below leaves out
            is_empty = ~token_mask.any(1, keepdim=True)
            key_mask = (token_mask | is_empty).mT.unsqueeze(1)  # [batch, head, query, key]
        mixed = self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        positions = position_embeddings(self.positions, input_ids.shape[1])
        x = self.dropout(x + F.gelu(mixed) + positions)
        for block in self.blocks:
            x = block(x, key_mask)
        x = self.norm(x)
        if token_mask is None:
            return self.head(x.mean(1))  # type: ignore[no-any-return]
        return self.head((x * token_mask).sum(1) / token_mask.sum(1).clamp(min=1))  # type: ignore[no-any-return]
