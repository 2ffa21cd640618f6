"""Configs of other people: nothing hostile runs or is imported, nothing ordinary is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from runner import compose
from runner.cli.arguments import read_arguments
from runner.cli.preflight import Request, check
from runner.core.config.composing import compose_raw
from runner.core.config.groups import CONF
from runner.core.errors import ConfigError, RunnerError, SecurityError
from runner.core.schemas.security import SecurityConfig
from runner.core.security.config_files import check_security_group
from runner.scale.sweep.cluster_launchers import adapt_launcher
from tests.core.security.files.judging import TRAP, hostile_configs, set_traps

OF_OURS = ("runner", "hydra", "omegaconf", "antlr4", "yaml", "packaging", "numpy", "psutil")
EXPERIMENT = "# @package _global_\n"
PRIMARY = """defaults: [/schema@_here_: run, {{/schema/data@data: digits}},
  {{/schema/model@model: mlp}}, {}_self_]
"""
CHOSEN = ["--config-dir=theirs", "experiment=own"]
TRUSTED = "security.trusted=[my_package]"
REFERENCES = [f"${{optimizer.options.a{i}}}" for i in range(8)]
GROWING = "".join(f"    a{i + 1}: '{one * 12}'\n" for i, one in enumerate(REFERENCES))
TREES = "".join(f"    a{i + 1}:\n" + f"    - {one}\n" * 12 for i, one in enumerate(REFERENCES))
BASE_60 = ("1:1:1", "1:20:30.5", "-1:30", "[2, 10:30]")
BOMBS = {
    "references to text": f"optimizer:\n  options:\n    a0: {'x' * 40}\n{GROWING}",
    "references to lists": f"optimizer:\n  options:\n    a0: [1, 2]\n{TREES}",
    "a deep list": f"optimizer: {{options: {{a: {'[' * 500}{']' * 500}}}}}",
    "a long value": f"name: {'x' * 70_000}",
}
ORDINARY: dict[str, list[str]] = {
    "nothing": [],
    "keys": ["training.steps=3", "optimizer.lr=0.01", "model.width=32", "seed=7"],
    "groups": ["data=cancer", "optimizer=sgd", "schedule=constant", "optimization=none"],
    "strict": ["security=strict", "hydra.run.dir=outputs/mine"],
    "a sweep": ["-m", "optimization=none,basic", "seed=range(0,3)", "optimizer=glob(*)"],
    "another launcher": ["-m", "seed=0,1", "hydra/launcher=basic", "hydra.verbose=true"],
    "jobs at a time": ["-m", "seed=0,1", "hydra.launcher.jobs=2", "hydra.sweep.dir=/tmp/s"],
    "a place of one's own": ["hydra.run.dir='/tmp/mine/${name}/${seed}'"],
    "Hydra's log": ["hydra/job_logging=default", "hydra/hydra_logging=default"],
    "a class of torch": ["model._target_=torch.nn.modules.linear.Linear", "+model.in_features=64",
                         "+model.out_features=10"],
    "a function of torch": ["objective._target_=torch.nn.functional.mse_loss"],
    "classes within classes": ["model._target_=my_package.Net", TRUSTED,
                               "+model.head={_target_:torch.nn.ReLU}"],
    "to be shown": ["--cfg", "hydra"],
    "no gate": ["security=off", "model._target_=my_package.Net"],
}  # fmt: skip
ORDINARY_FILES: dict[str, tuple[str, list[str]]] = {
    "an experiment": ("defaults: [{override /data: cancer}]\ntraining: {steps: 20}\nname: own", []),
    "a level and limits": ("security: {level: strict, limits: {hours: 1}}", []),
    "an option of Hydra's": ("defaults: [{override /hydra/job_logging: none}]", []),
    "references": ("training: {steps: 20}\nname: 'run-${training.steps}'", []),
    "Hydra's values": ("defaults: [{override /data: tabular}]\ndata: {target: y, "
                       "path: '${hydra:runtime.cwd}/${hydra:job.num}.csv'}", ["-m", "seed=0,1"]),
    "one's own class": ("model: {_target_: my_package.Net, arguments: {width: 8}}", [TRUSTED]),
    "a class by reference": ("optimizer: {options: {n: torch.nn.Linear}}\n"
                             "model: {_target_: '${optimizer.options.n}'}", []),
    "a partial": ("model: {_target_: torch.nn.Linear, arguments: {f: {_target_: torch.nn.ReLU, "
                  "_partial_: true}, g: {_target_: torch.nn.Linear, _args_: [1, 2]}}}", []),
    "places": ("hydra: {run: {dir: 'outputs/own/${name}'}, output_subdir: saved}", []),
    "a sweep": ("hydra: {sweep: {dir: outputs/s, subdir: 'j${hydra.job.num}'}, "
                "sweeper: {params: {seed: '0,1'}}}", ["-m"]),
    "colons in no number": ("name: 'a-1'\ntraining: {steps: 2}  # 1:1:1", []),
    "arms": ("defaults: [{override /job: benchmark}]\nbenchmark: {arms: [none, basic]}", []),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Every config's own imports are done, so that those that one asks for can be seen."""
    check(read_arguments(["job=train"]))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, a package that says so when it is imported, and a link that leads out."""
    here = tmp_path / "here"
    (here / "outputs").mkdir(parents=True)
    (here / "evil_pkg.py").write_text(TRAP.format(marker=str(tmp_path / "ran")))
    (here / "outputs" / "link").symlink_to(tmp_path)
    monkeypatch.syspath_prepend(set_traps(tmp_path))
    monkeypatch.chdir(here)
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # for jobs that other launchers start
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield here
    assert not [name for name in sys.modules if name.startswith("evil_pkg")]
    assert not list(tmp_path.glob("**/ran*"))


def ask(typed: list[str], files: Mapping[str, str] | None = None) -> Request:
    for name, text in (files or {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return check(read_arguments(typed))


def ask_file(body: str, *typed: str) -> Request:
    return ask([*CHOSEN, *typed], {"theirs/experiment/own.yaml": EXPERIMENT + body + "\n"})


@pytest.mark.filterwarnings("ignore::UserWarning")  # Hydra's, about names of schemas
@pytest.mark.parametrize("case", hostile_configs(), ids=lambda case: case["name"])
def test_a_hostile_config_is_refused_without_an_import(case: dict[str, Any], folder: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(RunnerError) as refused:
        ask(case["typed"], case["files"])
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not imported - set(OF_OURS) - set(sys.stdlib_module_names)
    message = str(refused.value)
    assert case["says"] in message and "\n" not in message
    assert refused.value.exit_code == case.get("code", 3)
    left = {path.name for path in folder.iterdir()} - {"theirs", "outputs", "evil_pkg.py"}
    assert not left


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_a_config_that_grows_is_refused(body: str) -> None:
    with pytest.raises(SecurityError):
        ask_file(body)


@pytest.mark.parametrize("typed", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_command_line_passes(typed: list[str]) -> None:
    assert ask(typed).arguments is not None


@pytest.mark.parametrize(("body", "typed"), ORDINARY_FILES.values(), ids=ORDINARY_FILES)
def test_an_ordinary_file_passes(body: str, typed: list[str]) -> None:
    Path("0.csv").touch()
    assert ask_file(body, *typed).arguments is not None


def test_groups_search_paths_and_whole_configs_of_one_s_own_pass() -> None:
    ask(["--config-dir=mine", "optimizer=fast"], {"mine/optimizer/fast.yaml": "# fast\nlr: 0.5\n"})
    own = {"mine/experiment/own.yaml": EXPERIMENT + "seed: 5\n"}
    ask(["hydra.searchpath=[file://mine]", "experiment=own"], own)
    ask(["--config-path=mine"], {"mine/config.yaml": PRIMARY.format("") + "seed: 9\n"})


def test_values_of_hydra_are_there_where_a_config_is_checked_and_composed() -> None:
    path = "'${hydra:runtime.cwd}/x.csv'"
    config: Any = compose(["data=tabular", "data.target=y", f"data.path={path}"])
    assert str(config.data.path) == str(Path.cwd() / "x.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# @package _global_ : foo\n", "own.yaml: its first line is not a valid header"),
        ("# @package _global_\ndefaults: [null]\n", "Unsupported type in defaults"),
        ("# @package _global_\nhydra:\n", "own.yaml: Hydra cannot compose it"),
        ("# @package _global_\ndefaults: 5\n", "must be a list .*; fix the defaults list"),
        ("# @package _global_\nseed: 0x_\n", "own.yaml: has a value that cannot be read"),
        ("# @package _global_\n5\n", "own.yaml: is not a mapping"),
        ("# @package _global_\nname: a\nname: b\n", "own.yaml: .*duplicate key name at line 3"),
        ("name: !!python/object/apply:os.mkdir [ran]\n", "could not determine a constructor"),
        *((f"x: {n}\n", r"own\.yaml:\d+.* base 60; quote it") for n in BASE_60),
    ],
)
def test_a_file_that_hydra_cannot_read_is_a_plain_mistake(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(CHOSEN, {"theirs/experiment/own.yaml": text})


def test_a_config_that_is_composed_later_is_checked_too(folder: Path) -> None:
    """A job that a glob names, an arm, what Hydra's own help needs."""
    text = "hydra: {hydra_logging: {handlers: {x: {'()': os.mkdir, path: ran}}}}\n"
    files = ask([], {"theirs/experiment/own.yaml": EXPERIMENT + text}).files
    theirs = [folder / "theirs"]
    (source,) = [s for s in Plugins.instance().discover(ConfigSource) if s.scheme() == "file"]
    read = source.load_config
    with files.at_work():
        compose_raw(["seed=3"], folders=theirs)
        with pytest.raises(SecurityError, match="is refused: a config file may set plain"):
            compose_raw(["experiment=own"], folders=theirs)
        with pytest.raises(SecurityError, match=r"security\.trusted: \[mine\] is refused"):
            compose_raw(["security.trusted=[mine]"])
        with pytest.raises(SecurityError, match=r"security\.level: off is refused"):
            compose_raw(["security=off"])
        checked = OmegaConf.to_container(compose_raw([], hydra_too=True), resolve=False)
    unchecked: Any = OmegaConf.to_container(compose_raw([], hydra_too=True), resolve=False)
    assert source.load_config is read and unchecked == checked


