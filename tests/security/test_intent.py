"""The door for configs: nothing hostile is done, or imported; nothing ordinary is in its way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from runner.cli.arguments import read_arguments
from runner.cli.preflight import Request, check
from runner.composing import compose_raw
from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityConfig
from runner.security.intent.levels import check_security
from runner.security.intent.whitelist import asked_for
from runner.sweep.job import register_plugins_for_children

from .configs.case import EXPERIMENT, Case
from .configs.hostile import HOSTILE
from .configs.ordinary import ORDINARY

TRAP = "from pathlib import Path\nPath({marker!r}).touch()\nclass Payload: pass\n"
OF_OURS = ("runner", "hydra", "omegaconf", "antlr4", "yaml", "packaging", "numpy")


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What every config needs is there already, so that what one asks for can be seen."""
    check(read_arguments(["job=train"]))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, a package that says so when it is imported, and a link that leads out."""
    traps, here = tmp_path / "traps", tmp_path / "here"
    for place in (traps / "evil_pkg", traps / "hydra_plugins", here / "outputs"):
        place.mkdir(parents=True)
    trap = TRAP.format(marker=str(tmp_path / "ran"))
    (traps / "evil_pkg" / "__init__.py").write_text(trap)
    (here / "evil_pkg.py").write_text(trap)
    (here / "outputs" / "link").symlink_to(tmp_path)
    monkeypatch.syspath_prepend(traps)
    monkeypatch.chdir(here)
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # for jobs that other launchers start
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield here
    assert not [name for name in sys.modules if name.startswith("evil_pkg")]
    assert not list(tmp_path.glob("**/ran*"))


def ask(case: Case, folder: Path) -> Request:
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check(read_arguments(case.typed))


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_a_hostile_config_is_refused_and_nothing_is_imported_for_it(
    case: Case, folder: Path
) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError if case.mistake else SecurityError) as refused:
        ask(case, folder)
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not imported - set(OF_OURS) - set(sys.stdlib_module_names)
    message = str(refused.value)
    assert case.says in message and "\n" not in message
    assert refused.value.exit_code == (2 if case.mistake else 3)
    left = {path.name for path in folder.iterdir()} - {"theirs", "outputs", "evil_pkg.py"}
    assert not left


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case.name)
def test_an_ordinary_config_passes(case: Case, folder: Path) -> None:
    assert ask(case, folder).arguments is not None


def test_there_are_as_many_of_both_as_were_promised() -> None:
    assert len(HOSTILE) >= 60 and len(ORDINARY) >= 25
    assert len({case.name for case in HOSTILE}) == len(HOSTILE)


def test_a_refusal_names_the_file_the_line_and_the_way_out(folder: Path) -> None:
    case = Case(
        "",
        ["--config-dir=theirs", "experiment=own"],
        {"theirs/experiment/own.yaml": "# @package _global_\n\nmodel:\n  _target_: a.B\n"},
    )
    with pytest.raises(SecurityError) as refused:
        ask(case, folder)
    said = str(refused.value)
    assert "own.yaml:4" in said and "a.B" in said and "security.trusted=[a]" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# @package _global_ : foo\n", "own.yaml: its first line is no header"),
        ("# @package\n", "own.yaml: its first line is no header"),
        ("# @package _global_\ndefaults: [null]\n", "Unsupported type in defaults"),
        ("# @package _global_\nhydra:\n", "own.yaml: Hydra cannot compose it.* below hydra"),
        ("# @package _global_\ndefaults: 5\n", "must be a list .*; mend what it names"),
        ("# @package _global_\nname: a\nseed: !!int ''\n", "own.yaml:3: '' cannot be read as int"),
        ("# @package _global_\nseed: 0x_\n", "own.yaml:2: '0x_' cannot be read as int"),
        ("# @package _global_\n5\n", "own.yaml: is no group of settings"),
        ("# @package _global_\nname: a\nname: b\n", "own.yaml: .*duplicate key name at line 3"),
    ],
)
def test_a_file_that_hydra_cannot_read_is_a_plain_mistake(
    folder: Path, text: str, said: str
) -> None:
    case = Case("", ["--config-dir=theirs", "experiment=own"], {"theirs/experiment/own.yaml": text})
    with pytest.raises(ConfigError, match=said):
        ask(case, folder)


def test_a_file_that_changes_after_it_was_checked_is_refused(folder: Path) -> None:
    case = Case(
        "",
        ["--config-dir=mine", "experiment=own"],
        {"mine/experiment/own.yaml": "# @package _global_\nseed: 3\n"},
    )
    reading = ask(case, folder).reading
    path = folder / "mine/experiment/own.yaml"
    assert "seed: 3" in reading.read(str(path))
    path.write_text("# @package _global_\nseed: 4\n")
    with pytest.raises(SecurityError, match="has changed since it was checked"):
        reading.read(str(path))


def test_hydras_own_reader_of_files_is_back_when_it_is_over(folder: Path) -> None:
    (source,) = [s for s in Plugins.instance().discover(ConfigSource) if s.scheme() == "file"]
    before = source.load_config
    check(read_arguments(["seed=1"]))
    assert source.load_config is before


def test_whatever_is_composed_while_the_process_is_at_work_is_looked_at(folder: Path) -> None:
    """What is composed later on: a job that a glob names, an arm, what Hydra's own help needs."""
    text = "hydra: {hydra_logging: {handlers: {x: {'()': os.mkdir, path: ran}}}}\n"
    case = Case("", [], {"theirs/experiment/own.yaml": EXPERIMENT + text})
    reading = ask(case, folder).reading
    theirs = [folder / "theirs"]
    with reading.at_work():
        compose_raw(["seed=3"], folders=theirs)
        with pytest.raises(SecurityError, match="os.mkdir is refused"):
            compose_raw(["experiment=own"], folders=theirs)
        with pytest.raises(SecurityError, match=r"security\.trusted: \[mine\] is refused"):
            compose_raw(["security.trusted=[mine]"])
        with pytest.raises(SecurityError, match=r"security\.level: off is refused"):
            compose_raw(["security=off"])
    assert compose_raw(["experiment=own"], folders=theirs).seed == 0


