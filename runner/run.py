"""The vocabulary: what a run is made of, while it is built (`Draft`) and once it is (`Run`).

Nothing here imports torch, so that a config can be checked before torch is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from runner.checkpoint.checkpointer import Checkpointer
    from runner.data.config import DataConfig
    from runner.device.device import Device
    from runner.optim.update import Update
    from runner.optim.whole import WholeStep
    from runner.reader import Reader
    from runner.record.recorder import Recorder
    from runner.stopwatch import Stopwatch
    from runner.techniques.recompute import Recomputed

Inputs = Any
"""What a model is called with: a tensor, a tuple (positional) or a dict (by keyword)."""
Batch = tuple[Inputs, Any]
"""Inputs and target; the first dimension of every tensor in them is the sample."""


@dataclass(frozen=True)
class Sizes:
    """What the data states about itself; a model's constructor gets those that it names."""

    task: str  # classification | language_modelling | regression
    in_features: int | None = None  # values per sample, flattened
    in_channels: int | None = None  # images
    image_size: int | None = None  # images: height and width
    classes: int | None = None  # outputs: classes, or the number of regression targets
    vocab: int | None = None  # tokens: ids are below this
    sequence: int | None = None  # tokens per sample
    class_names: tuple[str, ...] = ()
    target_mean: float = 0.0  # regression: what the objective takes off the targets …
    target_deviation: float = 1.0  # … and divides them by, so that any unit can be learned

    CONSTRUCTOR: ClassVar[tuple[str, ...]] = (
        "in_features", "in_channels", "image_size", "classes", "vocab", "sequence",
    )  # fmt: skip

    def for_constructor(self) -> dict[str, int]:
        """The sizes that are known, by the names a constructor may ask for."""
        return {k: v for k in self.CONSTRUCTOR if (v := getattr(self, k)) is not None}


@dataclass(frozen=True)
class Choice:
    """Something decided automatically, and why."""

    key: str
    value: Any
    reason: str


class Verdict(IntEnum):
    """What a hook asks of the loop; the worst one wins."""

    KEEP = 0
    SKIP = 1  # this update is not made; only from on_gradients
    ROLLBACK = 2  # back to the last good checkpoint's weights, onwards with the next batch
    STOP = 3


@dataclass(slots=True)
class Step:
    """One step; its tensors are on the device, and reading one makes the host wait."""

    number: int  # 1 is the first
    loss: Tensor  # 0-d, mean over the batch
    grad_norm: Tensor  # 0-d, before clipping; NaN or Inf when the step was not finite
    skipped: Tensor  # 0-d, 1.0 when the update was not made, else 0.0


@dataclass(slots=True)
class Report:
    """What the host knows of a stretch of steps, read from the device in one go."""

    first: int  # number of the first step in it
    loss: list[float]
    grad_norm: list[float]
    skipped: list[bool]
    lr: float  # at the last step
    seconds: float  # wall time of the stretch
    samples: int

    @property
    def last(self) -> int:
        """Number of the last step in it."""
        return self.first + len(self.loss) - 1


@dataclass(frozen=True)
class Evaluation:
    """What one pass over the validation set says."""

    step: int  # of training, at which it was made
    metrics: dict[str, float]  # keys like `val/accuracy`
    confusion: Tensor | None  # counts [true class, predicted class], on the host
    improved: bool = False  # the monitored metric is the best so far


@dataclass(frozen=True)
class Quantized:
    """The int8 copy of a trained model, and what the validation set says of it."""

    model: nn.Module
    evaluation: Evaluation


