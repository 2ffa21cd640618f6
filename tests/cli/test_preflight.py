"""Mistakes on the command line: one line, the nearest valid name, nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.cli import typos
from runner.core.config.aliases import KEY_ALIASES, VALUE_ALIASES
from runner.core.config.groups import group_options
from runner.core.config.spelling import sample_jobs
from runner.core.errors import CheckpointError, ConfigError, RunnerError, SecurityError, UsageError
from tests.runs import checked as ask

pytestmark = pytest.mark.usefixtures("folder")
TRUSTED = "security.trusted=[my_package]"
NET = "model._target_=my_package.Net"
MISSING = ["data=tabular", "data.path=flows.csv", "data.target=label"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("optimisation.amp.enabled=true", "did you mean optimization.amp.enabled=true?"),
        ("optimization=ulrta", "optimization: no option 'ulrta'; did you mean optimization=ultra?"),
        ("optimizer=radam", "did you mean optimizer.name=RAdam?"),
        ("model=[mlp,cnn]", "did you mean -m model=mlp,cnn?"),
        ("sede=3", "no config group or key 'sede'; did you mean seed=3?"),
        ("training.stpes=3", "no key 'stpes' in training; did you mean training.steps=3?"),
        ("data.target=y", "no key 'target' in data=digits; data=tabular|text|arrays has it"),
        ("training.steps.more=3", "training.steps is a value and has no keys"),
        (
            "optimization.amp=true",
            "must be keys and their values, got True; set one, as optimization.amp.enabled=true",
        ),
        ("optimizer.groups=[[1]]", "in quotes: 'optimizer.groups=[{key: value}]'"),
        ("stability.recovery=[{action:skip}]", "and stability.rollback_lr_factor say what follows"),
        ("optimization.strict=3.5", "optimization.strict: must be true or false, got '3.5'"),
        (
            "device.kind=gpu",
            "device.kind: Invalid value 'gpu', expected one of [auto, cpu, cuda, mps]",
        ),
        ("optimizer.groups=[3]", "optimizer.groups: its items must be keys with values"),
        ("debug.hooks={}", "debug.hooks: must be a list, [a,b] or [{key: value}], got keys"),
        ("seed=null", "seed: field 'seed' is not Optional"),
        ("seed=0,1,2", "names several values; to run one after the other: -m seed=0,1,2"),
        ("device.affinity=0,1", "-m device.affinity=0,1; for a list: device.affinity=[0,1]"),
        ("training.steps", "training.steps: gives no value; write training.steps="),
        ("name=a b=c", "cannot be read"),
        ("optimizer.options.amsgrad=true", "add it: +optimizer.options.amsgrad=true"),
        ("hydra.run.dirr=x", "did you mean hydra.run.dir=x?"),
        (
            "predict.tokens=5",
            "predict.tokens: is for job=predict; add job=predict, or leave it out",
        ),
        ("++benchmark.budget_s=3", "benchmark.budget_s: is for job=benchmark; add"),
        ("evaluate.export=onnx", "evaluate.export: needs a trained model; train first"),
        ("--config-name=mine", "--config-name: there is no config 'mine'; --config-dir=FOLDER"),
        ("+model.width=64", "drop the +: model.width=64"),
        ("+model.wdith=64", "no key 'wdith' in model=mlp; did you mean model.width=64?"),
        ("model.weights=conf/w.pt", "model.weights: conf/w.pt does not exist, nor does its folder"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(typed: str, says: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        ask("seed=1" if typed.partition("=")[0] != "seed" else "name=x", typed)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("device=gpu", "device=cuda"),
        ("device=cuda:1", "device=cuda device.index=1"),
        ("+trainer.max_epochs=3", "training.epochs=3"),
        ("precision=bf16", "optimization.amp.enabled=true optimization.amp.dtype=bf16"),
        ("optimizer.betas=[0.9,0.95]", "+optimizer.options.betas=[0.9,0.95]"),
        ("optimizer.momentum=0.8", "optimizer=sgd optimizer.options.momentum=0.8"),
        ("model=resnet18",
         "model._target_=torchvision.models.resnet18 security.trusted=[torchvision]"),
        ("data.batch_size=2,4", "-m training.batch_size=2,4"),
        ("data=my.csv", "data=tabular data.path=my.csv"),
        ("optimizer.type=adam", "optimizer=adam"),
        ("scheduler=CosineAnnealingLR", "schedule=cosine"),
        ("debug=true", "debug=full"),
        ("model=gpt2", "data=stdlib_text model=gpt"),
        ("enable_amp=true", "optimization.amp.enabled=true"),
        ("fp16=true", "optimization.amp.enabled=true optimization.amp.dtype=fp16"),
        ("use_gradient_checkpointing=true", "optimization.recompute.enabled=true"),
        ("trainer.use_torch_compile=true", "optimization.compile.enabled=true"),
        ("allow_tf32=true", "optimization.tf32.enabled=true"),
        ("gradient_accumulation_steps=8", "training.micro_batch=4"),
        ("num_gpus=2", "distributed=ddp distributed.processes=2"),
        ("+trainer.devices=4", "distributed=ddp distributed.processes=4"),
        ("gpus=1", "device=cuda"),
        ("strategy=fsdp", "distributed=fsdp"),
        ("no_cuda=true", "device=cpu"),
        ("save_total_limit=2", "checkpoint.keep=2"),
        ("greater_is_better=false", "training.monitor_mode=min"),
        ("detect_anomaly=true", "debug=anomaly"),
        ("report_to=wandb", "monitoring.sinks=[wandb]"),
        ("ema_decay=0.99", "optimizer.ema=0.99"),
    ],
)  # fmt: skip
def test_what_other_programs_call_it_is_answered_with_what_composes(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(typed)
    assert f"did you mean {meant}?" in str(refused.value)
    if "my.csv" not in meant:  # which does not exist
        ask(*meant.split())


def test_gradient_accumulation_is_a_micro_batch_by_the_batch_size(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean training\.micro_batch=8\?"):
        ask("gradient_accumulation_steps=16", "training.batch_size=128")
    (folder / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ntraining: {batch_size: 96}\naccumulate_grad_batches: 4\n"
    (folder / "mine" / "experiment" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"did you mean training\.micro_batch=24\?"):
        ask("-cd", "mine", "experiment=own")


def test_each_equivalent_of_another_programs_name_exists(folder: Path) -> None:
    groups = group_options()
    for target in KEY_ALIASES:
        for key in target.replace("+", "").split():
            assert key.startswith("hydra.") or not _unknown_names(key.partition("=")[0], groups)
    templates = {text for values in VALUE_ALIASES.values() for text in values.values()}
    for template in templates:
        ask(*template.format(value=2, micro_batch=4).split())


def _unknown_names(key: str, groups: dict[str, dict[str, str]]) -> list[str]:
    return typos._first_unknown_part(key.split("."), groups)[1]


def test_an_option_of_the_users_folder_precedes_another_word_for_ours(folder: Path) -> None:
    (folder / "mine" / "debug").mkdir(parents=True)
    (folder / "mine" / "debug" / "profiling.yaml").write_text("anomaly:\n  every: 7\n")
    assert ask("-cd", "mine", "debug=profiling").arguments[-1] == "debug=profiling"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("gpus=[0,1]", "distributed.processes is the number of devices that train one model"),
        ("gradient_accumulation_steps=7", "training.micro_batch those of one pass"),
        ("logger=wandb", "metrics.jsonl, summary.json and TensorBoard"),
        ("optimization=none,basic", "to run one after the other: -m optimization=none,basic"),
        ("optimization=none,bsic", "no option 'bsic'; did you mean optimization=basic?"),
        ("trainer.foo=1", "training has steps, epochs, batch_size"),
        ("schedule._target_=mine.Sched", "in schedule; a scheduler of your own is called from Py"),
        ("+training._target_=mine.Loop", "in training; data, model, objective and optimizer have"),
        ("schedule.qqq=1", "in schedule; use one of kind, warmup, floor, every, gamma"),
        ("model.qqq=1", "in model=mlp; use one of weights"),
        ("hydra/launcher=joblib", "pip install hydra-joblib-launcher"),
        ("data=cifar10", "your own data: data=tabular|images|arrays|text data.path=…"),
    ],
)
def test_a_missing_name_is_answered_with_the_available_ones(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        ask(typed)
    assert "=[none" not in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["# @package _global_", "training: {stpes: 3}"], "did you mean training.steps=3?"),
        (["# mine", "# @package _global_", "seed: 3"], "lacks `# @package _global_` as its first"),
        (["# @package _global_", "trainer: {max_epochs: 3}"], "did you mean training.epochs=3?"),
        (["# @package _global_", "training: {steps: many}"], "steps: must be a whole number, got"),
        (["# @package _global_", "optimizer.lr: 0.1"], "Key 'optimizer.lr' not in 'RunConfig'"),
        (["# @package _global_", "optimization: basic"], "write `override /optimization: basic`"),
        (["# @package _global_", "defaults: [override /optimization: bsic]"],
         "no option 'bsic'; did you mean optimization=basic?"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_own_experiment_names_the_file_the_key_and_the_fix(
    lines: list[str], says: str, folder: Path
) -> None:
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "own.yaml").write_text("\n".join([*lines, ""]))
    where = ["hydra.searchpath=[file://mine]"] if "lacks" in says else ["-cd", "mine"]
    with pytest.raises(ConfigError) as refused:
        ask(*where, "experiment=own")
    assert str(refused.value).startswith("mine/experiment/own.yaml: ")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("typed", "error", "says"),
    [
        (
            [*MISSING, "data.validation=abc"],
            ConfigError,
            r"data\.validation: must be a number, got 'abc'",
        ),
        ([*MISSING, "data.path.more=1"], ConfigError, r"data\.path is a value and has no keys"),
        (
            ["-m", "optimization=none,bsic", "seed=0,1"],
            ConfigError,
            "optimization: no option 'bsic'",
        ),
        (["-m", "training.stpes=1,2", "data=cancer"], ConfigError, "did you mean training.steps=1"),
        (["-m", "seed=0,1", "verify.steps=5"], ConfigError, "verify.steps: is for job=verify"),
        (["-m", "data=tabular", "seed=0,1"], ConfigError, "data.path: has no value"),
        (["-m", "training.steps=1,x"], ConfigError, "must be a whole number"),
        (
            ["-m", "seed=range(0,-3)"],
            ConfigError,
            "range.0,-3. has no value; a range excludes its end",
        ),
        (["--epochs", "3"], UsageError, "key=value, without dashes: training.epochs=…"),
        (["--batch-size", "8"], UsageError, "without dashes: training.batch_size=…"),
        (["--cfg", "nothing"], UsageError, "job"),
        (["-m", "--cfg", "job"], UsageError, "remove -m"),
        (["--cfg", "job", "data=tabulra"], ConfigError, "did you mean data=tabular"),
        (["--experimental-rerun", "x.pickle"], SecurityError, "unpickles"),
        (["-cd", "nowhere"], UsageError, "there is no folder nowhere"),
        ([NET], SecurityError, r"security\.trusted=\[my_package\]"),
        ([NET, TRUSTED, "model.width=64"], ConfigError, r"write \+model\.width=64"),
        (["model._target_=null", "+model.width=64"], ConfigError, "drop the"),
    ],
)
def test_flags_that_cannot_be_met_say_why(
    typed: list[str], error: type[RunnerError], says: str, folder: Path
) -> None:
    with pytest.raises(error, match=says):
        ask(*typed)
    assert not list(folder.iterdir())


def test_weights_that_are_not_there_are_missed_at_once_where_they_are_to_be_read(
    folder: Path,
) -> None:
    (folder / "good.pt").write_bytes(b"")
    for typed in (["model.weights=god.pt"], ["-m", "model.weights=god.pt", "seed=0,1"]):
        with pytest.raises(
            ConfigError, match=r"^model\.weights: god.pt does not .* mean 'good.pt'"
        ):
            ask(*typed)
    (folder / "run" / "checkpoints" / "step_00000012").mkdir(parents=True)
    ask("model.weights=god.pt", "checkpoint.resume=run")  # which does without
    with pytest.raises(CheckpointError, match=r"no folder good.pt.*: model\.weights=good\.pt"):
        ask("checkpoint.resume=good.pt")


def test_a_swept_key_of_a_file_is_named_though_hydras_own_mapping_is_null(folder: Path) -> None:
    (folder / "theirs" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {sweeper: {params: {optimiser.lr: '0.1,0.2'}}}\n"
    (folder / "theirs" / "experiment" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.yaml: hydra\.sweeper\.params\.optimiser"):
        ask("--config-dir=theirs", "experiment=own", "-m", "seed=wrong,2")


@pytest.mark.parametrize("search", [(), ("hydra/sweeper=search",)])
def test_keys_and_values_that_a_file_sweeps_are_checked_before_there_is_a_folder(
    search: tuple[str, ...], folder: Path
) -> None:
    (folder / "theirs").mkdir()
    for swept, says in (
        ("optimzer.lr: '0.1,0.2'", "optimzer.lr: .* mean optimizer.lr=0.1"),
        ("optimizer.lr: '0.1,high'", "optimizer.lr: must be a number, got 'high'"),
    ):
        text = f"defaults: [config, _self_]\nhydra: {{sweeper: {{params: {{{swept}}}}}}}\n"
        (folder / "theirs" / "own.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            ask("--config-dir=theirs", "--config-name=own", *search, "-m")
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    "typed", [["data.path=hauses.csv"], ["-m", "data.path=hauses.csv", "seed=0,1"]]
)
def test_a_data_file_that_is_missing_is_reported_at_once(typed: list[str], folder: Path) -> None:
    (folder / "houses.csv").write_text("size,price\n1,2\n")
    table = "data=tabular", "data.target=price"
    with pytest.raises(ConfigError, match=r"^data\.path: hauses.csv does .* mean 'houses.csv'"):
        ask(*table, *typed)
    ask(*table, *typed, "job=doctor")  # which reads no data


def test_a_target_without_a_value_is_reported_with_the_header(folder: Path) -> None:
    (folder / "houses.csv").write_text("size,price\x1b\n1,2\n")
    with pytest.raises(ConfigError, match=r"^data\.target: has no value; .* is: size,price\\x1b$"):
        ask("data=tabular", "data.path=houses.csv")


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("flags", [[], ["-m", "seed=0,1"], ["job=benchmark"]])
def test_the_label_of_a_level_typed_as_a_key_is_refused(sign: str, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="optimization.level: .*write optimization=ultra"):
        ask(*flags, f"{sign}optimization.level=ultra")


def test_each_value_of_a_sweep_is_looked_at() -> None:
    assert sample_jobs(["a=1,2", "b=x", "c=range(1,4)"]) == [
        ["b=x", "a=1", "c=1"], ["b=x", "a=2", "c=1"], ["b=x", "a=1", "c=2"], ["b=x", "a=1", "c=3"],
    ]  # fmt: skip
    assert sample_jobs(["optimization=glob(*)", "seed=1"]) == [["seed=1"]]
    assert len(sample_jobs(["seed=range(0,1000000)"])) < 100


@pytest.mark.parametrize(
    ("typed", "handed"),
    [
        (["optimization_level=advanced"], ["optimization=advanced"]),
        (["debug_mode=anomaly"], ["debug=anomaly"]),
        (["debug_mode=anomaly_detection"], ["debug=anomaly"]),
        (["debug_mode=Profiling"], ["debug=profile"]),
        (["debug=memory_profiling"], ["debug=memory"]),
        (["debug_mode=GRADIENT_CHECKING"], ["debug=gradients"]),
        (["debug_mode=full_debug"], ["debug=full"]),
        (["debug_mode=None"], ["debug=none"]),
        (["optimization_mode=amp"], ["optimization=amp"]),
        (["optimization_mode=compilation"], ["optimization=compile"]),
        (["optimization_mode=memory_efficient"], ["optimization=memory_efficient"]),
        (["optimization_mode=Full_Optimization"], ["optimization=full"]),
        (["optimization=ULTRA"], ["optimization=ultra"]),
        (["-m", "optimization_mode=ULTRA,compilation"],
         ["--multirun", "optimization=ultra,compile"]),
        (["+experiment=digits_cnn"], ["experiment=digits_cnn"]),
        (["training=long", "training.steps=9"],
         ["training=long", "training.steps=9", "training.epochs=null"]),
        ([NET, TRUSTED, "+model.width=64"], [NET, TRUSTED, "+model.arguments.width=64"]),
        ([NET, TRUSTED, "++model.a.b=[1,2]"], [NET, TRUSTED, "++model.arguments.a.b=[1,2]"]),
        (
            ["data._target_=my_package.D", "data.workers=2", "+data.path=x", TRUSTED],
            ["data._target_=my_package.D", "data.workers=2", "+data.arguments.path=x", TRUSTED],
        ),
        (
            ["objective._target_=my_package.f", "+objective.top_k=2", TRUSTED],
            ["objective._target_=my_package.f", "+objective.arguments.top_k=2", TRUSTED],
        ),
        (
            ["-m", "model._target_=my_package.A,my_package.B", TRUSTED, "+model.width=1,2"],
            ["--multirun", "model._target_=my_package.A,my_package.B", TRUSTED,
             "+model.arguments.width=1,2"],
        ),
    ],
)  # fmt: skip
def test_other_spellings_reach_hydra_as_it_knows_them(typed: list[str], handed: list[str]) -> None:
    assert ask(*typed).arguments == handed


def test_a_foreign_class_from_an_experiment_gets_its_arguments_too(folder: Path) -> None:
    mine = folder / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("# @package _global_\nmodel:\n  _target_: my_package.Net\n")
    handed = ask("-cd", "mine", "experiment=own", "+model.width=3", TRUSTED).arguments
    assert handed == ["--config-dir=mine", "experiment=own", "+model.arguments.width=3", TRUSTED]
    with pytest.raises(ConfigError, match="did you mean experiment=own"):
        ask("-cd", "mine", "experiment=onw")


def test_flags_are_handed_over_wherever_they_were_typed() -> None:
    assert ask("seed=1", "--cfg", "job", "-p", "model", "name=x").arguments == [
        "--cfg=job", "--package=model", "seed=1", "name=x",
    ]  # fmt: skip
    assert ask("--cfg", "job", "data=tabular").arguments == ["--cfg=job", "data=tabular"]
    assert ask(
        "-m", "data=digits,stdlib_text", "model=mlp,gpt"
    ).flags.is_sweep  # some jobs need not run
