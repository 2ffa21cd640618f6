"""A captured step from end to end: made again, traced to its cause, and to techniques."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from runner.captures.manifest import captures
from runner.captures.reader import Capture
from runner.config import RunConfig
from runner.data.batch import Batch
from runner.errors import CheckpointError
from runner.masking import masked
from runner.replay.attempt import attempt_apart, is_same, is_spike
from runner.replay.attribution import COMPILING, TechniqueSearch
from runner.replay.compiled import trace_compiled
from runner.replay.findings import Attempt, Blame, Cause, Replay, StepPhase
from runner.replay.reopen import config_of, reopened
from runner.replay.spike import explain_spike
from runner.replay.statistics import largest_weight
from runner.replay.trace import bad_weights, trace_step
from runner.training.run import Run

log = logging.getLogger("runner")

REWRITING = ("chunked_loss", "recompute")  # they run modules in another way than these are written
BAD = 3  # exit code of a script whose step is bad; 1 is Python's for an exception
SCRIPT = '''"""Makes a captured step again: exits with {bad} if it is bad, with 0 if it is not.

Usage: python reproduce.py [folder of the capture]
"""

import sys
from pathlib import Path

sys.path += {paths!r}

from runner.captures.reader import open_capture
from runner.replay.attempt import make_attempt
from runner.replay.reopen import reopened

FINDING = {finding!r}
capture = open_capture(Path(sys.argv[1] if len(sys.argv) > 1 else {capture!r}))
with reopened(capture, trusted={trusted!r}, without={without!r}) as (run, batch):
    step = make_attempt(run, batch, capture)  # run.model and batch are as the step found them
print(f"loss {{step.loss}}, gradient norm {{step.grad_norm}}", step.error or step.failed)
print(f"bad: {{FINDING}}" if step.bad else "good")
sys.exit({bad} if step.bad else 0)
'''


@dataclass
class Investigation:
    """How far to go, and whose code to trust."""

    capture: Capture
    folder: Path  # for reproduce.py
    trusted: Sequence[str] = ()
    attribute: bool = True
    timeout_s: float = 300.0  # for each attempt
    techniques: list[str] = field(default_factory=list)  # of the run, by name
    origin: Path | None = None  # where the capture lies in its run, if this is a copy of it

    def investigate(self) -> Replay:
        """Reproduce the step, attribute it, trace it, and write the script."""
        capture, manifest = self.capture, self.capture.manifest
        log.info("replay: step %d of %s, as it was", manifest.step, manifest.name)
        as_it_was = self.attempt()
        self.techniques = as_it_was.techniques
        with self._reopened(self.techniques or self._enabled()) as (run, _):
            older = bad_weights(run.model)  # which makes looking further pointless
        blame = None
        if older is None and self.attribute and as_it_was.bad:
            blame = TechniqueSearch(as_it_was, self.attempt, seconds=6 * self.timeout_s).blame()
        replay = Replay(
            capture=str(self.origin or capture.path),
            run=manifest.name,
            step=manifest.step,
            kind=manifest.kind,
            message=manifest.message,
            loss=capture.loss,
            grad_norm=capture.grad_norm,
            attempt=as_it_was,
            reproduced=as_it_was.bad,
            same=is_same(as_it_was, capture),
            found=older or Cause(StepPhase.nowhere, ""),
            blame=blame,
        )
        without = self._trace(replay, older is not None)
        within = [i for i in replay.found.samples if i < len(capture.samples)]
        replay.samples = [int(capture.samples[i]) for i in within]
        replay.advice = advice(replay)
        # the trace of compiled code leaves the compilers out; the script needs what makes it bad
        needed = blame.needed if blame is not None else []
        self._write_script(replay, [name for name in without if name not in needed])
        return replay

    def attempt(
        self, without: Collection[str] = (), settings: Mapping[str, str] | None = None
    ) -> Attempt:
        """The step in a process of its own."""
        path = self.capture.path
        return attempt_apart(path, self.trusted, without, settings or {}, self.timeout_s)

    @contextmanager
    def _reopened(self, without: Collection[str]) -> Iterator[tuple[Run, Batch]]:
        """The run without these techniques, as far as its optimizer's state fits one without them.

        A technique of the user's own may decide which weights are trained, and then stays on.
        """
        own = {target.rpartition(".")[2] for target in self._config().optimization.extra}
        with ExitStack() as stack:
            try:
                opened = reopened(self.capture, trusted=self.trusted, without=without)
                pair = stack.enter_context(opened)
            except CheckpointError as error:
                if not own & set(without):
                    raise
                log.info("replay: with %s left on: %s", ", ".join(sorted(own)), error)
                rest = [name for name in without if name not in own]
                opened = reopened(self.capture, trusted=self.trusted, without=rest)
                pair = stack.enter_context(opened)
            yield pair

    def _config(self) -> RunConfig:
        return config_of(self.capture, self.trusted)

    def _enabled(self) -> list[str]:
        """Every technique that the config asks for."""
        techniques = self._config().optimization.techniques()
        return [name for name, technique in techniques if technique.enabled]

    def _trace(self, replay: Replay, known: bool) -> list[str]:
        """Trace the plainest run that is still bad; the techniques that were off in it."""
        plans = self._plans(replay.blame)
        for i, (without, compiled) in enumerate(plans):
            if known:
                return without
            with self._reopened(without) as (run, batch):
                replay.found = self._find(run, batch, compiled)
                applied = {name for name, _ in run.techniques}
                left = [name for name in self.techniques if name in applied]
                with_ = f"with {', '.join(left)}" if left else "without any technique"
                replay.seen = f"the step {with_}" + (", as the compiler traces it" * compiled)
                replay.found.grown = largest_weight(run.model)
            if replay.found.phase is not StepPhase.nowhere or i == len(plans) - 1:
                return without
        return []

    def _find(self, run: Run, batch: Batch, compiled: bool) -> Cause:
        log.info("replay: looking at every operation of the step")
        if is_spike(self.capture):
            return explain_spike(run, batch, self._healthy_batch(run))
        return trace_compiled(run, batch) if compiled else trace_step(run, batch)

    def _healthy_batch(self, run: Run) -> Batch | None:
        """The batch before, or the one after where there is none."""
        before = self.capture.step - 2  # the loader counts from 0
        try:
            return run.train.at(before if before >= 0 else self.capture.step)
        except Exception as error:  # the data may be gone by now
            log.info("replay: no other batch to hold it against: %s", error)
            return None
        finally:
            run.train.close()

    def _plans(self, blame: Blame | None) -> list[tuple[list[str], bool]]:
        """Techniques to switch off, and whether the model is to be traced as the compiler does."""
        names = self.techniques or self._enabled()
        compiling = [name for name in names if name in COMPILING]
        rewriting = [name for name in names if name in REWRITING]
        if blame is not None and blame.needed:
            without = [n for n in names if n not in blame.needed or n in COMPILING]
            return [(without, any(n in COMPILING for n in blame.needed))]
        if blame is not None and blame.trials and blame.trials[0].attempt.bad:
            return [(names, False)]
        plans = [([*compiling, *rewriting], False)]
        plans += [(compiling, False)] if rewriting else []
        plans += [([*compiling, *rewriting], True)] if compiling else []
        return plans

    def _write_script(self, replay: Replay, without: Sequence[str]) -> None:
        finding = "" if replay.found.phase is StepPhase.nowhere else masked(replay.found.cause)
        try:
            capture = Path(replay.capture)
            path = write_script(self.folder, capture, finding, self.trusted, without)
            replay.script = path.name
        except OSError as error:
            log.warning("replay: no reproduce.py: %s", error)


def write_script(
    folder: Path, capture: Path, finding: str, trusted: Sequence[str], without: Sequence[str]
) -> Path:
    """Write `reproduce.py`; all that comes from a capture stands in it as a quoted string."""
    own = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    paths = [os.path.abspath(p) for p in sys.path if not os.path.abspath(p).startswith(own)]
    path = folder / "reproduce.py"
    text = SCRIPT.format(
        bad=BAD,
        paths=paths,
        finding=finding,
        capture=str(capture.absolute()),
        trusted=list(trusted),
        without=sorted(without),
    )
    path.write_text(text, "utf-8")
    return path


# -- advice -----------------------------------------------------------------------------------

BY_PHASE = {
    StepPhase.input: "Look at these samples, and mend or drop them.",
    StepPhase.weights: (
        "The fault is in a step before this one: go back to a checkpoint whose weights are "
        "finite, with stability.guard=true."
    ),
    StepPhase.exception: (
        "Mend that line, or its input: the table has the numbers, reproduce.py makes the step"
        " again."
    ),
    StepPhase.forward: (
        "Keep that operation away from where it is not finite: clamp its input, or add a "
        "small number under a log, a root or a quotient."
    ),
    StepPhase.loss: (
        "Keep the loss away from where it is not finite: clamp its input, or add a small "
        "number under a log, a root or a quotient."
    ),
    StepPhase.backward: (
        "The value is finite and its slope is not: add a small number inside the root, the "
        "norm or the quotient, or use torch.where on the input, not on the result."
    ),
    StepPhase.norm: "Gradients above 2e+19 overflow when squared: lower the loss's scale.",
    StepPhase.spike: "Lower stability.clip_norm or optimizer.lr.",
}
GROWN = (
    "The weights have grown: {grown}. The step before this one was too long: lower optimizer.lr, "
    "and keep stability.clip_norm on."
)


def advice(replay: Replay) -> list[str]:
    """What to do next, in plain words."""
    found, blame, steps = replay.found, replay.blame, list[str]()
    if not replay.reproduced:
        reason = "The step came out good this time"
        if replay.attempt.failed:
            reason = f"The step could not be made again: {replay.attempt.failed}"
        return [f"{reason}. Machine, versions or random numbers differ."]
    earlier = earlier_capture(Path(replay.capture), replay.step)
    if found.phase is StepPhase.weights and earlier is not None:
        number = int(earlier.name.removeprefix("step_"))
        steps.append(f"Step {number} of this run was captured earlier: replay.path={earlier}")
    if blame is not None and blame.techniques:
        off = " ".join(f"optimization.{name}.enabled=false" for name in blame.techniques)
        steps.append(f"To go on at once: {off}")
    if replay.samples:
        rows = ", ".join(map(str, replay.samples[:10]))
        steps.append(f"Samples {rows} of the data set stand out.")
    if found.grown and found.phase not in (StepPhase.input, StepPhase.weights):
        return [*steps, GROWN.format(grown=found.grown)]
    return [*steps, BY_PHASE[found.phase]] if found.phase in BY_PHASE else steps


def earlier_capture(capture: Path, step: int) -> Path | None:
    """The first captured step of the same run, where that is before this one."""
    if capture.parent.name != "captures":
        return None
    first = next(iter(captures(capture.parents[2])), None)
    return first if first is not None and int(first.name.removeprefix("step_")) < step else None