class Hook:
    """Something that watches a run. A subclass overrides the events it needs, and no others.

    Events may return a `Verdict`; only the loop acts on it. `every` thins out `on_gradients`
    and `on_step` to each n-th step. Hooks enter in order and leave in reverse, on Ctrl-C too.
    """

    every: int = 1
    EVENTS: ClassVar[tuple[str, ...]] = ("on_gradients", "on_step", "on_report", "on_validation")

    def __init_subclass__(cls) -> None:
        unknown = [n for n in vars(cls) if n.startswith("on_") and n not in Hook.EVENTS]
        if unknown:
            raise TypeError(f"{cls.__name__}: no event {unknown[0]!r}; there are {Hook.EVENTS}")

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Set up before the first step and tear down after the last."""
        yield

    def on_gradients(self, run: Run, step: Step) -> Verdict | None:
        """After backward, before the update; gradients are in `.grad`."""

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """After the update."""

    def on_report(self, run: Run, report: Report) -> Verdict | None:
        """When the numbers of some steps have reached the host."""

    def on_validation(self, run: Run, evaluation: Evaluation) -> Verdict | None:
        """After each pass over the validation set."""


class Objective(ABC):
    """What is minimised, and the metrics that say how well it went.

    `tally` returns sums that add up over batches, on the device; `metrics` turns the grand
    totals into numbers, once.
    """

    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    higher_is_better: bool = False
    FALLING: ClassVar = (
        "loss",
        "mse",
        "mae",
        "rmse",
        "perplexity",
        "bits_per_byte",
        "bits_per_token",
    )
    unit: str = "samples"  # what `weight` counts: samples | tokens
    takes_deferred: bool = False  # logits that an output layer put off (`runner.deferred`)
    indices: int | None = None  # targets are indices below this; 0: no indices; None: not known
    ignored: int | None = None  # a class index that stands for no target

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """The mean loss over `weight(target)` items, 0-d."""

    @abstractmethod
    def weight(self, target: Any) -> Tensor | int:
        """How many items the mean is over; a tensor where counting needs the device."""

    @abstractmethod
    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums over this batch from which `metrics` is computed."""

    @abstractmethod
    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of everything tallied, by bare names (`loss`, `accuracy`)."""

    def rises(self, metric: str) -> bool:
        """Whether more of `metric` (`val/…`) is better."""
        if metric == self.monitor:
            return self.higher_is_better
        return metric.rpartition("/")[2] not in self.FALLING

    def confusion(self, totals: dict[str, Tensor]) -> Tensor | None:
        """Counts [true class, predicted class], where that makes sense."""
        return None


class Loader(Protocol):
    """Batches as a pure function of the step, so resuming anywhere costs nothing."""

    steps_per_epoch: int
    choices: list[Choice]

    def batches(self, start: int) -> Iterator[Batch]:
        """Batches from step `start` (0 is the first) on, epoch after epoch, on the device."""

    def peek(self) -> Batch:
        """The first batch, fetched here, so that workers go on with what they are at."""

    def samples(self, step: int) -> int:
        """How many samples the batch of that step holds."""

    def close(self) -> None:
        """End every worker, at once."""


@dataclass(frozen=True)
class Evidence:
    """Proof, after some steps, that a technique took hold, or the reason why it did not."""

    engaged: bool
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Technique(ABC):
    """One optimisation; its fields are its knobs."""

    enabled: bool = False

    def unavailable(self, device: Device) -> str | None:
        """Why it cannot run on this device, or None."""
        return None

    @abstractmethod
    def apply(self, draft: Draft) -> str | None:
        """Change the draft, or say why nothing in it can take the technique.

        Global switches are flipped through `draft.scope`, which undoes them.
        """

    @abstractmethod
    def engaged(self, run: Run) -> Evidence:
        """What shows, after a few steps, that it took hold."""


@dataclass
class Engagement:
    """One technique's row in the summary: asked for, taken hold or not, and why."""

    name: str
    requested: bool
    engaged: bool
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class Draft:
    """A run being built: everything a technique may see or change."""

    device: Device
    sizes: Sizes
    model: nn.Module  # on the device
    optimizer_class: type[torch.optim.Optimizer]
    objective: Objective
    batch_size: int
    micro_batch: int  # samples per backward
    micro_batch_asked: int | None  # what training.micro_batch names
    tf32_asked: bool | None  # what device.tf32 says
    threads_asked: int | None  # what device.threads says
    sample: Callable[[int], Batch]  # so many training samples, not augmented, on the device
    data: DataConfig  # how batches are fetched; what is None there is decided by the loader
    in_memory: bool  # a fetch is a copy and nothing more
    loader: Callable[[DataConfig], Loader]  # of the training set, fetched that way
    total_steps: int
    scope: ExitStack  # undoes every global switch when the run closes
    forward: Callable[..., Any]  # what is called in place of the model
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]  # to see what state it keeps
    ema: bool = False  # a running average of the weights is kept
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    placements: list[Callable[[Batch], Batch]] = field(default_factory=list)  # batch, on the device
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None  # first value of a dynamic loss scale
    whole_step: dict[str, Any] | None = None  # torch.compile's options, to make steps in one graph
    index_limit: int | None = None  # what targets must be below, as far as a look could tell
    compilation: Compilation | None = None
    cuda_graphs: bool = False
    recompute: Recomputed | None = None  # what is computed again in the backward
    predicted_bytes: int | None = None  # peak of process or device, where one was predicted
    recoveries: list[Recovery] = field(default_factory=list)
    sample_mflop: tuple[float, int] | None = None  # of a sample's forward, and in how many products
    remarks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by technique, for evidence
    choices: list[Choice] = field(default_factory=list)
    recorded: Mapping[str, Any] = field(default_factory=dict)  # choices of the run continued here

    def choose(self, key: str, decide: Callable[[], tuple[Any, str]]) -> Any:
        """What the run that this one continues had chosen, else what `decide` says, and why."""
        for choice in self.choices:
            if choice.key == key:  # decided already, by another technique
                return choice.value
        if key in self.recorded:
            value, reason = self.recorded[key], "as before the run was resumed"
        else:
            value, reason = decide()
        self.choices.append(Choice(key, value, reason))
        return value


