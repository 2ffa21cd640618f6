"""Techniques that are wrong, one way each: parity has to tell every one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from runner.core.interfaces.batch import batch_size_of
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.core.optim.optimizer_step import OptimizerStep


@dataclass
class Mutant(Technique):
    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


class Harmless(Mutant):
    def apply(self, builder: RunBuilder) -> None:
        for parameter in builder.model.parameters():
            parameter.register_hook(torch.clone)


class OtherNumbers(Mutant):
    """No fault: each forward draws one random number more, so all dropout is another draw."""

    def apply(self, builder: RunBuilder) -> None:
        builder.model.register_forward_pre_hook(lambda module, inputs: torch.rand(1) and None)


class NotCausal(Mutant):
    """Every token sees those after it."""

    def apply(self, builder: RunBuilder) -> None:
        for module in builder.model.modules():
            if getattr(module, "causal", False):
                module.causal = False  # type: ignore[assignment]


class BlindToPadding(Mutant):
    """Padding counts as text."""

    def apply(self, builder: RunBuilder) -> None:
        forward = builder.forward

        def ignorant(input_ids: Any, attention_mask: Any) -> Any:
            return forward(input_ids)

        builder.forward = ignorant


class DroppedGradient(Mutant):
    """The last parameter, a bias in most models, gets none."""

    def apply(self, builder: RunBuilder) -> None:
        *_, last = builder.model.parameters()
        last.register_hook(torch.zeros_like)


class StaleBuffer(Mutant):
    """BatchNorm goes by this batch, and forgets it."""

    def apply(self, builder: RunBuilder) -> None:
        for module in builder.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 0.0


class SumOfParts(Mutant):
    """Each micro-batch counts as if it were the whole batch."""

    def apply(self, builder: RunBuilder) -> None:
        builder.objective.weight = lambda target: 1.0  # type: ignore[method-assign]


class MeanOfMeans(Mutant):
    """The smaller last micro-batch counts as much as the others."""

    def apply(self, builder: RunBuilder) -> None:
        size = builder.micro_batch
        builder.objective.weight = (  # type: ignore[method-assign]
            lambda target: float(-(-batch_size_of(target) // size))
        )


def changed_dropout(name: str, kind: type[nn.Module], attribute: str, value: float) -> type[Mutant]:
    """A mutant whose modules of one class drop another share than was asked for."""

    def apply(self: Mutant, builder: RunBuilder) -> None:
        for module in builder.model.modules():
            if isinstance(module, kind):
                setattr(module, attribute, value)

    return dataclass(type(name, (Mutant,), {"apply": apply, "__module__": __name__}))


NoDropout = changed_dropout("NoDropout", nn.Dropout, "p", 0.0)
MoreDropout = changed_dropout("MoreDropout", nn.Dropout, "p", 0.8)
NoDropoutInLSTM = changed_dropout("NoDropoutInLSTM", nn.LSTM, "dropout", 0.0)
NoDropoutInAttention = changed_dropout(
    "NoDropoutInAttention", nn.MultiheadAttention, "dropout", 0.0
)


def changed_options(name: str, **options: Any) -> type[Mutant]:
    """A mutant whose optimizer gets other options than were asked for, in each of its groups."""

    def apply(self: Mutant, builder: RunBuilder) -> None:
        original = builder.optimizer_class

        class Changed(original):  # type: ignore[misc, valid-type]
            def __init__(self, groups: Any, **asked: Any) -> None:
                super().__init__(groups, **asked)
                for group in self.param_groups:
                    group.update(options)

        Changed.__init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        builder.optimizer_class = Changed

    return dataclass(type(name, (Mutant,), {"apply": apply, "__module__": __name__}))


NoDecay = changed_options("NoDecay", weight_decay=0.0)
DecayOnBiases = changed_options("DecayOnBiases", weight_decay=0.01)
# decay as a term of the gradient, which Adam then divides by its size
CoupledDecay = changed_options("CoupledDecay", decoupled_weight_decay=False)
ShortSecondMoment = changed_options("ShortSecondMoment", betas=(0.9, 0.99))
ShortFirstMoment = changed_options("ShortFirstMoment", betas=(0.89, 0.999))
LargeEps = changed_options("LargeEps", eps=1e-3)
# SGD whose momentum takes in half of each gradient
Dampened = changed_options("Dampened", dampening=0.5)


class Frozen(Mutant):
    """One layer gets its gradient, and no update."""

    def apply(self, builder: RunBuilder) -> None:
        original = builder.optimizer_class

        class Changed(original):  # type: ignore[misc, valid-type]
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                first = self.param_groups[0]["params"][0]
                before = first.clone()
                super().step()
                first.copy_(before)

        Changed.__init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        builder.optimizer_class = Changed


def patched(builder: RunBuilder, name: str, method: Callable[..., Any]) -> None:
    """Another method for `OptimizerStep`, as long as the run is open."""
    builder.scope.enter_context(mock.patch.object(OptimizerStep, name, method))


class LateSchedule(Mutant):
    """Each update has the learning rate of the one after it."""

    def apply(self, builder: RunBuilder) -> None:
        right = OptimizerStep.lr_at
        patched(builder, "lr_at", lambda self, updates: right(self, updates + 1))


class NoClip(Mutant):
    def apply(self, builder: RunBuilder) -> None:
        patched(builder, "divisor", lambda self, norm: None)


class StaleAverage(Mutant):
    """The average of the weights stays where it began."""

    def apply(self, builder: RunBuilder) -> None:
        patched(builder, "_update_average", lambda self, weight: None)


def changed_outputs(builder: RunBuilder, factor: Callable[[], float]) -> None:
    """All outputs times a factor, which is asked for at each forward."""
    forward = builder.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        scale = factor()
        return tree_map(lambda t: t * scale, forward(*args, **kwargs))

    builder.forward = changed


class TripledEvaluation(Mutant):
    """Logits are three times as large in evaluation mode."""

    def apply(self, builder: RunBuilder) -> None:
        model = builder.model
        changed_outputs(builder, lambda: 1.0 if model.training else 3.0)


class DropoutInEvaluation(Mutant):
    def apply(self, builder: RunBuilder) -> None:
        for module in builder.model.modules():
            if isinstance(module, nn.Dropout):
                module.forward = lambda x, m=module: nn.functional.dropout(x, m.p)  # type: ignore[method-assign]


class UnscaledDropoutInAttention(Mutant):
    """What attention keeps is not divided by the share that it keeps."""

    def apply(self, builder: RunBuilder) -> None:
        right = nn.functional.scaled_dot_product_attention

        def unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool) -> Tensor:
            return right(q, k, v, mask, p, causal) * (1 - p)

        patch = mock.patch.object(nn.functional, "scaled_dot_product_attention", unscaled)
        builder.scope.enter_context(patch)


class PeeksOneAhead(Mutant):
    """The causal mask is off by one: each token sees the next one."""

    def apply(self, builder: RunBuilder) -> None:
        right = nn.functional.scaled_dot_product_attention

        def peeking(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
            if kwargs.pop("is_causal", False):
                length = query.shape[-2]
                kwargs["attn_mask"] = torch.ones(length, length, dtype=torch.bool).tril(1)
            return right(query, key, value, **kwargs)

        patch = mock.patch.object(nn.functional, "scaled_dot_product_attention", peeking)
        builder.scope.enter_context(patch)


class TiredAfterThirty(Mutant):
    """From the 31st forward on the outputs are 1 % too small."""

    def apply(self, builder: RunBuilder) -> None:
        model, made = builder.model, [0]

        def factor() -> float:
            made[0] += model.training
            return 1.0 if made[0] <= 30 else 0.99

        changed_outputs(builder, factor)


class SumOnTheLast(Mutant):
    """The smaller last batch of an epoch counts as if it were a full one."""

    def apply(self, builder: RunBuilder) -> None:
        right, size = type(builder.objective).__call__, builder.batch_size

        def loss(self: Any, output: Any, target: Any) -> Tensor:
            return right(self, output, target) * (batch_size_of(target) / size)  # type: ignore[no-any-return]

        patch = mock.patch.object(type(builder.objective), "__call__", loss)
        builder.scope.enter_context(patch)


class OneInAThousand(Mutant):
    """A loss that is off by a thousandth: less than bf16 rounds."""

    def apply(self, builder: RunBuilder) -> None:
        for parameter in builder.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.001)


class Forgetful(Mutant):
    """Halves every sixth gradient that this process computes: a counter that is not saved."""

    def apply(self, builder: RunBuilder) -> None:
        seen = [0]

        def fade(gradient: Any) -> Any:
            seen[0] += 1
            return gradient if seen[0] % 6 else gradient / 2

        next(builder.model.parameters()).register_hook(fade)


class FasterTeacher(Mutant):
    """Moves a teacher's weights twice as far in each forward."""

    def apply(self, builder: RunBuilder) -> None:
        builder.model.rate *= 2


class WrittenInFp32(nn.Module):
    """No mutant but a model: it computes in fp32, whatever its weights are."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).float() @ self.layer.weight.t()


class Recurrent(nn.Module):
    """A language model with dropout inside its LSTM, and around it."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(24, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.output(self.dropout(self.lstm(self.embedding(input_ids))[0]))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """A language model with dropout inside torch's own attention, and after it."""

    def __init__(self, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 32)
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(32)
        self.output = nn.Linear(32, vocab)
        mask = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        length = x.shape[1]
        mask = self.mask[:length, :length]
        y = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.output(self.norm(x + self.dropout(y)))  # type: ignore[no-any-return]