MINE = {"mine/optimizer/sgd.yaml": "name: SGD\nlr: 0.777\n"}


@pytest.mark.parametrize("where", ["--config-dir=mine", "hydra.searchpath=[file://mine]"])
def test_a_user_s_option_wins_over_ours_of_that_name_and_a_note_says_so(where: str) -> None:
    request = ask([where, "optimizer=sgd"], MINE)
    assert request.config is not None and request.config.optimizer.lr == 0.777
    assert request.config.optimizer.options == {}
    (note,) = request.notes
    assert note.startswith("optimizer=sgd: mine/optimizer/sgd.yaml replaces the runner's option")
    assert not ask([where, "optimizer=adam"]).notes  # it is not used


def test_a_user_s_option_wins_in_python_and_in_the_jobs_of_a_sweep(folder: Path) -> None:
    request = ask(["--config-dir=mine", "-m", "optimizer=sgd,adam"], MINE)
    assert request.session is not None and len(request.notes) == 1
    path = f"hydra.searchpath=[file://{folder / 'mine'}]"
    assert compose([path, "optimizer=sgd"]).optimizer.lr == 0.777
    ask([], {"mine/security/standard.yaml": "limits: {hours: 1}"})
    with pytest.raises(SecurityError, match="security/standard.yaml is a file of the runner"):
        compose([path])


