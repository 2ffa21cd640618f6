"""A bidirectional transformer encoder, for labelling text."""

from __future__ import annotations

from torch import Tensor, nn

from runner.models.transformer import Block, embed, initialise


class Classifier(nn.Module):
    """Reads the whole text at once, and labels the mean over its tokens.

    `input_ids` [batch, up to `sequence`] below `vocab` -> [batch, classes]. `attention_mask` of
    the same shape is true (or 1) at tokens and false (or 0) at padding, which changes nothing.
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
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, dropout, False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialise(self, self.blocks)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits, or regression targets."""
        x = self.dropout(embed(self.tokens, self.positions, input_ids))
        if attention_mask is None:
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]
        seen = attention_mask.bool()
        # an empty text would leave softmax nothing to choose from (NaN): it sees its padding,
        # and the pooling below leaves that out
        keys = (seen | ~seen.any(1, keepdim=True))[:, None, None, :]  # [batch, head, query, key]
        for block in self.blocks:
            x = block(x, keys)
        x = self.norm(x)
        kept = seen.unsqueeze(-1).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))  # type: ignore[no-any-return]
