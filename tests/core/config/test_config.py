"""The composed config: every option, the checks that need two parts, the hash, the public names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import runner
from runner import rooms
from runner.core.config.aliases import TORCH_OPTIMIZERS
from runner.core.config.composing import compose, compose_raw, typed
from runner.core.config.groups import CONF, default_options, group_options
from runner.core.config.run_config import RunConfig, WrittenConfig, config_hash, validate_config
from runner.core.errors import ConfigError, SecurityError, UsageError
from runner.core.schemas import data as data_config
from runner.core.schemas import models as model_config
from runner.core.schemas.jobs import JobKind
from runner.core.security import secrets
from tests import composed, runs

NEEDS = {
    ("data", "stdlib_text"): ["model=gpt"],
    ("data", "stdlib_parts"): ["model=classifier"],
    ("data", "tabular"): ["data.path=x.csv", "data.target=y"],
    ("data", "images"): ["data.path=x"],
    ("data", "text"): ["data.path=x", "model=classifier"],
    ("data", "text_lm"): ["data.path=x", "model=gpt"],
    ("data", "tokens"): ["data.path=x", "data.vocab=9", "model=gpt"],
    ("data", "arrays"): ["data.path=x"],
    ("model", "gpt"): ["data=stdlib_text"],
    ("model", "classifier"): ["data=stdlib_parts"],
    ("model", "hf"): ["data=text", "data.path=x", "model.path=y"],
    ("job", "evaluate"): ["checkpoint.resume=x"],
    ("job", "predict"): ["checkpoint.resume=x"],
    ("job", "replay"): ["replay.path=x"],
    ("job", "scan"): ["scan.path=x"],
}
ALONE = ("data", "model", "experiment", "job", "distributed")  # fsdp refuses some debug tools
EVERY = [(group, option) for group in ALONE for option in group_options()[group]]
TOGETHER = {group: list(found) for group, found in group_options().items() if group not in ALONE}
NAMED = {"data", "model", "objective", "device", "schedule", "job"}


@pytest.mark.parametrize(("group", "option"), EVERY, ids=lambda value: value)
def test_an_option_composes(group: str, option: str) -> None:
    config = compose([f"{group}={option}", *NEEDS.get((group, option), [])])
    assert isinstance(config, RunConfig)
    part = getattr(config, group, None)
    if group in NAMED:
        assert getattr(part.kind, "name", part.kind) == option


@pytest.mark.parametrize("number", range(max(map(len, TOGETHER.values()))))
def test_options_of_all_other_groups_compose(number: int) -> None:
    chosen = {group: names[number % len(names)] for group, names in TOGETHER.items()}
    config = compose([f"{group}={option}" for group, option in chosen.items()])
    assert config.optimization.level == chosen["optimization"]
    for group in NAMED & chosen.keys():
        kind = getattr(config, group).kind
        assert getattr(kind, "name", kind) == chosen[group]


def test_every_part_has_a_group_and_every_kind_an_option_with_a_comment() -> None:
    groups = group_options()
    assert all(what.strip() for names in groups.values() for what in names.values())
    parts = {f.name for f in fields(RunConfig)} - {"name", "seed"}
    assert parts == set(groups) - {"experiment"}
    assert set(groups["data"]) == set(data_config.OPTIONS)
    assert set(groups["model"]) == set(model_config.OPTIONS)
    assert set(groups["job"]) == set(rooms.NAMES["job"]) == {kind.name for kind in JobKind}


def test_the_defaults_read_from_the_file_are_those_that_hydra_takes() -> None:
    choices, ours = compose_raw([], hydra_too=True).hydra.runtime.choices, default_options()
    assert {k: str(v or "null") for k, v in choices.items() if k in ours} == ours
    assert set(ours) == set(group_options())


def test_levels_switch_on_what_they_say() -> None:
    def on(level: str) -> set[str]:
        techniques = compose([f"optimization={level}"]).optimization.techniques()
        return {name for name, technique in techniques if technique.enabled}

    assert on("none") == on("custom") == set()
    assert on("basic") == {"system", "fused_optimizer"}
    assert on("advanced") == on("basic") | {"tf32", "channels_last", "amp", "compile"}
    more = {"attention", "chunked_loss", "whole_step", "cuda_graphs", "pipeline"}
    assert on("ultra") == on("advanced") | more
    assert on("maximum") == on("ultra") | {"quantization"}
    assert on("full") == on("maximum") | {"accumulation", "recompute"}
    assert on("full") == {name for name, _ in compose([]).optimization.techniques()}
    assert (on("amp"), on("compile")) == ({"amp"}, {"compile"})
    assert on("memory_efficient") == {"accumulation", "recompute", "chunked_loss"}
    assert compose(["optimization=advanced"]).optimization.compile.min_steps is None
    assert compose(["optimization=compile"]).optimization.compile.min_steps == 0


def test_the_name_tells_data_and_model_also_when_the_model_is_foreign() -> None:
    trusted = "security.trusted=[my_package]"
    assert compose([]).name == "digits-mlp"
    assert compose(["model._target_=my_package.nets.Net", trusted]).name == "digits-Net"
    assert compose(["experiment=digits_cnn"]).name == "digits_cnn"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data=tabular"], r"^data\.path: has no value \(also missing: data\.target\)"),
        (["data=stdlib_text"], r"^model: mlp cannot read tokens.*use model=gpt$"),
        (["model=classifier"], r"^model: classifier reads labelled text.*data=stdlib_parts"),
        (["data=synthetic", "data.form=tokens"], "use model=gpt"),
        (["job=evaluate"], r"^checkpoint\.resume: .*name a run's folder"),
        (["checkpoint=off", "checkpoint.resume=auto"], r"^checkpoint\.resume: "),
        (["name=../away"], "^name: "),
        (["seed=-1"], "^seed: "),
        (["checkpoint.every=0"], r"^checkpoint\.every: must be ≥ 1, got 0"),
        (["training.steps=1", "training.epochs=1"], r"^training\.steps: .*name one"),
        (["+training.stpes=3"], r"^training\.stpes: .*did you mean training\.steps=3\?"),
        (["+optimization.amp.dtpye=bf16"], r"did you mean optimization\.amp\.dtype=bf16\?"),
        (["+extra=1"], "^extra: no config group or key"),
        (["seed=${nowhere}"], "^seed: .*'nowhere' not found"),
        (["training.epochs=nan"], r"^training\.epochs: "),
        (["optimizer.lr=nan"], r"^optimizer\.lr: "),
    ],
)
def test_what_cannot_run_is_refused_with_key_and_a_way_out(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        compose(overrides)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def default() -> RunConfig:
    return compose([])


def test_limits_on_tables_do_not_change_the_hash() -> None:
    table = ["data=tabular", "data.path=t.csv", "data.target=y"]
    before = config_hash(compose(table))
    for key in ("most_columns", "most_expansion", "most_cell_mb"):
        assert config_hash(compose([*table, f"data.{key}=null"])) == before
        with pytest.raises(ConfigError, match=f"data.{key}: must be"):
            compose([*table, f"data.{key}=0"])


def test_the_hash_is_the_same_in_every_process(default: RunConfig) -> None:
    code = "from runner.core.config import run_config; from runner import compose\n"
    printed = runs.printed_by(f"{code}print(run_config.config_hash(compose()))")
    assert printed.strip() == config_hash(default)


def test_the_hash_sees_every_value_that_shapes_the_numbers(default: RunConfig) -> None:
    overrides = [
        "seed=1", "optimizer.lr=0.002", "model.width=64", "data.split_seed=1", "data=cancer",
        "training.steps=7", "optimization.amp.enabled=false", "stability.clip_norm=null",
        "device=cpu", "+optimizer.options.amsgrad=true", "schedule=linear",
    ]  # fmt: skip
    hashes = [config_hash(compose([override])) for override in overrides]
    assert len({config_hash(default), *hashes}) == len(overrides) + 1


def test_what_leaves_the_numbers_leaves_the_hash_and_hooks_do_not(default: RunConfig) -> None:
    same = config_hash(default)
    alone = "name=other job=doctor checkpoint.resume=auto monitoring=quiet debug=anomaly"
    trusting = ["security.trusted=[my_package]", "debug.capture.at_most=0"]
    assert config_hash(compose([*alone.split(), *trusting])) == same
    hooks = ["security.trusted=[my_package]", "debug.hooks=[my_package.Mine]"]
    assert config_hash(compose(hooks)) != same
    assert json.loads(json.dumps(WrittenConfig(default).plain())) == WrittenConfig(default).plain()


def test_threads_compose_as_they_would_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ConfigStore.instance().repo
    entries = {group: list(options) for group, options in store.items() if type(options) is dict}

    def compose_one(number: int) -> object:
        if number % 4 == 1:
            with pytest.raises(ConfigError, match="sede"):
                compose(["sede=3"])
        if number % 4 == 2:  # what this thread may read, no other may
            return compose(["name=${oc.env:CANARY}", "security.environment=[CANARY]"]).name
        if number % 4 == 3:
            with pytest.raises(SecurityError, match="CANARY"):
                compose(["name=${oc.env:CANARY}"])
        return compose([f"seed={number}", "data=cancer"]).seed

    monkeypatch.setenv("CANARY", "canary_of_threads")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        stack.enter_context(hydra.initialize_config_dir(str(tmp_path), version_base="1.2"))
        base = hydra.version.getbase()
        outer = GlobalHydra.instance().hydra
        expected = [0, 1, "canary_of_threads", 3, 4, 5, "canary_of_threads", 7]
        assert list(pool.map(compose_one, range(8))) == expected
        assert GlobalHydra.instance().hydra is outer
        assert hydra.version.getbase() == base
        assert hydra.compose("other").a == 1
    assert not GlobalHydra.instance().is_initialized()
    assert ConfigStore.instance().repo is store
    assert all(list(store[group]) == options for group, options in entries.items())
    assert secrets.permitted_variables() == []


MAIN = """
import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from runner import compose

