"""What the text models are made of: attention, the pre-norm block, and its initial weights."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import DataError

INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)


class Attention(nn.Module):
    """Multi-head self-attention through torch's fused kernels."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] -> the same; `mask` is true where a key may be seen."""
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=1)  # each [batch, heads, sequence, width / heads]
        # No dropout here: with it the fused kernel of the CPU stands back, and the whole step of a
        # small encoder takes a third longer.
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.projection(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input.

    Dropout is on what they add.
    """

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.projection = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, sequence, width] -> the same."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        hidden = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.projection(hidden))  # type: ignore[no-any-return]


def initialise(model: nn.Module, blocks: nn.ModuleList) -> None:
    """GPT-2's weights: N(0, 0.02); what adds to the residual stream smaller by 1/sqrt(2 * depth).

    With that the stream's variance does not grow with the depth, and a fresh model's loss is
    about ln(vocab).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith("projection")
            std = INIT_STD / sqrt(2 * len(blocks)) if residual else INIT_STD
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def first(positions: nn.Embedding, length: int) -> Tensor:
    """The embeddings of the first `length` positions; raises DataError when there are fewer."""
    if length > positions.num_embeddings:
        raise DataError(
            f"a sequence of {length} tokens, but the model has positions for "
            f"{positions.num_embeddings}: cut it, or train with data.sequence={length}"
        )
    return positions.weight[:length]  # a slice: its backward is a copy, a look-up's a scatter
