"""`Run`, which jobs drive and hooks read. No torch at import: configs are checked without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from runner.core.errors import UsageError
from runner.core.interfaces.processes import OneProcess
from runner.core.interfaces.technique import GAIN_TESTS, RunParts

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from torch import Tensor, nn

    from runner.core.captures.run_captures import CaptureRecorder
    from runner.core.checkpoint.checkpointer import Checkpointer
    from runner.core.checks.batch_validator import BatchValidator
    from runner.core.data.loader import BatchLoader
    from runner.core.device.leaks import LeakDetector
    from runner.core.interfaces.batch import ColumnUse
    from runner.core.interfaces.hook import Evaluation, Hook, Verdict
    from runner.core.interfaces.shards import ShardsProtocol
    from runner.core.interfaces.technique import Evidence, Technique, TechniqueStatus
    from runner.core.optim.optimizer_step import OptimizerStep
    from runner.core.optim.whole_step import StepGraph
    from runner.core.preserved_state import RandomGenerators
    from runner.core.record.history import History
    from runner.core.record.recorder import Recorder
    from runner.core.stability.controller import StabilityController
    from runner.core.train.bad_samples import BadSampleTracker
    from runner.core.train.gain_tests import GainTests
    from runner.core.train.metrics import StepMetricsReader
    from runner.core.train.timing import Stopwatch

T = TypeVar("T")
FINISHED_ENDS = ("done", "patience", "pruned", "hook")
"""Values of `ended_by` of a run that `checkpoint.resume=auto` and a repeated sweep leave alone."""


@dataclass(frozen=True)
class Quantized:
    """The int8 copy of a trained model, and its evaluation."""

    model: nn.Module
    evaluation: Evaluation


@dataclass(frozen=True)
class BestCriterion:
    """By what the best checkpoint is chosen; values of different ones are not compared."""

    metric: str
    mode: str  # min | max
    validation: str  # sha256 of the validation indices and the data's digest

    @classmethod
    def of_state(cls, state: Mapping[str, Any], now: BestCriterion, default: str) -> BestCriterion:
        """Return that of a checkpoint; older ones have a metric in their settings, or `default`."""
        if "criterion" in state:
            return cls(**state["criterion"])
        metric = state["settings"].get("training.monitor", "None")
        return cls(default if metric == "None" else metric, now.mode, now.validation)


@dataclass
class Progress:
    """The progress of a run, saved in every checkpoint."""

    step: int = 0  # batches tried
    skipped: int = 0
    consecutive_skips: int = 0
    rollbacks: int = 0
    best: float | None = None  # of the monitored metric
    best_loss: float | None = None  # of the best step; None: not known
    best_step: int = 0
    stale_validations: int = 0  # consecutive ones without improvement
    validated_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # latest, `val/…`
    # as `runner.core.data.order.Segment`, once the batch size has changed: where each one begins
    segments: list[list[float]] = field(default_factory=list)


@dataclass(kw_only=True)
class Run(RunParts):
    """A built run: jobs drive it and hooks read it."""

    name: str
    seed: int
    config_hash: str
    settings: Mapping[str, Any]  # the config by dotted keys, as it is typed
    folder: Path | None  # None: nothing is written
    started: float  # time.monotonic() when the build began

    update: OptimizerStep
    train: BatchLoader
    validation: BatchLoader
    test: BatchLoader | None = None  # evaluated once, after training
    validate_every: int
    checkpoint_every: int
    grace_s: float  # seconds for a step to end after a signal
    patience: int | None
    epochs: float | None  # from which `total_steps` follows; None: it is set
    make_lr_factors: Callable[[int], list[float]]  # of the schedule over so many steps
    sanity: bool = True  # a batch is validated before step 1
    monitor: str
    higher_is_better: bool | None  # of the monitored metric; None: nothing declares it
    criterion: BestCriterion  # by which the best checkpoint is chosen
    # training indices of a run with those settings, on the same data; None: unknown
    trained_indices: Callable[[Mapping[str, str]], np.ndarray | None]
    report_every: int = 10
    strict: bool = False  # True: a technique that does not engage is an error
    uninspected: bool = True  # no training batch has shown how model and loss fit together

    recorder: Recorder
    history: History
    checkpointer: Checkpointer
    hooks: list[Hook]
    techniques: list[tuple[str, Technique]]  # those applied, in order
    unapplied_techniques: list[TechniqueStatus]  # those not applied, with the reason
    stopwatch: Stopwatch
    reader: StepMetricsReader
    stability: StabilityController
    step_graph: StepGraph | None = None  # makes steps in one graph
    gain_tests: GainTests | None = None  # of techniques whose gain is measured
    batch_validator: BatchValidator | None = None  # checks each batch before its step
    captures: CaptureRecorder | None = None  # writes bad steps for job=replay
    bad_samples: BadSampleTracker | None = None  # counts those that data.bad_samples=drop omits

    progress: Progress = field(default_factory=Progress)
    evidence: dict[str, Evidence] = field(default_factory=dict)  # of techniques, by name
    evaluation_batch: int | None = None  # samples per forward, once a whole batch did not fit
    operators: Mapping[str, int] | None = None  # calls of each operator in one step, once profiled
    quantized: Quantized | None = None  # set by quantization if it is smaller and accurate
    saved_step: int = -1  # of the newest checkpoint
    resumed_step: int = 0  # steps that were done before this process began
    parent_best: Path | None = None  # of a fork: the best checkpoint of its parent, to be copied
    record_offset: int | None = None  # length of metrics.jsonl at the checkpoint resumed from
    event_position: Any = None  # file and length of TensorBoard's events at that checkpoint
    changed_keys: list[str] = field(default_factory=list)  # since the checkpoint resumed from
    leaks: dict[str, LeakDetector] = field(default_factory=dict)  # by what grows
    baseline: dict[str, float] = field(default_factory=dict)  # metrics of constant predictions
    test_metrics: dict[str, float] = field(default_factory=dict)  # `test/…`
    tested: dict[str, int] = field(default_factory=dict)  # step of the weights, samples
    model_check: dict[str, Any] = field(default_factory=dict)  # summary of the model check
    columns: list[ColumnUse] = field(default_factory=list)  # how a table's columns were interpreted
    distributed: dict[str, Any] = field(default_factory=dict)  # processes, for the summary
    small_files: dict[str, bytes] = field(default_factory=dict)  # of the folder, by path in it
    loss: str = ""  # what is missing since the run's folder was removed while it trained
    stop_reason: str = ""  # why training ends before its last step
    stopped_by: str = ""  # what set it, as in `Summary.ended_by`; "": a hook
    random: RandomGenerators | None = None  # the run's own; None: they are in use
    closed: bool = False  # its `with` block has ended

    @property
    def rank(self) -> int:
        """The number of this process among those that train it."""
        return self.world.rank

    @property
    def epoch(self) -> float:
        """The passes over the training set so far."""
        return self.train.epochs_before(self.progress.step)

    @property
    def shards(self) -> ShardsProtocol | None:
        """This process's shards of the weights; None unless they are sharded."""
        return self.world.shards

    @property
    def writes(self) -> bool:
        """Whether this process writes the record: the only one, or the first of several."""
        return self.folder is not None and self.rank == 0

    def alone(self) -> Run:
        """Return the run as if it had one process; both share model and progress."""
        return replace(self, world=OneProcess(), forward=self.model) if self.is_shared else self

    def count_faults(self) -> dict[str, int]:
        """Return how often each kind of fault occurred, of all parts."""
        faults = Counter(self.history.counts)
        for part in (self.recorder, self.checkpointer, self.world):
            faults.update(part.faults)
        return dict(faults)

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Record own numbers: a row of split `user`, `user/<name>` in TensorBoard and sinks.

        0-d tensors are copied, and read with the next report, without a host wait. `step` is the
        one being made, else the last one. Of several processes the first one writes. Raises
        UsageError for another value, a name of the run's own record, and after the training.
        """
        self.reader.user_values().log(self, values, step)

    def is_rejected(self, name: str) -> bool:
        """Whether a technique's gain was measured in the run, and it is not used."""
        return self.gain_tests is not None and self.gain_tests.is_rejected(name)

    def measured_evidence(self, name: str) -> Evidence | None:
        """Return a technique's evidence so far, with its gain if that was measured."""
        evidence = self.evidence.get(name)
        return evidence if self.gain_tests is None else self.gain_tests.evidence(name, evidence)

    def switch_techniques(self, step: int) -> None:
        """Switch techniques whose gain is measured on or off, as planned for `step`."""
        if self.gain_tests is not None:
            self.gain_tests.enter(self, step)

    def measured_choices(self) -> dict[str, Any]:
        """Return the state of all measurements of gains, for a checkpoint or a capture."""
        return {} if self.gain_tests is None else {GAIN_TESTS: self.gain_tests.history()}

    def request_stop(self, ended_by: str, reason: str) -> None:
        """End training after this step; of several causes one that finishes the run counts."""
        if not self.stop_reason or (self.stopped_by or "hook") not in FINISHED_ENDS:
            self.stop_reason, self.stopped_by = reason, ended_by

    def largest_local_batch(self, samples: int) -> int:
        """Return the largest number of samples of a batch that one process has."""
        return self.world.max_local_samples(samples)

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all processes."""
        return self.world.all_reduce_max(*numbers)

    def worst_verdict(self, verdict: Verdict) -> Verdict:
        """Return the worst verdict of all processes."""
        return type(verdict)(self.all_reduce_max(verdict)[0])

    def holds_for_any(self, condition: bool) -> bool:
        """Whether the condition holds in any process."""
        return bool(self.all_reduce_max(int(condition))[0])

    def gather(self, value: T) -> list[T]:
        """Return the value of each process, by rank."""
        return self.world.all_gather(value)

    def wait_for_others(self) -> None:
        """Wait until all processes have come as far."""
        self.world.barrier()

    def leave_others(self, error: BaseException) -> None:
        """Tell the other processes that this one ends by the error."""
        self.world.leave(error)

    @contextmanager
    def own_random_state(self) -> Iterator[None]:
        """Use the run's random state while entered; then the caller's is as before."""
        if self.random is None:
            yield
            return
        from runner.core.preserved_state import RandomGenerators  # imports torch

        caller, own = RandomGenerators(), self.random
        self.random = None
        own.restore()
        try:
            yield
        finally:
            self.random = RandomGenerators()
            caller.restore()

    def _repr_html_(self) -> str | None:
        """Return the curves so far, as a notebook shows them; None if there are none."""
        from runner import rooms

        html: str | None = rooms.find("notebook", "run")(self)
        return html

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed = True
        try:
            self.scope.__exit__(kind, error, trace)
        except Exception:  # such as a full disk; the error that ended the run says more
            if kind is None:
                raise


def check_run(caller: str, run: object) -> None:
    """Raise UsageError if `run` is not a Run, for example a RunConfig."""
    if not isinstance(run, Run):
        use = f"with build(config) as run: {caller}(run)"
        raise UsageError(f"{caller}: takes a run, not a {type(run).__name__}: {use}")


Recovery = Callable[[Run, Exception], bool]
"""Called with the error of a step; True if the same step is to be repeated."""
