"""What went wrong is on disk and in TensorBoard when the run ends; a hook of the user's watches."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner import Hook, Verdict, build, compose, train
from runner.core.build.setup import Components
from runner.core.errors import ConfigError, SecurityError, UsageError
from runner.core.interfaces.hook import Report, Step
from runner.core.interfaces.run import Run
from tests import runs

POISONED = (*runs.NOISY, "+data.poison=[7]", "training.epochs=4", "training.batch_size=16")


def test_every_fault_is_in_the_history_and_in_tensorboard(tmp_path: Path, my_package: None) -> None:
    summary = runs.trained(*POISONED, "optimization=none", "monitoring.every=4", folder=tmp_path)
    assert summary.skipped_steps == summary.faults["non_finite"] >= 3
    counts = runs.debug_file(tmp_path, "history")["counts"]
    assert counts["non_finite"] == summary.skipped_steps
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()["tensors"]
    assert "watch_faults/history" in tags
    text = events.Tensors("watch_faults/history")[0].tensor_proto.string_val[0].decode()
    assert "non\\_finite" in text


class Watcher(Hook):
    """A hook as a user would write it."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.seen, self.reports = every, list[int](), 0

    def on_step(self, run: Run, step: Step) -> None:
        self.seen.append(step.number)

    def on_report(self, run: Run, report: Report) -> None:
        self.reports += 1


def test_a_hook_of_the_users_own_is_made_with_its_arguments_and_called() -> None:
    name = f"{__name__}.Watcher"
    hooks = f"debug.hooks=[{{_target_: {name}, every: 5}},{name}]"
    with runs.opened(hooks, "security.trusted=[tests]", "training.steps=20") as run:
        train(run)
        first, second = run.hooks[-2:]
    assert isinstance(first, Watcher) and isinstance(second, Watcher)
    assert first.seen == [5, 10, 15, 20] and first.reports == 2
    assert second.seen == list(range(1, 21))


def test_a_hook_needs_trust_before_anything_is_imported_and_has_to_be_one() -> None:
    with pytest.raises(SecurityError, match="debug.hooks.0"):
        compose(["debug.hooks=[os.system]"])
    with pytest.raises(SecurityError, match="debug.hooks.1"):
        compose(["debug.hooks=[torch.nn.Linear,{_target_: subprocess.Popen, args: ls}]"])
    with pytest.raises(ConfigError, match=r"debug.hooks.0: _target_ is missing"):
        build(compose(["debug.hooks=[{target: x}]"]))
    with pytest.raises(ConfigError, match=r"debug.hooks.0.*Identity is not a Hook"):
        build(compose(["debug.hooks=[torch.nn.Identity]"]))


class Answering(Hook):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize("answer", ["stop", True])
def test_an_answer_of_a_hook_that_is_no_verdict_is_named(answer: object) -> None:
    short = ("data=digits", "optimization=none", "training.steps=2")
    with pytest.raises(UsageError, match=f"Answering.on_step must return .*, got {answer!r}"):
        runs.trained(*short, given=Components(hooks=[Answering(answer)]))


def test_a_class_in_place_of_a_hook_is_refused_by_build_and_train() -> None:
    hooks: list[Hook] = [Watcher]  # type: ignore[list-item]
    with pytest.raises(UsageError, match="^build: hooks must be a list of .* got <class .*Watcher"):
        build(runs.config("data=digits"), given=Components(hooks=hooks))
    with pytest.raises(UsageError, match="^train: hooks must be"):
        runs.trained("data=digits", "optimization=none", "training.steps=2", hooks=hooks)


def test_a_run_without_a_fault_leaves_files_that_say_so_where_tools_were_on(tmp_path: Path) -> None:
    short = ("data=digits", "model=mlp", "optimization=none", "training.steps=2")
    assert runs.trained(*short, "debug=full", folder=tmp_path / "tools").faults == {}
    names = ("history", "anomalies", "gradients", "memory")
    found = {name: runs.debug_file(tmp_path / "tools", name) for name in names}
    assert found["history"] == {"counts": {}, "faults": []}
    assert found["anomalies"] == {"count": 0, "anomalies": []}
    assert found["gradients"]["finding"].startswith("2 checks, but a verdict needs 3")
    assert found["memory"]["leak"] == "too few samples for a leak verdict (0 of 40)"
    runs.trained(*short, folder=tmp_path / "none")
    assert not (tmp_path / "none/debug").exists()
