"""Techniques that are wrong, one way each: parity has to tell every one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from runner.core.interfaces.batch import batch_size_of
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.core.optim.optimizer_step import OptimizerStep
from runner.scale.distributed import world
from runner.scale.distributed.world import World


@dataclass
class Mutant(Technique):
    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


def mutant(plant: Callable[[RunBuilder], None], name: str = "") -> type[Mutant]:
    """The technique that does what the function does, by its name."""
    members = {"apply": lambda self, builder: plant(builder), "__module__": plant.__module__}
    return dataclass(type(name or plant.__name__, (Mutant,), members))


@mutant
def Harmless(builder: RunBuilder) -> None:
    for parameter in builder.model.parameters():
        parameter.register_hook(torch.clone)


@mutant
def OtherNumbers(builder: RunBuilder) -> None:
    """No fault: each forward draws one random number more, so all dropout is another draw."""
    builder.model.register_forward_pre_hook(lambda module, inputs: torch.rand(1) and None)


@mutant
def NotCausal(builder: RunBuilder) -> None:
    """Every token sees those after it."""
    for module in builder.model.modules():
        if getattr(module, "causal", False):
            module.causal = False  # type: ignore[assignment]


@mutant
def BlindToPadding(builder: RunBuilder) -> None:
    """Padding counts as text."""
    forward = builder.forward

    def ignorant(input_ids: Any, attention_mask: Any) -> Any:
        return forward(input_ids)

    builder.forward = ignorant


@mutant
def DroppedGradient(builder: RunBuilder) -> None:
    """The last parameter, a bias in most models, gets none."""
    *_, last = builder.model.parameters()
    last.register_hook(torch.zeros_like)


@mutant
def StaleBuffer(builder: RunBuilder) -> None:
    """BatchNorm goes by this batch, and forgets it."""
    for module in builder.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0


@mutant
def SumOfParts(builder: RunBuilder) -> None:
    """Each micro-batch counts as if it were the whole batch."""
    builder.objective.weight = lambda target: 1.0  # type: ignore[method-assign]


@mutant
def MeanOfMeans(builder: RunBuilder) -> None:
    """The smaller last micro-batch counts as much as the others."""
    size = builder.micro_batch
    builder.objective.weight = (  # type: ignore[method-assign]
        lambda target: float(-(-batch_size_of(target) // size))
    )


def changed_dropout(name: str, kind: type[nn.Module], attribute: str, value: float) -> type[Mutant]:
    """A mutant whose modules of one class drop another share than was asked for."""

    def plant(builder: RunBuilder) -> None:
        for module in builder.model.modules():
            if isinstance(module, kind):
                setattr(module, attribute, value)

    return mutant(plant, name)


NoDropout = changed_dropout("NoDropout", nn.Dropout, "p", 0.0)
MoreDropout = changed_dropout("MoreDropout", nn.Dropout, "p", 0.8)
NoDropoutInLSTM = changed_dropout("NoDropoutInLSTM", nn.LSTM, "dropout", 0.0)
NoDropoutInAttention = changed_dropout(
    "NoDropoutInAttention", nn.MultiheadAttention, "dropout", 0.0
)


def changed_options(name: str, **options: Any) -> type[Mutant]:
    """A mutant whose optimizer gets other options than were asked for, in each of its groups."""

    def plant(builder: RunBuilder) -> None:
        original = builder.optimizer_class

        class Changed(original):  # type: ignore[misc, valid-type]
            def __init__(self, groups: Any, **asked: Any) -> None:
                super().__init__(groups, **asked)
                for group in self.param_groups:
                    group.update(options)

        Changed.__init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        builder.optimizer_class = Changed

    return mutant(plant, name)


NoDecay = changed_options("NoDecay", weight_decay=0.0)
DecayOnBiases = changed_options("DecayOnBiases", weight_decay=0.01)
# decay as a term of the gradient, which Adam then divides by its size
CoupledDecay = changed_options("CoupledDecay", decoupled_weight_decay=False)
ShortSecondMoment = changed_options("ShortSecondMoment", betas=(0.9, 0.99))
ShortFirstMoment = changed_options("ShortFirstMoment", betas=(0.89, 0.999))
LargeEps = changed_options("LargeEps", eps=1e-3)
# SGD whose momentum takes in half of each gradient
Dampened = changed_options("Dampened", dampening=0.5)


@mutant
def Frozen(builder: RunBuilder) -> None:
    """One layer gets its gradient, and no update."""
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


def patched(builder: RunBuilder, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Another function there, as long as the run is open."""
    builder.scope.enter_context(mock.patch.object(owner, name, method))


@mutant
def LateSchedule(builder: RunBuilder) -> None:
    """Each update has the learning rate of the one after it."""
    right = OptimizerStep.lr_at
    patched(builder, OptimizerStep, "lr_at", lambda self, updates: right(self, updates + 1))


