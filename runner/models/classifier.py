"""A bidirectional transformer encoder, for labelling text."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from runner.models.transformer import Block, first, initialise

NEIGHBOURHOOD = 5  # tokens that the convolution sees at once


class Classifier(nn.Module):
    """Reads the whole text at once, and labels the mean over its tokens.

    `input_ids` [batch, up to `sequence`] below `vocab` -> [batch, classes]. `attention_mask` of
    the same shape is true (or 1) at tokens and false (or 0) at padding, which changes nothing.

    A convolution tells each token its neighbours first: single bytes say little, and attention
    alone takes long to find out which ones stand together.
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
        self.neighbours = nn.Conv1d(width, width, NEIGHBOURHOOD, padding=NEIGHBOURHOOD // 2)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout, False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise(self, self.blocks)
        # not tied to an output, so nothing asks for small ones, and the convolution needs a signal
        nn.init.normal_(self.tokens.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits, or regression targets."""
        x = self.tokens(input_ids)
        seen = keys = None
        if attention_mask is not None:
            seen = attention_mask.bool().unsqueeze(-1)  # [batch, sequence, 1]
            x = x * seen  # padding looks to the convolution like what lies beyond the text
            # an empty text would leave softmax nothing to choose from (NaN): it sees its padding,
            # and the pooling below leaves that out
            keys = (seen | ~seen.any(1, keepdim=True)).mT.unsqueeze(1)  # [batch, head, query, key]
        near = self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        x = self.dropout(x + F.gelu(near) + first(self.positions, input_ids.shape[1]))
        for block in self.blocks:
            x = block(x, keys)
        x = self.norm(x)
        if seen is None:
            return self.head(x.mean(1))  # type: ignore[no-any-return]
        return self.head((x * seen).sum(1) / seen.sum(1).clamp(min=1))  # type: ignore[no-any-return]