@dataclass
class Progress:
    """How far a run has come; saved in every checkpoint."""

    step: int = 0  # batches tried
    skipped: int = 0
    consecutive_skips: int = 0
    rollbacks: int = 0
    best: float | None = None  # of the monitored metric
    best_step: int = 0
    stale_validations: int = 0  # in a row, without improvement
    validated_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # latest, `val/…`
    faults: dict[str, int] = field(default_factory=dict)  # counts by kind


@dataclass
class Run:
    """A finished run: what a job drives and a hook may read."""

    name: str
    seed: int
    config_hash: str
    settings: Mapping[str, Any]  # the config by dotted keys, as it is typed
    folder: Path | None  # None: nothing is written
    device: Device
    sizes: Sizes
    model: nn.Module  # what is saved; never wrapped, so its keys never change
    forward: Callable[..., Any]  # what is called
    contexts: list[Callable[[], AbstractContextManager[Any]]]  # around forward and loss
    objective: Objective
    update: Update
    train: Loader
    validation: Loader
    micro_batch: int
    total_steps: int
    validate_every: int
    checkpoint_every: int
    patience: int | None
    monitor: str
    higher_is_better: bool
    recorder: Recorder
    checkpointer: Checkpointer
    hooks: list[Hook]
    techniques: list[tuple[str, Technique]]  # those applied, in order
    engagements: list[Engagement]  # those that could not be, with the reason
    choices: list[Choice]
    scope: ExitStack
    started: float  # time.monotonic() when the build began
    watch: Stopwatch
    reader: Reader
    whole: WholeStep | None = None  # makes steps in one graph
    compilation: Compilation | None = None
    recompute: Recomputed | None = None  # as in the draft
    predicted_bytes: int | None = None  # as in the draft
    remarks: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in the draft
    evaluation_batch: int | None = None  # samples per forward, once a whole batch did not fit
    fallen: dict[str, str] = field(default_factory=dict)  # techniques given up on the way, and why
    placements: list[Callable[[Batch], Batch]] = field(default_factory=list)  # as in the draft
    recoveries: list[Recovery] = field(default_factory=list)  # tried in order when a step fails
    report_every: int = 10
    max_consecutive_skips: int = 10
    max_rollbacks: int = 2
    backoff: float = 0.5  # of the learning rate, at a roll-back
    strict: bool = False  # a technique that does not take hold is an error
    progress: Progress = field(default_factory=Progress)
    evidence: dict[str, Evidence] = field(default_factory=dict)  # of techniques, by name
    operators: Mapping[str, int] | None = None  # of one step, by name, once they were looked at
    quantized: Quantized | None = None  # once there is one that is worth it
    saved_step: int = -1  # of the newest checkpoint
    record_offset: int | None = None  # length of metrics.jsonl at the checkpoint that it is from
    stop_reason: str = ""  # why training ends before its last step

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.progress.step / self.train.steps_per_epoch

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.scope.close()


class Compilation(Protocol):
    """The model compiled in place, now or once it is wanted."""

    mode: str  # of torch.compile; empty while it is eager

    def start(self) -> None:
        """Compile from the next call on."""


Recovery = Callable[[Run, Exception], bool]
"""Makes a step that raised possible: True when the same step is worth another try."""


def call(forward: Callable[..., Any], inputs: Inputs) -> Any:
    """The model's output: inputs go in as one tensor, by position (tuple) or by name (dict)."""
    if isinstance(inputs, dict):
        output = forward(**inputs)
    elif isinstance(inputs, tuple | list):
        output = forward(*inputs)
    else:
        output = forward(inputs)
    return output


def count(target: Any) -> int:
    """Samples in a batch, from its target."""
    while isinstance(target, dict | tuple | list):
        target = next(iter(target.values() if isinstance(target, dict) else target))
    return int(target.shape[0])


def rows(value: Any, which: slice) -> Any:
    """The same rows of every tensor in a nest of tuples, lists and dicts; views, not copies."""
    if isinstance(value, dict):
        return {key: rows(item, which) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(rows(item, which) for item in value)
    return value[which]
