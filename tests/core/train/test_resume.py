"""A run that was cut off and continued in a fresh process ends in the same bits."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import build, create_training_pipeline, train
from runner.core.build.setup import Components
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.folder import steps
from runner.core.errors import CheckpointError, Interrupted, SecurityError, UsageError
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas import data, models
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.security.paths import distrust_resumed_folder
from runner.core.train import run_state
from runner.core.train.changed_settings import FREE_MAPPINGS, changed_settings, describe_changes
from tests import my_package as package
from tests import runs
from tests.faults.end_state import end_state, run_files
from tests.runs import AtSteps, command, hook, interrupt, opened, rows

NOISY = [*runs.NOISY, "training.batch_size=20"]
CANCER = ["data=cancer", "model=mlp"]
EVERYTHING = {
    "noise, dropout, BatchNorm, cosine, average, accumulation, 0 workers": [
        *NOISY, "optimization=basic", "schedule=cosine", "optimizer.ema=0.9",
        "training.micro_batch=7",
    ],
    "an optimizer of the user's own": [
        *NOISY, "optimization=advanced", "optimizer._target_=my_package.Lion",
        "+optimizer.options.betas=[0.8,0.95]", "optimizer.lr=3e-3", "schedule=cosine",
    ],
    "the same, 2 workers": [
        *NOISY, "optimization=basic", "schedule=cosine", "optimizer.ema=0.9", "data.workers=2",
    ],
    "fp16 with a loss scale, onecycle, SGD with momentum": [
        *NOISY, "optimization=amp", "optimization.amp.dtype=fp16", "schedule=onecycle",
        "optimizer=sgd", "optimizer.lr=0.05",
    ],
    "gpt in bf16": [
        *runs.OURS, "data._target_=my_package.Masked", "model=gpt", "model.width=16",
        "model.heads=2", "model.dropout=0.2", "optimization=amp", "optimization.amp.dtype=bf16",
        "training.batch_size=8",
    ],
}  # fmt: skip
STEPS = 23  # the epochs have 5 and 4 steps: neither the cut nor the end is at an epoch's end
EVERY = 7


def final(folder: Path) -> list[Any]:
    restored = Checkpointer(folder, keep=9).restore()
    assert restored is not None and restored.step == STEPS
    # one of the two says where it continued, and timings take more or less room
    own = ("choices", "record", "events")
    return [restored.model, {k: v for k, v in restored.state.items() if k not in own}]


@pytest.mark.parametrize("overrides", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_steps_straight_equal_steps_resumed_in_a_fresh_process(
    overrides: list[str], tmp_path: Path, my_package: None
) -> None:
    overrides = [*runs.QUICK, *overrides, f"training.steps={STEPS}", "training.validate_every=10",
                 f"checkpoint.every={EVERY}", "checkpoint.keep=9"]  # fmt: skip
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    runs.trained(*overrides, folder=straight)
    # as if the power had failed after step 14: what came later is not there, but for a torn record
    shutil.copytree(straight, resumed, symlinks=True)
    for step in (20, 21, STEPS):
        shutil.rmtree(resumed / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
    with (resumed / "metrics.jsonl").open("a") as record:
        record.write('{"step": 22, "split": "tr')
    again = [f"hydra.run.dir={resumed}", *overrides, "checkpoint.resume=auto"]
    done = command(resumed.parent, *again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.differences(final(straight), final(resumed)) == []
    assert rows(straight) == rows(resumed)


TOOLS = ["debug=gradients", "debug.every=2", "debug.memory.enabled=true", "debug.profile.start=4",
         "debug.anomaly.enabled=true", "debug.profile.enabled=true",
         "debug.profile.steps=2"]  # fmt: skip


def test_a_run_that_ended_in_between_has_the_files_and_steps_of_a_straight_one(
    tmp_path: Path, my_package: None
) -> None:
    typed = [*NOISY, *TOOLS, f"training.steps={STEPS}", "training.validate_every=10",
             f"checkpoint.every={EVERY}", "checkpoint.keep=1",
             "checkpoint.resume=auto"]  # fmt: skip
    for name, ends in (("straight", [0]), ("resumed", [3, 9, 18, STEPS, 0])):
        for step in ends:
            with opened(*typed, folder=tmp_path / name) as run, suppress(runs.Killed):
                run.hooks.insert(0, AtSteps(step, runs.kill))
                train(run)
    straight, resumed = (end_state(tmp_path / name) for name in ("straight", "resumed"))
    assert [part for part in straight if straight[part] != resumed[part]] == []
    (trace,) = (tmp_path / "resumed" / "debug" / "traces").iterdir()
    assert "debug/plots/gradient_flow.png" in run_files(tmp_path / "resumed")
    assert len(list((tmp_path / "resumed").glob("events*"))) > 1


def test_a_checkpoint_of_an_early_end_is_replaced_by_the_next_one(
    tmp_path: Path, my_package: None
) -> None:
    typed = [*NOISY, "training.steps=12", "checkpoint.every=4", "training.validate_every=12",
             "debug.capture.enabled=false", "checkpoint.keep=3",
             "checkpoint.resume=auto"]  # fmt: skip
    with pytest.raises(Interrupted):
        runs.trained(*typed, folder=tmp_path, hooks=[AtSteps(6, interrupt)])
    assert [*steps(tmp_path / "checkpoints")] == [0, 4, 6]
    runs.trained(*typed, folder=tmp_path)
    assert [*steps(tmp_path / "checkpoints")] == [4, 8, 12]


@pytest.mark.parametrize(
    ("before", "then", "why"),
    [
        ([], ["model.width=7"], r"size mismatch.* its run: model\.width=\d+, not 7$"),
        ([], ["optimizer=sgd"], "another optimizer: SGD has no amsgrad.* its run: optimizer"),
        (["optimizer=sgd"], [], "another optimizer: AdamW has no dampening.* its run: optimizer"),
        ([], ["+optimizer.options.amsgrad=true"], "max_exp_avg_sq is missing"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_way_out(
    before: list[str], then: list[str], why: str, tmp_path: Path
) -> None:
    runs.trained(*CANCER, *before, "training.steps=2", folder=tmp_path)
    with pytest.raises(CheckpointError, match=f"does not fit .*{why}"):
        runs.trained(*CANCER, *then, f"checkpoint.resume={tmp_path}", folder=tmp_path / "other")


def test_a_foreign_run_gives_no_trust_even_if_it_is_resumed_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "outputs" / "runs" / "theirs" / "x"
    overrides = [*CANCER, "training.steps=2"]
    runs.trained(*overrides, folder=theirs)
    again = [*overrides, "security=strict", f"checkpoint.resume={theirs}"]
    with distrust_resumed_folder(theirs), pytest.raises(SecurityError, match="of this run tree"):
        runs.trained(*again, folder=theirs)
    monkeypatch.chdir(tmp_path)  # and now it is one of ours
    with distrust_resumed_folder(theirs), opened(*again, folder=theirs) as run:
        assert run.progress.step == 2


def test_a_finished_run_is_left_as_it_is_and_a_used_folder_is_refused(tmp_path: Path) -> None:
    overrides = [*CANCER, "training.steps=9"]
    runs.trained(*overrides, folder=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix in (".json", ".jsonl")}
    assert runs.trained(*overrides, "checkpoint.resume=auto", folder=tmp_path).status == "done"
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    with pytest.raises(UsageError, match=r"checkpoint\.resume=auto"):
        runs.trained(*overrides, folder=tmp_path)


def test_what_a_run_was_started_with_is_replaced_once_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, overrides = tmp_path / "run", [*CANCER, "training.steps=5", "schedule=constant"]
    runs.trained(*overrides, folder=run)
    for name, text in ((".hydra", "old"), (".hydra-resumed", "new")):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).mkdir()
        (run / name / "overrides.yaml").write_text(text)
    kept = run / ".hydra" / "overrides.yaml"
    resumed = [*overrides, "training.steps=9", "checkpoint.resume=run"]  # as it is typed: relative
    with pytest.raises(CheckpointError):
        runs.trained(*resumed, "model.width=7", folder=run)
    assert kept.read_text() == "old"
    assert runs.trained(*resumed, "training.steps=5", folder=run).steps == 5  # nothing to do
    assert kept.read_text() == "old"
    assert runs.trained(*resumed, folder=run).steps == 9
    assert kept.read_text() == "new"


def test_a_run_cut_off_when_its_patience_ran_out_does_not_train_on(tmp_path: Path) -> None:
    overrides = [*CANCER, "optimizer.lr=0", "training.patience=2", "training.epochs=9"]
    summary = runs.trained(*overrides, folder=tmp_path)
    assert summary.status == "stopped"
    record = tmp_path / "summary.json"
    record.write_text(record.read_text().replace('"stopped"', '"running"'))  # as after a kill
    again = runs.trained(*overrides, "checkpoint.resume=auto", folder=tmp_path)
    assert (again.status, again.steps) == ("stopped", summary.steps)


def test_the_random_draws_of_a_hook_continue_after_a_resume(tmp_path: Path) -> None:
    typed = ["data=cancer", "training.steps=8", "checkpoint.every=4"]
    again = f"checkpoint.resume={tmp_path}/checkpoints/step_00000004"
    drawn: list[list[tuple[float, float]]] = []
    draws = hook(on_step=lambda *_: drawn[-1].append((random.random(), np.random.random())))
    for overrides, folder in ((typed, tmp_path), ([*typed, again], None)):
        drawn.append([])
        runs.trained(*overrides, folder=folder, hooks=[draws])
    straight, resumed = drawn
    assert len(straight) == 8 and resumed == straight[4:]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_longer_schedule_that_raises_the_learning_rate_says_so(
    schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = (*runs.TABLE, f"schedule={schedule}", "schedule.warmup=0", "optimizer.lr=0.01")
    runs.trained(*overrides, "training.steps=10", folder=tmp_path)
    longer = ("training.steps=20", "checkpoint.resume=auto")
    with opened(*overrides, *longer, folder=tmp_path) as run:
        raised = run.update.lr_at(10)
    said = [line for line in caplog.messages if "the learning rate goes from" in line]
    assert len(said) == (schedule != "constant")
    if said:
        last = 0.01 * (0.5 * (1 + math.cos(math.pi * 0.9)) if schedule == "cosine" else 0.1)
        assert f"goes from {last:.3g} back to {raised:.3g}" in said[0]
        assert f"schedule=constant optimizer.lr={last:.3g}" in said[0]


def test_a_resumed_run_names_each_key_of_the_user_that_was_added_changed_or_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    typed = [*CANCER, "training.steps=2"]
    before, after = "optimizer.options={eps: 1e-7}", "optimizer.options={betas: [0.5,0.9]}"
    runs.trained(*typed, before, folder=tmp_path)
    runs.trained(*typed, after, "training.steps=3", "checkpoint.resume=auto", folder=tmp_path)
    changed = ["training.steps=3 (was 2)", "optimizer.options.betas=[0.5, 0.9] (was not set)",
               "optimizer.options.eps=not set (was 1e-07)"]  # fmt: skip
    line = next(text for text in caplog.messages if "the config differs from" in text)
    sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
    assert sorted(sessions[-1]["changed_keys"]) == sorted(changed)
    assert all(text in line for text in changed)
    runs.trained(*typed, "training.steps=4", "checkpoint.resume=auto", folder=tmp_path)
    assert "optimizer.options.betas=not set (was [0.5, 0.9])" in caplog.text


def test_keys_that_another_version_or_option_has_are_not_changed_ones() -> None:
    before = {"data.arguments": "{}", "optimizer.lr": "0.1", "training.gone": "1", "seed": "0"}
    after = {"data.arguments.n": 3, "optimizer.lr": 0.1, "training.new": None, "seed": 1}
    assert changed_settings(before, after) == {"data.arguments.n": ("not set", "3"),
                                               "seed": ("0", "1")}  # fmt: skip
    assert describe_changes({}, {"training.new": 1}) == ("keys that its version did not have", [])
    many = {f"optimizer.options.{n}": n for n in range(10)}
    text, texts = describe_changes({}, many)
    assert text.endswith("(was not set), and 2 more") and len(texts) == 10


def test_the_mappings_of_the_users_keys_are_those_of_the_schemas() -> None:
    groups = {"data": data.OPTIONS.values(), "model": models.OPTIONS.values(),
              "objective": [models.ObjectiveConfig], "optimizer": [OptimizerConfig]}  # fmt: skip
    free = {
        f"{group}.{each.name}"
        for group, configs in groups.items()
        for config in configs
        for each in fields(config)
        if str(each.type).startswith("dict[")
    }
    assert free == {*FREE_MAPPINGS}


class Noisy(torch.nn.Module):
    """Adds noise of a generator of its own; fails once, in a forward, if asked to."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.layer, self.noise = torch.nn.Linear(4, 2), torch.Generator().manual_seed(3)
        self.fails_at, self.forwards = fails_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + torch.rand(x.shape, generator=self.noise)
            self.forwards += 1
            if self.forwards == self.fails_at:
                raise KeyError("planted")
        return self.layer(x)


