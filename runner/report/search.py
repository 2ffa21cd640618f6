"""A search of hyper-parameters as its folder records it, and its charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.overrides.groups import without_arguments
from runner.report import format
from runner.report.charts import Bar, draw_bars, draw_history
from runner.report.comparison import number, text
from runner.report.figures import Figure
from runner.report.read_run import read_json
from runner.report.svg import Series

FILE = "search.json"
RUNNING = "running"


def label(key: str) -> str:
    """A parameter's key for people."""
    return without_arguments(key).lstrip("+")


@dataclass(frozen=True)
class SearchTrial:
    """One trial, of whichever process."""

    number: int
    status: str  # done | pruned | failed | running
    value: float | None  # of the metric; of a pruned one, the last
    values: dict[str, str]  # by parameter
    reason: str = ""
    command: str = ""
    seconds: float | None = None

    @property
    def title(self) -> str:
        """Its values, as they are typed."""
        return " ".join(f"{label(key)}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class SearchParameter:
    """A key that was varied, over what, and its share of what the metric varied by."""

    key: str
    over: str
    importance: float | None


@dataclass(frozen=True)
class SearchRecord:
    """All trials of the study, those of other processes too."""

    metric: str
    direction: str  # maximize | minimize
    sampler: str
    pruner: str
    wanted: int
    storage: str
    parameters: list[SearchParameter]
    trials: list[SearchTrial]

    @property
    def best(self) -> SearchTrial | None:
        """The trial with the best value; of equal ones the first."""
        done = [t for t in self.trials if t.status == "done" and t.value is not None]
        sign = 1 if self.direction == "maximize" else -1
        return max(done, key=lambda t: sign * (t.value or 0.0), default=None)

    @property
    def best_so_far(self) -> list[tuple[float, float]]:
        """After each trial that is done, the best value until then."""
        choose = max if self.direction == "maximize" else min
        points: list[tuple[float, float]] = []
        for trial in self.trials:
            if trial.status == "done" and trial.value is not None:
                last = points[-1][1] if points else trial.value
                points.append((trial.number, choose(trial.value, last)))
        return points

    def count(self, status: str) -> int:
        """How many trials are of that status."""
        return sum(trial.status == status for trial in self.trials)

    @property
    def facts(self) -> str:
        """How many trials there are, by how they ended."""
        states = {status: self.count(status) for status in ("done", "pruned", "failed", RUNNING)}
        return ", ".join(f"{count} {status}" for status, count in states.items() if count)


def read_search(folder: Path) -> SearchRecord | None:
    """The record in a sweep's folder; None where there is none, or it is damaged."""
    path = folder / FILE
    record = read_json(path) if path.is_file() else None
    if not isinstance(record, dict):
        return None
    trials = [_trial(entry) for entry in _list(record, "trials")]
    parameters = [
        SearchParameter(text(x, "key"), text(x, "text"), number(x, "importance"))
        for x in _list(record, "parameters")
    ]
    return SearchRecord(
        text(record, "metric"),
        text(record, "direction"),
        text(record, "sampler"),
        text(record, "pruner"),
        int(number(record, "wanted") or 0),
        text(record, "storage"),
        parameters,
        trials,
    )


def _list(tree: Any, key: str) -> list[Any]:
    value = tree.get(key)
    return value if isinstance(value, list) else []


def _trial(entry: Any) -> SearchTrial:
    values = entry.get("values") if isinstance(entry, dict) else None
    return SearchTrial(
        int(number(entry, "number") or 0),
        text(entry, "status"),
        number(entry, "value"),
        {str(k): str(v) for k, v in values.items()} if isinstance(values, dict) else {},
        text(entry, "reason"),
        text(entry, "command"),
        number(entry, "seconds"),
    )


def search_figures(search: SearchRecord) -> Iterator[Figure]:
    """The history of the best value, and the importance of each parameter."""
    if len(search.best_so_far) > 1:
        about = f"The best {search.metric} after each trial, and the value of each trial."
        if search.count("pruned"):
            about += " A pruned trial shows its last value, as a triangle."
        yield Figure("History", about, [("", "", _history(search))])
    known = [p for p in search.parameters if p.importance is not None]
    if len(known) > 1:
        known.sort(key=lambda p: p.importance or 0.0, reverse=True)
        about = (
            "How much of the difference between good and other trials goes with each parameter "
            "(PED-ANOVA). It says where to look, not which value is right."
        )
        bars = [_importance_bar(p) for p in known]
        drawing = draw_bars(bars, 0.0, "importance of each parameter", unit=" %", one=False)
        yield Figure("What mattered", about, [("", "", drawing)])


def _history(search: SearchRecord) -> Any:
    line = Series("best so far", search.best_so_far, 0, format.metric(search.best_so_far[-1][1]))
    shown = [t for t in search.trials if t.value is not None]
    groups = [
        Series(name, [(t.number, t.value or 0.0) for t in shown if t.status == status], style)
        for style, (status, name) in enumerate({"done": "a trial", "pruned": "pruned"}.items(), 1)
    ]
    return draw_history(line, [x for x in groups if x.points], "trial", search.metric)


def _importance_bar(parameter: SearchParameter) -> Bar:
    share = parameter.importance or 0.0
    return Bar(
        label(parameter.key), 100 * share, None, f"{format.share(share)}, over {parameter.over}"
    )