def test_a_config_is_given_back_as_it_was_composed(folder: Path) -> None:
    before = OmegaConf.to_container(compose_raw([], hydra_too=True), resolve=False)
    with ask(Case("", []), folder).reading.at_work():
        assert OmegaConf.to_container(compose_raw([], hydra_too=True), resolve=False) == before


def test_a_file_that_a_link_stands_for_is_refused(folder: Path) -> None:
    (folder / "theirs/experiment").mkdir(parents=True)
    (folder / "x.yaml").write_text(EXPERIMENT + "seed: 3\n")
    (folder / "theirs/experiment/own.yaml").symlink_to(folder / "x.yaml")
    with pytest.raises(SecurityError, match="a link leads there, out of"):
        check(read_arguments(["--config-dir=theirs", "experiment=own"]))


@pytest.mark.parametrize(
    "found", [{"level": "off"}, {"trusted": ["mine"]}, {"pinned": ["a" * 64]}, {"level": "${name}"}]
)
def test_a_job_whose_security_is_not_what_was_typed_is_refused(found: dict[str, object]) -> None:
    config = OmegaConf.create({"security": {"level": "standard", **found}})
    with pytest.raises(SecurityError, match="security"):
        check_security(config, SecurityConfig())


def test_with_security_off_any_name_passes_and_bounds_and_places_stay(folder: Path) -> None:
    off = ["--config-dir=theirs", "experiment=own", "security=off"]
    named = "hydra: {callbacks: {x: {_target_: evil_pkg.Payload}}}\n"
    for body, error in (
        (named, ""),
        ("hydra: {run: {dir: ../ran}}\n", "hydra.run.dir"),
        ("optimizer: {options: &x {a: *x}}\n", "refers to itself"),
        ("hydra: {job: {env_set: {A: b}}}\n", "env_set"),
    ):
        case = Case("", off, {"theirs/experiment/own.yaml": EXPERIMENT + body})
        if not error:
            assert ask(case, folder).said.off
            continue
        with pytest.raises(SecurityError, match=error):
            ask(case, folder)


def test_what_is_trusted_is_said(folder: Path) -> None:
    assert check(read_arguments(["security.trusted=[mine]"])).notes == [
        "security.trusted: code of mine may run"
    ]


def test_the_same_table_feeds_a_hydra_that_asks_for_a_list() -> None:
    def newer(config_path: str, execution_whitelist: tuple[str, ...] = ()) -> None: ...

    names = asked_for(newer, ["mine"])["execution_whitelist"]
    assert {"torch.nn.Linear", "mine", "mine.*", "logging.FileHandler"} <= set(names)
    assert "hydra_plugins.runner_isolated.launcher.IsolatedLauncher" in names
    assert "os.mkdir" not in names and "torch.nn.*" not in names
    assert asked_for(hydra.main, ["mine"]) == {}


def test_jobs_that_other_launchers_start_do_not_look_into_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_plugins_for_children()
    code = "import sys; print([p for p in sys.path if p in ('', sys.argv[1])])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=folder
    )
    assert done.stdout == "[]\n", done.stderr
