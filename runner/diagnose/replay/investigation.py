"""Investigate a captured step: repeat it, trace its cause, and find the technique to blame."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.core.captures.manifest import list_captures
from runner.core.config.run_config import RunConfig
from runner.core.masking import mask_secrets
from runner.core.record.storage import replace_text
from runner.diagnose.replay.reopen import (
    Capture,
    config_of,
    has_same_numbers,
    is_spike,
    reopen_run,
)
from runner.diagnose.replay.results import (
    Attempt,
    Blame,
    Cause,
    Replay,
    ReplayAttempt,
    StepPhase,
    largest_weight,
)
from runner.diagnose.replay.trace import explain_spike, find_bad_weights, trace_compiled, trace_step

log = logging.getLogger("runner")

MakeAttempt = Callable[[Collection[str]], Attempt]
"""Makes the step without the named techniques."""

MAX_ATTEMPTS = 30  # attempts: all off, each alone, then one after another
SEARCH_ORDER = (
    "amp whole_step compile chunked_loss attention recompute fused_optimizer cuda_graphs tf32 "
    "channels_last accumulation system"
).split()
"""Order in which techniques are switched off, after user-defined ones."""
OUTSIDE_THE_STEP = ("pipeline", "quantization")
"""Techniques that are not part of a step: prefetching, and quantization after training."""
COMPILING_TECHNIQUES = ("whole_step", "compile", "cuda_graphs")
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
NO_TECHNIQUE = "the cause is in the model, the data or the weights"
REWRITING_TECHNIQUES = ("chunked_loss", "recompute")  # they run modules in another way than written
BAD_EXIT_CODE = 3  # exit code of the script if the step is bad; 1 is an uncaught exception
SCRIPT = '''"""Makes a captured step again: exits with {bad} if it is bad, with 0 if it is not.