class FailingLoss(package.Centred):
    """Fails once, after its average has moved."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at, self.steps = fails_at, 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = super().forward(output, target)
        self.steps += output.requires_grad
        if output.requires_grad and self.steps == self.fails_at:
            raise KeyError("planted")
        return loss


@pytest.mark.parametrize("failing", ["model", "loss"])
def test_generators_of_modules_and_buffers_of_a_loss_continue_after_a_resume(
    tmp_path: Path, failing: str
) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    table = x, (x[:, 0] > 0).long()

    def run_to(folder: Path, fails_at: int, *more: str) -> Any:
        torch.manual_seed(0)
        model = Noisy(fails_at if failing == "model" else 0)
        loss = FailingLoss(fails_at if failing == "loss" else 0)
        typed = [*runs.QUICK, "training.steps=12", "training.batch_size=16", "checkpoint.every=5",
                 *more]  # fmt: skip
        with create_training_pipeline(
            model, table, validation=table, loss_fn=loss, overrides=typed, folder=folder,
            level="none",
        ) as made:  # fmt: skip
            made.train()
        return [*model.state_dict().values(), loss.average, model.noise.get_state(),
                loss.noise.get_state()]  # fmt: skip

    whole = run_to(tmp_path / "whole", 0)
    with pytest.raises(KeyError):
        run_to(tmp_path / "failed", 8)
    again = run_to(tmp_path / "failed", 0, "checkpoint.resume=auto")
    assert all(map(torch.equal, whole, again))


@pytest.mark.parametrize("given", [False, True])
def test_the_buffers_of_a_loss_continue_after_a_resume(
    tmp_path: Path, given: bool, my_package: None
) -> None:
    typed = [*runs.OURS, *CANCER, "optimization=none", "checkpoint.resume=auto"]
    typed += [] if given else ["objective._target_=my_package.Centred"]

    def run_to(steps: int, folder: Path) -> list[torch.Tensor]:
        parts = Components(objective=CustomObjective(package.Centred(), "") if given else None)
        with build(runs.config(*typed, f"training.steps={steps}"), folder, components=parts) as run:
            train(run)
            objective: Any = run.objective
            return [*run.model.state_dict().values(), objective.loss.average]

    typed += ["schedule=constant"]
    whole = run_to(9, tmp_path / "whole")
    run_to(4, tmp_path / "run")
    assert all(map(torch.equal, whole, run_to(9, tmp_path / "run")))


@pytest.mark.parametrize("older", [True, False])
def test_an_older_run_whose_data_set_keeps_a_generator_says_that_draws_differ(
    older: bool, tmp_path: Path, my_package: None, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    typed = [*NOISY, "data._target_=my_package.Keeper", "checkpoint.resume=auto"]
    complete = run_state._run_state

    def without_key(run: Run) -> dict[str, Any]:
        return {k: v for k, v in complete(run).items() if k != "seeds_own_generators"}

    with monkeypatch.context() as patched:
        if older:
            patched.setattr(run_state, "_run_state", without_key)
        runs.trained(*typed, "training.steps=2", folder=tmp_path)
    with opened(*typed, "training.steps=3", folder=tmp_path):
        pass
    assert ("they draw other numbers than before step 2" in caplog.text) is older


class Forks(torch.nn.Module):
    """Copies the process in the forward of two steps."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer, self.forwards = torch.nn.Linear(in_features, classes), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.training and self.forwards in (4, 6):
            os.fork()
        return self.layer(x)