def test_a_folder_that_links_to_our_options_replaces_none(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "optimizer").symlink_to(CONF / "optimizer")
    (folder / "mine" / "security").symlink_to(CONF / "security")
    assert not ask(["--config-dir=mine", "optimizer=sgd"]).notes


def test_an_option_whose_defaults_name_itself_is_a_plain_mistake() -> None:
    text = "defaults: [sgd, _self_]\nlr: 0.777\n"
    with pytest.raises(ConfigError, match="must not lead back to its own file"):
        ask(["--config-dir=mine", "optimizer=sgd"], {"mine/optimizer/sgd.yaml": text})


@pytest.mark.parametrize("group", ["launcher", "job_logging", "hydra_logging"])
@pytest.mark.parametrize("key", ["override /hydra/{}", "/hydra/{}", "override  hydra/{}"])
def test_an_option_of_hydra_that_no_file_can_choose_is_to_be_typed(group: str, key: str) -> None:
    body = f"defaults: [{{{key.format(group)}: basic}}]"
    with pytest.raises(ConfigError, match=f"hydra/{group}: basic .* type hydra/{group}=basic"):
        ask_file(body)


def test_an_option_of_hydra_in_a_file_is_accepted_if_it_is_also_typed() -> None:
    request = ask_file("defaults: [{override /hydra/launcher: basic}]", "hydra/launcher=basic")
    assert request.config is not None
    assert request.config.hydra.launcher._target_.endswith("BasicLauncher")
    searches = ask_file("defaults: [{override /hydra/sweeper: search}]").config
    assert searches is not None and "search" in searches.hydra.sweeper._target_.casefold()


def test_a_primary_config_may_choose_the_launcher() -> None:
    text = PRIMARY.format("{override hydra/launcher: basic}, ")
    request = ask(["--config-path=mine"], {"mine/config.yaml": text})
    assert request.config is not None
    assert request.config.hydra.launcher._target_.endswith("BasicLauncher")


@pytest.mark.parametrize(
    "group", [{"level": "off"}, {"trusted": ["mine"]}, {"pinned": ["a" * 64]}, {"level": "${name}"}]
)
def test_a_job_whose_security_is_not_what_was_typed_is_refused(group: dict[str, object]) -> None:
    config = OmegaConf.create({"security": {"level": "standard", **group}})
    with pytest.raises(SecurityError, match="security"):
        check_security_group(config, SecurityConfig())


def test_with_security_off_any_name_passes_and_places_and_sizes_are_checked() -> None:
    off = "security=off"
    assert ask_file("hydra: {callbacks: {x: {_target_: evil_pkg.Payload}}}", off).cli_overrides.off
    for body in ("hydra: {run: {dir: ../ran}}", "optimizer: {options: {a: &x {}, b: *x}}"):
        with pytest.raises(SecurityError):
            ask_file(body, off)


def test_the_run_says_which_packages_are_trusted() -> None:
    assert ask(["security.trusted=[mine]"]).notes == ["security.trusted: code of mine may run"]


def test_jobs_that_other_launchers_start_do_not_look_into_the_current_folder(folder: Path) -> None:
    adapt_launcher("joblib")
    code = "import sys; print([p for p in sys.path if p in ('', sys.argv[1])])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=folder
    )
    assert done.stdout == "[]\n", done.stderr
