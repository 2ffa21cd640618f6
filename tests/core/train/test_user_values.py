"""`Run.log`: numbers of user code become rows of split `user`, once each, also after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from runner import Hook, Stability, optimize_training_loop, train
from runner.core.build.setup import Components
from runner.core.errors import ConfigError, UsageError
from runner.core.interfaces.hook import Evaluation, Step
from runner.core.interfaces.run import Run
from runner.core.objectives.classification import ClassificationObjective
from runner.core.record.summary import Summary
from runner.core.train.user_values import UserValues
from tests.runs import AtSteps, Killed, command, config, hook, kill, opened, rows, scalars, trained

SHORT = (*("data=cancer", "model=mlp", "model.width=4"), "training.steps=20")
EVERY = (*SHORT, "training.validate_every=5", "monitoring.every=10")
MONITORED = ("training.monitor=user/score", "training.monitor_mode=max")


def logs(values: Callable[[int], dict[str, Any]]) -> Hook:
    """A hook that logs what `values` returns for a step, after its update."""
    return hook(on_step=lambda run, step: run.log(values(step.number)))


def logged(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    values = rows(folder, "user")
    return [(row.pop("step"), {k: v for k, v in row.items() if k != "split"}) for row in values]


def test_a_hooks_numbers_are_rows_of_split_user_and_tags_of_tensorboard(tmp_path: Path) -> None:
    counter, sink = torch.zeros(()), list[Any]()

    def values(step: int) -> dict[str, Any]:
        counter.add_(1)  # a tensor is copied: later changes must not show
        return {"half": step / 2, "net/count": counter, "odd": math.nan if step % 2 else 1.0}

    with opened(*SHORT, folder=tmp_path) as run:
        writer: Any = SimpleNamespace(add=lambda *row: sink.append(row), close=lambda: None)
        run.recorder.sink_writers.append(writer)
        run.hooks.append(logs(values))
        train(run)
    counts = [(row["net/count"], row["odd"]) for _, row in logged(tmp_path)]
    assert counts == [(n, None if n % 2 else 1.0) for n in range(1, 21)]
    halves = [(n, n / 2) for n in range(1, 21)]
    assert [(n, row["half"]) for n, row in logged(tmp_path)] == halves
    assert scalars(tmp_path, "user/half") == halves
    assert [(step, row["half"]) for step, split, row in sink if split == "user"] == halves


def test_each_event_logs_its_own_step_and_a_typed_one_stays(tmp_path: Path) -> None:
    def log_twice(run: Run, step: Step) -> None:
        run.log({"update": step.number})
        run.log({"typed": step.number}, step=1000 + step.number)

    everywhere = hook(
        on_gradients=lambda run, step: run.log({"gradients": step.number}),
        on_step=log_twice,
        on_validation=lambda run, evaluation: run.log({"validation": evaluation.step}),
    )
    overrides = (*EVERY, "checkpoint.every=5", "checkpoint.resume=auto")
    for steps in (10, 20):  # the second one continues
        trained(*overrides, f"training.steps={steps}", folder=tmp_path, hooks=[everywhere])
    values = logged(tmp_path)
    assert {step - (1000 if "typed" in row else 0) for step, row in values} == set(range(1, 21))
    for step, row in values:
        assert list(row.values()) == [step - (1000 if "typed" in row else 0)]
    assert [step for step, row in values if "validation" in row] == [5, 10, 15, 20]
    assert [step for step, row in values if "gradients" in row] == list(range(1, 21))


@pytest.mark.parametrize("ends", [(7,), (3, 8, 14), (20,)])
def test_a_resumed_run_has_each_row_once_and_the_same_best(
    ends: tuple[int, ...], tmp_path: Path
) -> None:
    def score(step: int) -> dict[str, Any]:
        return {"score": float(1 + step * 7 % 5)} if step % 4 else {}

    overrides = (*EVERY, *MONITORED, "checkpoint.every=6", "checkpoint.resume=auto")
    for name, steps in (("straight", [0]), ("resumed", [*ends, 0])):
        for step in steps:
            with suppress(Killed):
                hooks = [logs(score), AtSteps(step, kill)]
                trained(*overrides, folder=tmp_path / name, hooks=hooks)
    assert rows(tmp_path / "straight") == rows(tmp_path / "resumed")
    assert len(logged(tmp_path / "resumed")) == 15
    one, other = (Summary.read(tmp_path / name) for name in ("straight", "resumed"))
    assert (one.best, one.best_step) == (other.best, other.best_step)


class FailsOnce(ClassificationObjective):
    """Logs in each training step; the eighth call raises."""

    calls = 0

    def __call__(self, output: Any, target: Any) -> Tensor:
        self.calls += 1
        self.log({"call": 1.0})
        if self.calls == 8:
            raise ValueError("of the objective")
        return super().__call__(output, target)


def test_a_step_that_raised_and_is_made_again_has_one_row(tmp_path: Path) -> None:
    overrides = (*EVERY, "checkpoint.resume=auto")
    with opened(*overrides, folder=tmp_path) as run:
        run.objective.__class__ = FailsOnce
        with pytest.raises(ValueError, match="of the objective"):
            train(run)
    assert [step for step, _ in logged(tmp_path)] == list(range(1, 9))  # also of the failed one
    with opened(*overrides, folder=tmp_path) as run:
        assert run.progress.step == 7
        run.objective.__class__ = FailsOnce
        run.objective.calls = 8  # type: ignore[attr-defined]
        train(run)
    assert [step for step, _ in logged(tmp_path)] == list(range(1, 21))


def test_an_attempt_that_ran_out_of_memory_leaves_no_rows(tmp_path: Path) -> None:
    class Large(ClassificationObjective):
        def __call__(self, output: Any, target: Any) -> Tensor:
            self.log({"samples": len(target)})
            if len(target) > 16:
                raise torch.OutOfMemoryError("out of memory")
            return super().__call__(output, target)

    with opened(*EVERY, "training.batch_size=32", "training.steps=10", folder=tmp_path) as run:
        run.objective.__class__ = Large
        train(run)
        assert run.micro_batch == 16
    assert logged(tmp_path) == [(n, {"samples": 16.0}) for n in range(1, 11) for _ in range(2)]


def test_a_name_stays_allowed_when_the_objective_has_a_metric_of_that_name(tmp_path: Path) -> None:
    class Named(ClassificationObjective):
        def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
            return super().metrics(totals) | {"mine": 1.0}

    hooks, given = [logs(lambda step: {"mine": step})], Components(objective=Named(2))
    assert trained(*EVERY, folder=tmp_path, given=given, hooks=hooks).metrics["val/mine"] == 1.0
    assert logged(tmp_path) == [(n, {"mine": float(n)}) for n in range(1, 21)]


@pytest.mark.parametrize(
    "state",
    [
        {"rows": [(1, {"a": torch.zeros(2)})]},
        {"rows": [(1, {"a": "high"})]},
        {"rows": [(1.5, {"a": 1.0})]},
        {"rows": [(True, {"a": 1.0})]},
        {"rows": [(-1, {"a": 1.0})]},
        {"rows": [(1, {3: 1.0})]},
        {"rows": [(1, {"a": 1})]},
        {"last": {"a": "high"}},
        {"last": {3: 1.0}},
        {"names": [3]},
    ],
)
def test_the_state_of_a_checkpoint_is_checked_when_it_is_loaded(state: dict[str, Any]) -> None:
    good = {"rows": [(1, {"a": 1.0})], "last": {"a": 1.0}, "names": ["a"]}
    UserValues().load(good)
    with pytest.raises(TypeError, match="^user: "):
        UserValues().load({**good, **state})


def test_the_monitor_takes_the_last_value_since_the_validation_before(tmp_path: Path) -> None:
    scores = {3: 9.0, 5: 1.0, 9: 4.0, 16: 2.0}  # none between the validations of 10 and 15
    log = logs(lambda step: {"score": scores[step]} if step in scores else {})
    summary = trained(*EVERY, *MONITORED, folder=tmp_path, hooks=[log])
    assert (summary.best, summary.best_step) == (4.0, 10)
    assert summary.metrics["user/score"] == 2.0
    assert [row["user/score"] for row in rows(tmp_path, "val")] == [1.0, 4.0, None, 2.0]


def test_the_objective_logs_in_a_validation_what_is_monitored_and_nothing_before_step_1(
    tmp_path: Path,
) -> None:
    class Logging(ClassificationObjective):
        """Logs the number of its validations, which falls."""

        left = 4

        def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
            self.left -= 1
            self.log({"score": self.left})
            return super().metrics(totals)

    given = Components(objective=Logging(2))
    summary = trained(*EVERY, *MONITORED, folder=tmp_path, given=given)
    assert (summary.best, summary.best_step) == (3.0, 5)
    assert logged(tmp_path) == [(5 * n, {"score": 4.0 - n}) for n in range(1, 5)]


BRIEF = (*SHORT, *MONITORED, "training.steps=8", "training.validate_every=2")


def test_a_value_logged_in_on_validation_is_of_that_validation(tmp_path: Path) -> None:
    scores, told = {2: 1.0, 4: 9.0, 8: 3.0}, list[tuple[int, float | None]]()  # none at 6

    def log(run: Run, evaluation: Evaluation) -> None:
        if evaluation.step in scores:
            run.log({"score": scores[evaluation.step]})
        told.append((evaluation.step, run.progress.validated_step))

    hooks = [hook(on_validation=log)]
    summary = trained(*BRIEF, "training.patience=2", folder=tmp_path, hooks=hooks)
    assert (summary.best, summary.best_step, summary.ended_by) == (9.0, 4, "patience")
    assert summary.checkpoint.best is not None and "00000004" in str(summary.checkpoint.best)
    assert [row["user/score"] for row in rows(tmp_path, "val")] == [1.0, 9.0, None, 3.0]
    assert told == [(2, 2), (4, 4), (6, 6), (8, 8)]


def test_of_values_in_steps_and_on_validation_the_later_one_is_monitored(tmp_path: Path) -> None:
    steps = logs(lambda step: {"score": {2: 1.0, 4: 50.0, 6: 3.0}.get(step, 0.0)})
    of_4 = hook(on_validation=lambda run, e: run.log({"score": 2.0}) if e.step == 4 else None)
    summary = trained(*BRIEF, folder=tmp_path, hooks=[of_4, steps])
    assert (summary.best, summary.best_step) == (3.0, 6)
    assert [row["user/score"] for row in rows(tmp_path, "val")] == [1.0, 2.0, 3.0, 0.0]


def test_a_monitored_name_that_is_never_logged_ends_the_run_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training\.monitor: nothing has logged user/score"):
        trained(*EVERY, *MONITORED, folder=tmp_path)


def test_a_monitored_name_needs_the_direction() -> None:
    with pytest.raises(ConfigError, match=r"^training\.monitor_mode: must be set for user/score"):
        config(*SHORT, MONITORED[0])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": 1.0}, "'loss' is a name of the run's own record"),
        ({"accuracy": 1.0}, "'accuracy' is a name"),
        ({"step": 1}, "'step' is a name"),
        ({"split": 1}, "'split' is a name"),
        ({"grad_norm": 1}, "'grad_norm' is a name"),
        ({"process_gib": 1}, "'process_gib' is a name"),
        ({"val/mine": 1}, "'val/mine' is a name"),
        ({"user/mine": 1}, "user/ is added to it"),
        ({"": 1}, "'' is a name"),
        ({"mine": "high"}, "mine must be a number or a 0-d tensor, got 'high'"),
        ({"mine": None}, "mine must be a number"),
        ({"mine": [1.0]}, "mine must be a number"),
        ({"mine": 1j}, "mine must be a number"),
        ({"mine": torch.zeros(2)}, r"got a tensor of shape \(2,\)"),
        ({"mine": torch.zeros((), dtype=torch.complex64)}, "mine must be a number"),
        ({"mine": 10**400}, "mine is too large for a float"),
        ({3: 1.0}, "takes names and numbers"),
        ([("mine", 1.0)], "takes names and numbers"),
    ],
)
def test_what_is_no_number_or_a_name_of_ours_is_refused(values: Any, says: str) -> None:
    with opened(*SHORT) as run, pytest.raises(UsageError, match=f"log: .*{says}"):
        run.log(values)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with opened(*SHORT) as run, pytest.raises(UsageError, match="step must be a whole number"):
        run.log({"mine": 1.0}, step)


def test_numbers_of_a_device_are_read_once_their_copy_has_arrived() -> None:
    event, waits = SimpleNamespace(arrived=False), list[None]()
    event.query, event.synchronize = lambda: event.arrived, lambda: waits.append(None)
    values = UserValues()
    values.add({"a": 1.0}, 1)
    values.start_copy()
    values.copies[0] = values.copies[0]._replace(
        rows=[(1, {"a": torch.zeros((), device="meta"), "b": 2.0})],
        values=torch.tensor([5.0]), ready=event,
    )  # fmt: skip
    assert values.read() == [] and not waits  # no host wait
    event.arrived = True
    assert values.read() == [(1, {"a": 5.0, "b": 2.0})]
    assert values.read() == []


def test_an_objective_that_logs_in_its_call_is_not_compiled_into_a_step(tmp_path: Path) -> None:
    class Logging(ClassificationObjective):
        def __call__(self, output: Any, target: Any) -> Tensor:
            self.log({"samples": len(target)})
            return super().__call__(output, target)

    with opened(*SHORT, "training.steps=2", folder=tmp_path) as run:
        run.objective.__class__ = Logging
        run.step_graph = cast(Any, object())
        summary = train(run)
        assert run.step_graph is None
    assert "objective logs" in run.fallback_reasons["whole_step"] and summary.status == "done"
    assert [step for step, _ in logged(tmp_path)] == [1, 2]


HOOK = """
from runner import Hook