def test_a_copy_of_the_process_that_a_model_forks_writes_nothing_and_ends_in_one_line(
    tmp_path: Path,
) -> None:
    typed = ["data=cancer", "model._target_=tests.core.train.test_resume.Forks",
             "security.trusted=[tests]", "training.steps=9", "monitoring.every=1",
             "optimization=none", "hydra.run.dir=run"]  # fmt: skip
    done = command(tmp_path, *typed)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "os.fork() in user code" in line]
    assert len(lines) == 2 and "Traceback" not in done.stderr
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [*range(1, 10)]


class Counter(Hook):
    """Counts its steps in jumps of `by`, and continues in a resumed run."""

    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def on_step(self, run: Run, step: Step) -> None:
        self.count += self.by

    def resume_state(self) -> str:
        return str(self.count)

    def load_resume_state(self, text: str) -> None:
        self.count = int(text)


def test_each_hook_of_a_class_continues_with_its_own_state(tmp_path: Path) -> None:
    for count in (4, 6):
        hooks = Counter(1), Counter(10)
        typed = *runs.TABLE, f"training.steps={count}", "checkpoint.resume=auto"
        runs.trained(*typed, folder=tmp_path, given=Components(hooks=hooks))
    assert [hook.count for hook in hooks] == [6, 60]
