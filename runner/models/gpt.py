"""A decoder-only transformer, for language modelling."""

from __future__ import annotations

from torch import Tensor, nn

from runner.models.transformer import Block, first, initialise
from runner.objectives.deferred_logits import OutputLayer


class GPT(nn.Module):
    """Predicts each next token from those before it (Radford et al. 2019, without biases).

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
        initialise(self, self.blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the token after each one."""
        x = self.tokens(input_ids) + first(self.positions, input_ids.shape[1])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        # the embedding itself is the output layer: one parameter under one name, so that saving,
        # averaging and decay cannot come upon it twice
        return self.output(self.norm(x), self.tokens.weight)  # type: ignore[no-any-return]