class Score(Hook):
    def on_step(self, run, step):
        run.log({"score": step.number * (1 - 2 * run.rank)})  # of the second process it falls
"""


def test_of_two_processes_the_first_one_writes_and_decides_on_the_best(tmp_path: Path) -> None:
    (tmp_path / "my_hooks.py").write_text(HOOK)
    done = command(
        tmp_path, *EVERY, *MONITORED, "distributed=ddp", "distributed.processes=2", "device=cpu",
        "training.patience=1", "distributed.timeout_s=20", "debug.hooks=[my_hooks.Score]",
        "security.trusted=[my_hooks]", "hydra.run.dir=run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert logged(tmp_path / "run") == [(n, {"score": float(n)}) for n in range(1, 21)]
    assert Summary.read(tmp_path / "run").best_step == 20


def test_a_run_that_logs_nothing_keeps_nothing_for_it_and_takes_nothing_once_it_has_ended(
    tmp_path: Path,
) -> None:
    with opened(*SHORT, folder=tmp_path) as run:
        train(run)
        assert run.reader.user is None
        with pytest.raises(UsageError, match="log: the training has ended"):
            run.log({"mine": 1.0})
    assert not rows(tmp_path, "user")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


BATCH = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def test_an_own_loop_under_stability_logs_into_its_folder(net: nn.Module, tmp_path: Path) -> None:
    optimizer, losses = torch.optim.SGD(net.parameters()), []
    with Stability(folder=tmp_path) as stability:
        stability.log({"before": 1.0})
        for _ in range(3):
            loss = nn.functional.cross_entropy(net(BATCH[0]), BATCH[1])
            losses.append(loss.item())
            stability.step(net, loss, optimizer)
            stability.log({"mine": loss, "other": 2})
        for name in ("loss", "val/loss", "accuracy"):
            with pytest.raises(UsageError, match=f"'{name}' is a name"):
                stability.log({name: 1.0})
    steps = [(n, {"mine": x, "other": 2.0}) for n, x in enumerate(losses, 1)]
    assert logged(tmp_path) == [(0, {"before": 1.0}), *steps]
    assert list(tmp_path.glob("events.out.tfevents*"))
    with pytest.raises(UsageError, match="log: it is closed"):
        stability.log({"mine": 1.0})


def test_an_optimized_loop_logs_into_its_folder(net: nn.Module, tmp_path: Path) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    optimizer = torch.optim.SGD(net.parameters())
    with optimize_training_loop(net, optimizer, loss_fn, level="none", folder=tmp_path) as loop:
        for n in range(1, 4):
            step = loop(BATCH)
            loop.log({"mine": step.loss})
            loop.log({"twice": 2 * n}, step=10 * n)
    values = logged(tmp_path)
    assert [step for step, _ in values] == [1, 10, 2, 20, 3, 30]
    assert float(step.loss) == values[4][1]["mine"]


def test_a_loop_without_a_folder_cannot_log(net: nn.Module) -> None:
    with Stability() as stability, pytest.raises(UsageError, match=r"Stability\(…, folder=…\)"):
        stability.log({"mine": 1.0})
    optimizer = torch.optim.SGD(net.parameters())
    loop = optimize_training_loop(net, optimizer, nn.functional.cross_entropy)
    with loop, pytest.raises(UsageError, match=r"optimize_training_loop\(…, folder=…\)"):
        loop.log({"mine": 1.0})


def test_the_record_of_an_own_loop_is_continued_and_that_of_a_run_is_refused(
    net: nn.Module, tmp_path: Path
) -> None:
    own, of_run = tmp_path / "own", tmp_path / "run"
    for first in (1, 4):
        with Stability(folder=own) as stability:
            stability.log({"mine": 1.0}, step=first)
            stability.log({"mine": 2.0}, step=first + 1)
        with (own / "metrics.jsonl").open("a") as file:
            file.write('{"step": ')  # of a process that was killed
    lines = (own / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in (*lines[:2], *lines[3:5])]
    assert (steps, lines[2]) == ([1, 2, 4, 5], '{"step": ')
    assert scalars(own, "user/mine") == [(1, 1), (2, 2), (4, 1), (5, 2)]

    trained(*SHORT, folder=of_run, hooks=[logs(lambda step: {"mine": step})])
    names = ("metrics.jsonl", "summary.json", "events.out.tfevents*")
    files = {path: path.read_bytes() for name in names for path in of_run.glob(name)}
    assert len(files) >= 3
    optimizer = torch.optim.SGD(net.parameters())
    loop = optimize_training_loop(net, optimizer, nn.functional.cross_entropy, folder=of_run)
    for record in (Stability(folder=of_run), loop):
        with (
            record,
            pytest.raises(UsageError, match=r": folder=.*run is that of a run; log into another"),
        ):
            record.log({"mine": 1.0})
    assert {path: path.read_bytes() for path in files} == files