Usage: python reproduce.py [folder of the capture]
"""

import os
import sys
from pathlib import Path

CAPTURE = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else Path({capture!r})
os.chdir({folder!r})  # where the run's command was typed: paths in its config are relative to it
sys.path += {paths!r}

from runner.diagnose.replay.reopen import make_attempt, open_capture, reopen_run

FINDING = {finding!r}
capture = open_capture(CAPTURE)
with reopen_run(capture, trusted={trusted!r}, without={without!r}) as (run, batch):
    step = make_attempt(run, batch, capture)  # run.model and batch are as the step found them
print(f"loss {{step.loss}}, gradient norm {{step.grad_norm}}", step.error or step.failed)
print(f"bad: {{FINDING}}" if step.bad else "good")
sys.exit({bad} if step.bad else 0)
'''


@dataclass
class Investigation:
    """The settings of an investigation."""

    capture: Capture
    folder: Path  # for reproduce.py
    make_attempt: MakeAttempt  # makes the step in its own process
    trusted: Sequence[str] = ()
    searches_techniques: bool = True
    budget_s: float = 1800.0  # budget for the technique search
    original_path: Path | None = None  # place of the capture in its run, if this is a copy
    techniques: list[str] = field(default_factory=list)  # of the run, by name

    def investigate(self) -> Replay:
        """Repeat the step, find the technique to blame, trace the step, and write the script."""
        capture, manifest = self.capture, self.capture.manifest
        log.info("replay: step %d of %s, unchanged", manifest.step, manifest.name)
        baseline = self.make_attempt(())
        enabled = (n for n, t in self._config().optimization.techniques() if t.enabled)
        self.techniques = baseline.techniques or [*enabled]
        blame = None
        if self.searches_techniques and baseline.bad and not self._has_bad_weights():
            blame = TechniqueSearch(baseline, self.make_attempt, seconds=self.budget_s).search()
        cause, label, without = self._trace(blame)
        known_samples = [i for i in cause.samples if i < len(capture.samples)]
        replay = Replay(
            capture=str((self.original_path or capture.path).absolute()),
            run=manifest.name,
            step=manifest.step,
            kind=manifest.kind,
            message=manifest.message,
            loss=capture.loss,
            grad_norm=capture.grad_norm,
            attempt=baseline,
            reproduced=baseline.bad,
            same=has_same_numbers(baseline, capture),
            found=cause,
            seen=label,
            blame=blame,
            samples=[int(capture.samples[i]) for i in known_samples],
        )
        replay.advice = advice(replay)
        finding = mask_secrets(cause.cause) if cause.phase is not StepPhase.nowhere else ""
        try:
            path = Path(replay.capture)
            script = write_script(self.folder, path, finding, self.trusted, without)
            replay.script = script.name
        except OSError as error:
            log.warning("replay: no reproduce.py: %s", error)
        return replay

    def _config(self) -> RunConfig:
        return config_of(self.capture, self.trusted)

    def _has_bad_weights(self) -> bool:
        """Whether weights were non-finite before the step, so that an earlier step is at fault."""
        off = COMPILING_TECHNIQUES
        with reopen_run(self.capture, trusted=self.trusted, without=off) as (run, _):
            return find_bad_weights(run.model) is not None

    def _trace(self, blame: Blame | None) -> tuple[Cause, str, list[str]]:
        """Trace the plainest run that is still bad; return cause, its techniques, those off."""
        cause, label, without = Cause(StepPhase.nowhere, ""), "", list[str]()
        capture = self.capture
        for without in self._sets_to_disable(blame):
            # uncompiled first, since operations in compiled code cannot be traced
            off = {*without, *(name for name in self.techniques if name in COMPILING_TECHNIQUES)}
            with reopen_run(capture, trusted=self.trusted, without=off) as (run, batch):
                log.info("replay: checking every operation of the step")
                if is_spike(capture):
                    cause = explain_spike(run, batch, capture)
                else:
                    cause = trace_step(run, batch)
                    if cause.phase is StepPhase.nowhere and off != set(without):
                        cause = trace_compiled(run, batch)
                cause.grown = largest_weight(run.model)
                names = ", ".join(name for name, _ in run.techniques if name in self.techniques)
            label = f"the step with {names}" if names else "the step without any technique"
            if cause.phase is not StepPhase.nowhere:
                break
        return cause, label, without

    def _sets_to_disable(self, blame: Blame | None) -> list[list[str]]:
        """Return sets of techniques to switch off, in order of preference.

        User-defined techniques stay on, since the optimizer's state may depend on them.
        """
        names = [name for name, _ in self._config().optimization.techniques()]
        names = [name for name in names if name in self.techniques]
        if blame is not None and blame.needed:
            return [[name for name in names if name not in blame.needed]]
        if blame is not None and blame.trials and blame.trials[0].attempt.bad:
            return [names]
        rewriting = [name for name in names if name in REWRITING_TECHNIQUES]
        return [rewriting, []] if rewriting else [[]]


def write_script(
    folder: Path, capture: Path, finding: str, trusted: Sequence[str], without: Sequence[str]
) -> Path:
    """Write `reproduce.py`; all values from the capture are quoted literals."""
    excluded = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    paths = [os.path.abspath(p) for p in sys.path if not os.path.abspath(p).startswith(excluded)]
    path = folder / "reproduce.py"
    text = SCRIPT.format(
        bad=BAD_EXIT_CODE,
        folder=os.getcwd(),
        paths=paths,
        finding=finding,
        capture=str(capture.absolute()),
        trusted=list(trusted),
        without=sorted(without),
    )
    replace_text(path, text)
    return path


def advice(replay: Replay) -> list[str]:
    """Suggest what to do next."""
    cause, blame, steps = replay.found, replay.blame, list[str]()
    if not replay.reproduced:
        failed = replay.attempt.failed
        reason = f"could not be repeated: {failed}" if failed else "was good this time"
        return [f"The step {reason}. Machine, versions or random numbers differ."]
    capture = Path(replay.capture)
    others = [p for p in list_captures(capture.parent.parent.parent) if p.parent == capture.parent]
    if cause.phase is StepPhase.weights and others and others[0].name < capture.name:
        number = int(others[0].name.removeprefix("step_"))
        steps.append(f"Step {number} of this run was captured earlier: replay.path={others[0]}")
    if blame is not None and blame.techniques:
        off = " ".join(f"optimization.{name}.enabled=false" for name in blame.techniques)
        steps.append(f"To continue now: {off}")
    if replay.samples:
        rows = ", ".join(map(str, replay.samples[:10]))
        steps.append(f"Samples {rows} of the data set stand out.")
    if cause.grown and cause.phase not in (StepPhase.input, StepPhase.weights):
        remedy = "lower optimizer.lr, and keep stability.clip_norm on"
        steps.append(f"The weights have grown: {cause.grown}. An update was too large: {remedy}.")
    elif cause.phase is StepPhase.spike:
        steps.append("Lower stability.clip_norm or optimizer.lr.")
    elif cause.phase is StepPhase.norm:
        steps.append("Gradients above 2e+19 overflow when squared: lower the loss's scale.")
    return steps


# -- the technique search ----------------------------------------------------------------------


class _LimitReached(Exception):
    """The limit of attempts or time is reached."""


class TechniqueSearch:
    """Tries sets of techniques, each at most once, and at most `max_attempts` in total."""

    def __init__(
        self,
        baseline: Attempt,
        make_attempt: MakeAttempt,
        max_attempts: int = MAX_ATTEMPTS,
        seconds: float = 1800.0,
    ):
        self.baseline, self.make_attempt, self.max_attempts = baseline, make_attempt, max_attempts
        self.deadline = time.monotonic() + seconds
        self.trials: list[ReplayAttempt] = []
        self.attempts: dict[frozenset[str], Attempt] = {}
        rank = {name: number for number, name in enumerate(SEARCH_ORDER)}
        candidates = [name for name in baseline.techniques if name not in OUTSIDE_THE_STEP]
        self.names = sorted(candidates, key=lambda name: (rank.get(name, -1), name))

    def search(self) -> Blame:
        """Search for the techniques to blame, and return the verdict."""
        if not self.names:
            return self._build_blame(f"no technique was active: {NO_TECHNIQUE}")
        all_off = self.try_without(self.names)
        if all_off.failed:
            return self._build_blame(f"not known: with all techniques off, {all_off.failed}")
        if all_off.bad:
            verdict = "no technique is the cause: with all of them off the step is bad, too"
            return self._build_blame(f"{verdict}; {NO_TECHNIQUE}")
        single_causes: list[str] = []
        culprits = self.names
        try:
            for name in self.names:
                single_causes += [name] if self._is_good([name]) else []
            if not single_causes:
                for name in reversed(self.names):
                    fewer = [other for other in culprits if other != name]
                    culprits = fewer if fewer and self._is_good(fewer) else culprits
        except _LimitReached:
            if not single_causes:
                verdict = f"one or more of {self._join_names(culprits)}: not narrowed down further"
                return self._build_blame(verdict, culprits)
        culprits = single_causes[:1] or culprits
        verdict = self._verdict_text(culprits, single_causes)
        return self._build_blame(verdict, culprits, single_causes)

    def try_without(self, off: Collection[str]) -> Attempt:
        """Make the step without these techniques; raises _LimitReached if the limit is reached."""
        key = frozenset(off)
        if key not in self.attempts:
            if len(self.trials) >= self.max_attempts or time.monotonic() > self.deadline:
                raise _LimitReached
            log.info("replay: the step without %s", " and ".join(sorted(off)))
            self.attempts[key] = self.make_attempt(sorted(off))
            self.trials.append(ReplayAttempt(sorted(off), self.attempts[key]))
        return self.attempts[key]

    def _is_good(self, off: Collection[str]) -> bool:
        attempt = self.try_without(off)
        return not attempt.bad and not attempt.failed

    def _verdict_text(self, culprits: list[str], single_causes: list[str]) -> str:
        names = self._join_names(single_causes if len(single_causes) > 1 else culprits)
        if len(single_causes) > 1:
            return f"{names} together: without either one the step is good"
        if len(culprits) == 1:
            return names
        if set(culprits) <= set(COMPILING_TECHNIQUES):
            return f"{names}: both compile the model, and the compiled step is bad"
        return f"{names}: the step is good only without all of them"

    def _join_names(self, names: list[str]) -> str:
        """Join technique names with their dtype or kernel."""

        def label(name: str) -> str:
            note = self.baseline.notes.get(name, "")
            dtype = "" if note in ("", "auto", "default") else f" ({DTYPE_NAMES.get(note, note)})"
            return f"{name}{dtype}"

        return " and ".join(map(label, names))

    def _build_blame(
        self, verdict: str, culprits: Collection[str] = (), single_causes: Collection[str] = ()
    ) -> Blame:
        return Blame(verdict, list(culprits), list(single_causes or culprits), self.trials)