@mutant
def NoClip(builder: RunBuilder) -> None:
    patched(builder, OptimizerStep, "divisor", lambda self, norm: None)


@mutant
def StaleAverage(builder: RunBuilder) -> None:
    """The average of the weights stays where it began."""
    patched(builder, OptimizerStep, "_update_average", lambda self, weight: None)


def changed_outputs(builder: RunBuilder, factor: Callable[[], float]) -> None:
    """All outputs times a factor, which is asked for at each forward."""
    forward = builder.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        scale = factor()
        return tree_map(lambda t: t * scale, forward(*args, **kwargs))

    builder.forward = changed


@mutant
def TripledEvaluation(builder: RunBuilder) -> None:
    """Logits are three times as large in evaluation mode."""
    model = builder.model
    changed_outputs(builder, lambda: 1.0 if model.training else 3.0)


@mutant
def DropoutInEvaluation(builder: RunBuilder) -> None:
    for module in builder.model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x, m=module: nn.functional.dropout(x, m.p)  # type: ignore[method-assign]


@mutant
def UnscaledDropoutInAttention(builder: RunBuilder) -> None:
    """What attention keeps is not divided by the share that it keeps."""
    right = nn.functional.scaled_dot_product_attention

    def unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool) -> Tensor:
        return right(q, k, v, mask, p, causal) * (1 - p)

    patched(builder, nn.functional, "scaled_dot_product_attention", unscaled)


@mutant
def PeeksOneAhead(builder: RunBuilder) -> None:
    """The causal mask is off by one: each token sees the next one."""
    right = nn.functional.scaled_dot_product_attention

    def peeking(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.pop("is_causal", False):
            length = query.shape[-2]
            kwargs["attn_mask"] = torch.ones(length, length, dtype=torch.bool).tril(1)
        return right(query, key, value, **kwargs)

    patched(builder, nn.functional, "scaled_dot_product_attention", peeking)


@mutant
def TiredAfterThirty(builder: RunBuilder) -> None:
    """From the 31st forward on the outputs are 1 % too small."""
    model, made = builder.model, [0]

    def factor() -> float:
        made[0] += model.training
        return 1.0 if made[0] <= 30 else 0.99

    changed_outputs(builder, factor)


@mutant
def SumOnTheLast(builder: RunBuilder) -> None:
    """The smaller last batch of an epoch counts as if it were a full one."""
    right, size = type(builder.objective).__call__, builder.batch_size

    def loss(self: Any, output: Any, target: Any) -> Tensor:
        return right(self, output, target) * (batch_size_of(target) / size)  # type: ignore[no-any-return]

    patched(builder, type(builder.objective), "__call__", loss)


@mutant
def OneInAThousand(builder: RunBuilder) -> None:
    """A loss that is off by a thousandth: less than bf16 rounds."""
    for parameter in builder.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.001)


@mutant
def Forgetful(builder: RunBuilder) -> None:
    """Halves every sixth gradient that this process computes: a counter that is not saved."""
    seen = [0]

    def fade(gradient: Any) -> Any:
        seen[0] += 1
        return gradient if seen[0] % 6 else gradient / 2

    next(builder.model.parameters()).register_hook(fade)


@mutant
def FasterTeacher(builder: RunBuilder) -> None:
    """Moves a teacher's weights twice as far in each forward."""
    builder.model.rate *= 2


# -- faults of training by several processes; a run of one process has none of them ----------------


@mutant
def AveragedGradients(builder: RunBuilder) -> None:
    """Each process's mean counts the same, however many samples it is of; the loss is right."""
    right, factor = World.total_weight, [1.0]

    def total_weight(world: World, weight: Any, own: int, samples: int) -> Any:
        factor[0] = samples / own / world.size
        return right(world, weight, own, samples)

    if builder.world.is_shared:
        World.total_weight = total_weight
        for parameter in builder.model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor[0])


@mutant
def ClippedByShard(builder: RunBuilder) -> None:
    """Each process clips by the norm of what it has."""
    right = OptimizerStep.apply

    def apply(update: OptimizerStep, norm: Any, skipped: Any) -> Any:
        return right(update, norm * 0.5**0.5, skipped)

    if builder.world.is_shared:
        OptimizerStep.apply = apply


@mutant
def WrongPart(builder: RunBuilder) -> None:
    """Each process takes the first samples of a batch."""

    def local_slice(self: World, samples: int) -> slice:
        mine = right_slice(self, samples)  # noqa: F821
        return slice(0, mine.stop - mine.start)

    if builder.world.is_shared:
        # the sampler has bound the method before a technique is applied: its code is replaced
        right = World.local_slice
        world.right_slice = FunctionType(right.__code__, right.__globals__)
        right.__code__ = local_slice.__code__


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
