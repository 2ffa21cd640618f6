"""A captured step from end to end: made again, looked into, and traced to techniques."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from runner.batch import Batch
from runner.captures.manifest import captures
from runner.captures.opening import Capture
from runner.config import RunConfig
from runner.errors import CheckpointError
from runner.masking import masked
from runner.replay.attempt import is_spike, same
from runner.replay.attribution import COMPILING, Search
from runner.replay.compiled import trace_compiled
from runner.replay.findings import Attempt, Blame, Found, Phase, Replay
from runner.replay.reopen import config_of, reopened
from runner.replay.script import write_script
from runner.replay.spike import spike
from runner.replay.statistics import grown
from runner.replay.trace import trace, weights
from runner.replay.trial import tried
from runner.run import Run

log = logging.getLogger("runner")

REWRITING = ("chunked_loss", "recompute")  # they run modules in another way than these are written


@dataclass
class Look:
    """How far to look, and on whose word."""

    capture: Capture
    folder: Path  # for what is written
    trusted: Sequence[str] = ()
    attribute: bool = True
    timeout_s: float = 300.0  # for each try
    techniques: list[str] = field(default_factory=list)  # of the run, by name
    origin: Path | None = None  # where the capture lies in its run, if this is a copy of it

    def all(self) -> Replay:
        """Everything: reproduced, traced, attributed, and as a script."""
        capture = self.capture
        manifest = capture.manifest
        log.info("replay: step %d of %s, as it was", manifest.step, manifest.name)
        as_it_was = self.attempt()
        self.techniques = as_it_was.techniques
        found = self._weights()
        blame = None
        if found is None and self.attribute and as_it_was.bad:
            blame = Search(as_it_was, self.attempt, seconds=6 * self.timeout_s).blame()
        replay = Replay(
            str(self.origin or capture.path), manifest.name, manifest.step, manifest.kind,
            manifest.message, capture.loss, capture.grad_norm, as_it_was, as_it_was.bad,
            same(as_it_was, capture), found or Found(Phase.nowhere, ""), blame=blame,
        )  # fmt: skip
        self._trace(replay, found is not None)
        within = [i for i in replay.found.samples if i < len(capture.samples)]
        replay.samples = [int(capture.samples[i]) for i in within]
        replay.advice = advice(replay)
        return replay

    def attempt(
        self, without: Collection[str] = (), settings: Mapping[str, str] | None = None
    ) -> Attempt:
        """The step in a process of its own."""
        return tried(self.capture.path, self.trusted, without, settings or {}, self.timeout_s)

    def _weights(self) -> Found | None:
        """What was bad before the step, which makes looking further pointless."""
        off = self._named() if not self.techniques else self.techniques
        with self._reopened(off) as (run, _):
            return weights(run.model)

    @contextmanager
    def _reopened(self, without: Collection[str]) -> Iterator[tuple[Run, Batch]]:
        """The run without these techniques, as far as its optimizer's state fits one without them.

        A technique of the user's own may decide which weights are trained, and then stays on.
        """
        own = {t.rpartition(".")[2] for t in self._config().optimization.extra}
        with ExitStack() as stack:
            try:
                yielded = stack.enter_context(
                    reopened(self.capture, trusted=self.trusted, without=without)
                )
            except CheckpointError as error:
                if not own & set(without):
                    raise
                log.info("replay: with %s left on: %s", ", ".join(sorted(own)), error)
                rest = [name for name in without if name not in own]
                yielded = stack.enter_context(
                    reopened(self.capture, trusted=self.trusted, without=rest)
                )
            yield yielded

    def _config(self) -> RunConfig:
        return config_of(self.capture, self.trusted)

    def _named(self) -> list[str]:
        """Every technique that the config asks for."""
        techniques = self._config().optimization.techniques()
        return [name for name, technique in techniques if technique.enabled]

    def _trace(self, replay: Replay, known: bool) -> None:
        """Look in the plainest run that is still bad, and write the script of that one."""
        plans = self._plans(replay.blame)
        for i, (without, compiled) in enumerate(plans):
            with self._reopened(without) as (run, batch):
                if not known:
                    replay.found = self._look(run, batch, compiled)
                    applied = {name for name, _ in run.techniques}
                    left = [name for name in self.techniques if name in applied]
                    replay.seen = "the step " + (
                        f"with {', '.join(left)}" if left else "without any technique"
                    )
                    replay.found.grown = grown(run.model)
                    if compiled:
                        replay.seen += ", as the compiler traces it"
                if replay.found.phase is not Phase.nowhere or i == len(plans) - 1:
                    self._write_script(replay, without)
                    return

    def _look(self, run: Run, batch: Batch, compiled: bool) -> Found:
        log.info("replay: looking at every operation of the step")
        if is_spike(self.capture):
            return spike(run, batch, self._healthy(run))
        return trace_compiled(run, batch) if compiled else trace(run, batch)

    def _healthy(self, run: Run) -> Batch | None:
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
        names = self.techniques or self._named()
        compiling = [name for name in names if name in COMPILING]
        rewriting = [name for name in names if name in REWRITING]
        if blame is not None and blame.needed:
            without = [n for n in names if n not in blame.needed or n in COMPILING]
            by_compiler = any(n in COMPILING for n in blame.needed)
            return [(without, by_compiler)]
        if blame is not None and blame.trials and blame.trials[0].attempt.bad:
            return [(names, False)]
        plans = [([*compiling, *rewriting], False)]
        if rewriting:
            plans.append((compiling, False))
        if compiling:
            plans.append(([*compiling, *rewriting], True))
        return plans

    def _write_script(self, replay: Replay, without: Sequence[str]) -> None:
        finding = "" if replay.found.phase is Phase.nowhere else replay.found.cause
        try:
            capture = self.origin or self.capture.path
            path = write_script(self.folder, capture, masked(finding), self.trusted, without)
            replay.script = path.name
        except OSError as error:
            log.warning("replay: no reproduce.py: %s", error)


def earlier(capture: Path, step: int) -> Path | None:
    """The first captured step of the same run, where that is before this one."""
    if capture.parent.name != "captures":
        return None
    first = next(iter(captures(capture.parents[2])), None)
    return first if first is not None and int(first.name.removeprefix("step_")) < step else None


def advice(replay: Replay) -> list[str]:
    """What to do next, in plain words."""
    found, blame = replay.found, replay.blame
    if not replay.reproduced:
        said = "The step came out good this time"
        if replay.attempt.failed:
            said = f"The step could not be made again: {replay.attempt.failed}"
        return [
            f"{said}. What differs is the machine, the versions, or something that draws random "
            "numbers of its own; device.deterministic=true narrows it down."
        ]
    steps = []
    if blame is not None and blame.techniques:
        off = " ".join(f"optimization.{name}.enabled=false" for name in blame.techniques)
        steps.append(f"To go on at once: {off}")
        if "amp" in blame.techniques:
            steps.append(
                "Or keep amp, and compute that line in float32: "
                "torch.autocast(x.device.type, enabled=False) around it, with x.float()."
            )
        if set(blame.techniques) & set(COMPILING):
            steps.append("Or keep that module out of the graph: @torch.compiler.disable on it.")
    steps += _by_phase(found, replay.samples)
    first = earlier(Path(replay.capture), replay.step) if found.phase is Phase.weights else None
    if first is not None:
        number = int(first.name.removeprefix("step_"))
        steps.insert(0, f"Step {number} of this run is captured too, and is earlier: "
                        f"replay.path={first}")  # fmt: skip
    return steps


def _which(samples: Sequence[int]) -> str:
    rows = ", ".join(map(str, samples[:10]))
    return f" Samples {rows} of the data set." if rows else ""


def _by_phase(found: Found, samples: Sequence[int]) -> list[str]:
    if found.phase is Phase.input:
        which = _which(samples)
        return [f"Look at these samples, and mend or drop them.{which}"]
    if found.phase is Phase.weights:
        return [
            "The fault is in a step before this one: go back to a checkpoint whose weights are "
            "finite, with stability.guard=true."
        ]
    if found.grown:
        return [
            f"The weights have grown: {found.grown}. The step before this one was too long: "
            "lower optimizer.lr, and keep stability.clip_norm on."
        ]
    if found.phase is Phase.exception:
        where = "that line" if found.line is not None else "that module"
        return [
            f"Mend {where}, or what it is given: the table says what went in. reproduce.py makes "
            "the step again, with the model and the batch at hand."
        ]
    if found.phase is Phase.forward or found.phase is Phase.loss:
        return [
            "Keep that operation away from where it is not finite: clamp its input, add a small "
            "number under a log, a root or a quotient."
        ]
    if found.phase is Phase.backward:
        return [
            "The value is finite and its slope is not. Where that line is a backward or a hook of "
            "your own, mend it; else add a small number inside the root, the norm or the quotient, "
            "or choose the safe input before it (torch.where on the input, not on the result)."
        ]
    if found.phase is Phase.spike:
        lower = "Lower stability.clip_norm or optimizer.lr"
        if not samples:
            return [f"{lower}."]
        return [
            f"Look at the samples that stand out, and mend or drop them.{_which(samples)}",
            f"{lower}, where they are as they should be.",
        ]
    if found.phase is Phase.norm:
        largest = math.sqrt(3.4e38)
        return [f"Gradients above {largest:.0e} overflow when squared; lower the loss's scale."]
    return []
