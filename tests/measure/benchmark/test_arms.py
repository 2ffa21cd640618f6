"""What is typed for an arm becomes a config; what cannot be compared is refused at once."""

import shlex

import pytest

from runner.core.config.composing import compose
from runner.core.errors import ConfigError
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm, compose_arms, reference_arm
from runner.measure.benchmark.engine import describe_differences, other_work


def arms(*typed: str, over: tuple[str, ...] = (), **settings: object) -> list[Arm]:
    return compose_arms(BenchmarkConfig(arms=list(typed), **settings), list(over))  # type: ignore[arg-type]


def test_a_level_is_that_level_on_top_of_what_was_typed() -> None:
    none, ultra = arms("none", "ultra", over=("job=benchmark", "training.steps=7", "seed=3"))
    assert (none.name, ultra.name) == ("none", "ultra")
    assert (none.config.optimization.level, ultra.config.optimization.level) == ("none", "ultra")
    assert none.config.training.steps == ultra.config.training.steps == 7
    assert none.config.seed == 3
    assert ultra.overrides == ["optimization=ultra"]
    _, any_case, other_word = arms("none", "ULTRA", "full_optimization")
    levels = any_case.config.optimization.level, other_word.config.optimization.level
    assert levels == ("ultra", "full")


def test_overrides_are_read_as_a_shell_reads_them_and_may_have_a_name_in_front() -> None:
    typed = """optimizer=sgd  optimization=basic 'name="a.b"'"""
    _, arm, fast = arms("none", typed, "my fast one: ultra data.workers=2 data.prefetch=4")
    assert (arm.config.optimizer.name, arm.config.name) == ("SGD", "a.b")
    assert arm.overrides == ["optimizer=sgd", "optimization=basic", 'name="a.b"']
    assert (fast.name, fast.config.optimization.level) == ("my fast one", "ultra")
    assert fast.config.data.workers == 2  # how data are loaded may differ


def test_the_arm_wins_over_what_was_typed_for_all() -> None:
    over = ("optimization=basic", "training.epochs=3", "optimizer.lr=0.5")
    one, other = arms("a: training.steps=5", "b: optimizer.lr=0.1", over=over)
    assert (one.config.training.steps, one.config.training.epochs) == (5, None)
    assert (one.config.optimizer.lr, other.config.optimizer.lr) == (0.5, 0.1)
    assert other.config.training.epochs == 3


def test_the_command_of_an_arm_trains_the_same_by_itself() -> None:
    over = ("job=benchmark", "benchmark.budget_s=5", "data=cancer", "model.width=8")
    for arm in arms("none", "b: optimization=basic optimizer=sgd", over=over):
        words = shlex.split(arm.command)
        assert words[:4] == ["python", "-P", "-m", "runner"]
        assert compose(words[4:]) == arm.config


@pytest.mark.parametrize(
    ("typed", "over"),
    [("basic distributed=ddp", ()), ("basic", ("distributed=fsdp", "distributed.processes=2"))],
)
def test_a_distributed_arm_is_refused_by_name(typed: str, over: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"(benchmark.arms|^distributed): .* single processes"):
        arms("none", typed, over=over)


def test_every_arm_has_a_folder_of_its_own_that_can_be_typed() -> None:
    quoted = """name='x.x' "device.threads=1\""""
    measured = arms("none", "NONE: basic", "comparison: ultra", quoted)
    folders = ["none", "NONE-2", "comparison-2", "name=-x.x-device.threads=1"]
    assert [arm.folder for arm in measured] == folders


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["none", "ultr"], "did you mean ultra"),
        (["none", "optimizr=sgd"], "did you mean optimizer=sgd"),
        (["none", "none"], "is listed twice"),
        (["none", "one: optimizer.lr=0.1", "two: optimizer.lr=0.1"], "are the same"),
        (["none"], "needs two arms or more, got 1"),
        ([], "needs two arms or more, got 0"),
        (["none", "job=train"], "applies to the whole benchmark"),
        (["none", "optimizer.lr=1,2"], "one arm per value"),
        (["none", "basic optimization=ultra"], "sets optimization twice"),
        (["none", "data=cancer"], "train on different data: data.kind is digits and cancer"),
        (["none", "model=gpt"], "gpt reads tokens"),
    ],
)
def test_an_arm_that_cannot_be_measured_is_refused(typed: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        arms(*typed)
    assert caught.value.key == "benchmark.arms"


def test_the_reference_is_the_first_arm_or_the_one_that_is_named() -> None:
    measured = arms("none", "basic")
    assert reference_arm(measured, BenchmarkConfig()).name == "none"
    assert reference_arm(measured, BenchmarkConfig(reference="basic")).name == "basic"
    with pytest.raises(ConfigError, match="did you mean basic"):
        arms("none", "basic", reference="basc")


def test_a_budget_without_a_turn_for_each_and_nothing_to_attribute_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"benchmark\.budget_s: 0\.7 s is not enough") as caught:
        arms("none", "basic", budget_s=0.7)
    assert "3 processes" in str(caught.value)  # two and the control
    assert len(arms("none", "basic", budget_s=0.7, control=False)) == 2
    with pytest.raises(ConfigError, match=r"benchmark\.attribute: the last arm, none"):
        arms("basic", "none", attribute=True)


def test_other_work_is_named() -> None:
    measured = arms("none", "b: model.width=8", "c: optimizer=sgd")
    notes = [note.partition(",")[0] for note in describe_differences(measured, measured[0])]
    assert notes == ["b: different model from none", "c: different optimizer from none"]
    others = arms("none", "basic", "b: ultra training.batch_size=64 seed=1 device.tf32=true")
    assert other_work(others[1], others[0]) == []
    assert other_work(others[2], others[0]) == ["seed", "device.tf32", "batch size"]