@hydra.main(config_path=".", config_name="other", version_base="1.2")
def main(config):
    before = GlobalHydra.instance().hydra, HydraConfig.get(), hydra.version.getbase()
    assert compose(["seed=4"]).seed == 4
    try:
        compose(["sede=4"])
    except Exception as error:
        assert "sede" in str(error)
    assert before[0] is GlobalHydra.instance().hydra and before[2] is hydra.version.getbase()
    assert HydraConfig.get() == before[1] and HydraConfig.get().job.name == "mine"
    assert hydra.compose("other", ["a=7"]).a == config.a == 7
    print("left alone")

main()
"""


def test_composing_in_a_job_of_another_hydra_application_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "mine.py").write_text(MAIN)
    done = runs.python("mine.py", "a=7", folder=tmp_path)
    assert done.stdout == "left alone\n", done.stderr


def test_two_runs_of_the_same_second_have_different_folders() -> None:
    folders = {compose_raw([], hydra_too=True).hydra.run.dir for _ in range(2)}
    assert len(folders) == 2
    config = compose_raw([], hydra_too=True)
    assert config.hydra.run.dir == config.hydra.run.dir, "but one run has one"


def test_optimizers_offered_by_name_are_in_torch() -> None:
    import torch

    assert all(hasattr(torch.optim, name) for name in TORCH_OPTIMIZERS)


def test_the_public_names_are_these() -> None:
    assert sorted(runner.__all__) == [
        "Components", "Evidence", "Hook", "Memory", "RunConfig", "Stability", "Summary",
        "Technique", "Trained", "Verdict", "__version__", "benchmark_optimizations", "build",
        "check_model", "compare",
        "compose", "create_training_pipeline", "debug_operation", "debugger", "evaluate", "load",
        "optimize", "optimize_model", "optimize_training_loop", "profile", "profile_model",
        "safe_inference", "sanitise", "show_comparison", "system_info", "train", "train_step",
        "validate_inputs",
    ]  # fmt: skip
    assert all(getattr(runner, name) is not None for name in runner.__all__)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = runner.nothing_such


@pytest.mark.parametrize(
    "code",
    [
        "import runner, sys; runner.compose; assert 'torch' not in sys.modules",
        "import runner.core.build.build; from runner import build; assert callable(build), build",
        pytest.param(
            "import runner.errors, runner.core.errors as core; assert runner.errors is core",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_importing_the_package(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=CONF.parent, check=True)


@pytest.mark.parametrize(
    ("group", "key", "value", "error", "says"),
    [
        ("training", "steps", -4, ConfigError, "training.steps"),
        ("model", "width", 0, ConfigError, "model.width"),
        ("optimization", "extra", ["mine.Own"], SecurityError, "mine.Own is refused"),
    ],
)
def test_a_value_that_a_program_sets_is_checked_by_build(
    group: str, key: str, value: object, error: type[Exception], says: str
) -> None:
    config = compose(["data=cancer"])
    setattr(getattr(config, group), key, value)
    with pytest.raises(error, match=says):
        runner.build(config)


def test_the_caller_s_own_technique_objects_need_no_trust() -> None:
    config = compose(["data=cancer"])
    config.optimization.extra = ["mine.Own"]
    validate_config(config, user_techniques=["mine.Own"])


@pytest.mark.parametrize(
    ("call", "argument", "says"),
    [
        (runner.build, ["seed=3"], "build: config must come from compose.*, got list"),
        (compose, "training.steps=3", "compose: overrides must be a list, got a string; use"),
        (compose, [3], "compose: overrides must be a list of strings"),
        (typed, OmegaConf.create({"a": 1}), "config: is not a run config"),
        (runner.train, OmegaConf.create(), "train: takes a run, not a DictConfig: with bu"),
        (runner.evaluate, [], "evaluate: takes a run, not a list"),
    ],
)
def test_a_wrong_argument_is_one_line(call: Callable[[Any], Any], argument: Any, says: str) -> None:
    with pytest.raises(UsageError, match=f"^{says}"):
        call(argument)


def test_a_folder_may_be_a_text(tmp_path: Path) -> None:
    with runner.build(compose(["data=cancer", "training.steps=2"]), str(tmp_path / "run")) as run:
        assert run.folder == tmp_path / "run"


@pytest.mark.parametrize(
    "typed",
    [
        ["training.steps=7", "optimizer.lr=0.1"],
        ["data=stdlib_text", "model=gpt", "model.width=16", "~experiment"],
        ["experiment=digits_cnn", "optimization=ultra", "optimization.amp.enabled=false"],
        ["hydra/launcher=basic", "+model.arguments.width=5", "model._target_=torch.nn.Linear"],
    ],
)
def test_what_the_tests_compose_is_what_hydra_composes(typed: list[str]) -> None:
    ours = [OmegaConf.to_yaml(compose_raw(typed, hydra_too=True)) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, original in composed.REPLACED:
            patch.setattr(owner, name, original)
        assert ours == [OmegaConf.to_yaml(compose_raw(typed, hydra_too=True))] * 2


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        (["optimizer.options={}"], {}),
        (["optimizer.options={momentum: 0.5}"], {"momentum": 0.5}),
        (["++optimizer.options={momentum: 0.5}"], {"momentum": 0.5}),
        (["optimizer.options={dampening: 0.1, x: {y: [1, null]}}"],
         {"dampening": 0.1, "x": {"y": [1, None]}}),
        (["optimizer.options={}", "+optimizer.options.momentum=0.5"], {"momentum": 0.5}),
        (["optimizer.options.momentum=0.5"], {"momentum": 0.5, "nesterov": True}),
        (["+optimizer.options={dampening: 0}"],
         {"momentum": 0.9, "nesterov": True, "dampening": 0}),
        (["~optimizer.options.nesterov"], {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_a_typed_mapping_replaces_the_option_s_and_a_dotted_key_changes_one_entry(
    typed: list[str], options: dict[str, object]
) -> None:
    assert compose(["optimizer=sgd", *typed]).optimizer.options == options


def test_a_typed_mapping_replaces_the_arguments_of_a_class_and_keeps_its_types() -> None:
    net = ["model._target_=torch.nn.Linear", "+model.out_features=3"]
    assert compose([*net, "model.arguments={bias: false}"]).model.arguments == {"bias": False}
    table = ["data=tabular", "data.path=a.csv", "data.target=y"]
    with pytest.raises(ConfigError, match="expected one of"):
        compose([*table, "data.types={a: numbr}"])
