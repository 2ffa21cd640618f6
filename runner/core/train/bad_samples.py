"""Bad samples dropped from batches, counted over all processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from runner.core.data.loader import BatchLoader
from runner.core.data.usable import UsableFetch, check_bad_share, left_out
from runner.core.findings import Choice
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.record.storage import write_or_log
from runner.core.schemas.data import DataConfig

BAD_SAMPLES_FILE = "debug/bad_samples.json"


class BadSampleTracker:
    """Records bad samples; part of a run with `data.bad_samples=drop`."""

    def __init__(self, run: Run, config: DataConfig, trains: bool = True) -> None:
        self.run, self.config, self.trains = run, config, trains

    def record_batch(self, loader: BatchLoader) -> bool:
        """Record the bad samples of the last batch; True if no process has a usable one.

        Raises DataError, in all processes at the same step, if they exceed `data.most_bad`.
        """
        run, usable = self.run, loader.usable
        if usable is None:
            return False
        bad, empty = usable.last.bad, loader.empty
        if run.is_shared:
            gathered = run.gather((bad, len(usable.last.indices)))
            bad = {index: text for each, _ in gathered for index, text in each.items()}
            counts = [count for _, count in gathered]
            run.world.usable_samples, empty = counts, not any(counts)
        for problem in (new_problems := usable.add(bad)):
            run.history.add(
                "bad_samples", problem, step=run.progress.step, category="data",
                action="left out of its batch",
            )  # fmt: skip
        if new_problems:
            fetches = dict(self._usable_fetches())
            if usable not in fetches.values():  # data that a trained model is applied to
                fetches = {"": usable}
            problems = {(n, i): text for n, x in fetches.items() for i, text in x.bad.items()}
            total = sum(len(x.order.indices) for x in fetches.values())
            check_bad_share(problems, total, self.config)
        return empty

    def make_skipped_step(self) -> Step:
        """Return a skipped step, for a batch without a usable sample."""
        number = self.run.progress.step + 1
        self.run.stability.vetoed.append(number)
        self.run.stopwatch.split("forward")
        zero = torch.zeros((), dtype=torch.float32, device=self.run.device.torch)
        return Step(number, zero * float("nan"), zero, torch.ones_like(zero))

    def choices(self) -> list[Choice]:
        """Return the summary's choices on bad samples, by split; list all in BAD_SAMPLES_FILE."""
        fetches = {name: usable for name, usable in self._usable_fetches() if usable.bad}
        run, problems = self.run, {name: usable.bad for name, usable in fetches.items()}
        if fetches and run.writes and run.folder is not None:
            path = run.folder / BAD_SAMPLES_FILE
            write_or_log(path, json.dumps(problems, indent=1) + "\n", logging.DEBUG)
        choices = []
        for name, usable in fetches.items():
            choice = left_out(usable.bad, len(usable.order.indices))
            choices.append(Choice(choice.key, f"{choice.value} of {name}", choice.reason))
        return choices

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: dict(usable.bad) for name, usable in self._usable_fetches()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, unless an evaluation reads other data."""
        if not self.trains:
            return
        for name, usable in self._usable_fetches():
            usable.bad = dict(state.get(name, {}))

    def _usable_fetches(self) -> Iterator[tuple[str, UsableFetch]]:
        run = self.run
        loaders = {"training": run.train, "validation": run.validation, "test": run.test}
        for name, loader in loaders.items():
            if name != "validation" and not self.trains:
                continue  # all samples are in the validation set
            if loader is not None and loader.usable is not None:
                yield name, loader.usable
