"""A config reads the variables that it may; what is written or shown has their names."""

from __future__ import annotations

import html
import json
import logging
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from rich.text import Text

from runner.cli.arguments import read_arguments
from runner.cli.launch import launch
from runner.cli.preflight import check
from runner.core import masking
from runner.core.config.composing import compose, config_from_plain, typed
from runner.core.config.groups import CONF
from runner.core.config.run_config import WrittenConfig, config_hash
from runner.core.errors import ConfigError, SecurityError
from runner.core.findings import Severity
from runner.core.record import markdown
from runner.core.record.console import facts_table, print_stdout
from runner.core.record.summary import Summary
from runner.core.record.text import escape_control_chars, limit_length, shorten
from runner.core.security import secrets
from runner.core.security.child_process import MaskingState, run_masked
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.policy import FileLimits
from runner.scale.sweep import job_context
from runner.scale.sweep.job_context import parent_death_pipe, take_job_context
from runner.scan.sandbox import Sandbox
from tests import runs

CANARY = "canary-4b1d <&'\"*_>"
OTHER = "canary-nobody-asked-for"
LEAVE = "security.environment=[MY_TOKEN]"
TOKEN = "+optimizer.options.x=${oc.env:MY_TOKEN}"  # noqa: S105  # the key, not the token
PACKAGE = """
import os
import torch

class Net(torch.nn.Module):
    def __init__(self, in_features, classes, token, fail=False):
        super().__init__()
        self.layer = torch.nn.Linear(in_features, classes)
        if token != os.environ["MY_TOKEN"]:
            raise ValueError("it is not the true value")
        if fail:
            raise ValueError(f"cannot log in with {token} ({token!r})")

    def forward(self, x):
        return self.layer(x.flatten(1))

class Rows(torch.utils.data.Dataset):
    def __init__(self, token):
        self.token = token

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() or index > 50:
            raise ValueError("x" * 19_990 + self.token)
        return torch.zeros(4), index % 2
"""


@pytest.fixture(autouse=True)
def variables(nothing_remembered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three variables, nothing remembered from test to test, and an empty folder."""
    monkeypatch.setenv("MY_TOKEN", CANARY)
    monkeypatch.setenv("SHORT", "abc")
    monkeypatch.setenv("OTHER", OTHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


READING = """
${oc.env:MY_TOKEN} ${oc.env:MY_TOKEN,none} ${oc.env:NOT_SET,${oc.env:MY_TOKEN}}
x-${oc.env:MY_TOKEN}-y ${oc.decode:${oc.env:MY_TOKEN}} ${oc.create:{a:${oc.env:MY_TOKEN}}}
${oc.env:${oc.decode:MY_TOKEN}} ${${oc.decode:oc}.env:MY_TOKEN} ${oc.env:MY-TOKEN}
""".split()


@pytest.mark.parametrize("value", READING)
def test_an_environment_variable_without_permission_is_refused_by_name(value: str) -> None:
    with pytest.raises(SecurityError) as refused:
        compose([f"+optimizer.options.x='{value}'", "security.environment=[NOT_SET]"])
    assert refused.value.exit_code == 3
    if "}." in value:  # the name of what resolves it is put together: refused before any of it is
        return
    assert str(refused.value).startswith("optimizer.options.x: ")
    assert CANARY not in str(refused.value)
    if "-TOKEN" not in value:
        assert "security.environment=[MY_TOKEN]" in str(refused.value)


def test_a_refusal_comes_first_and_a_file_gives_itself_no_permission(tmp_path: Path) -> None:
    for typed_in in ([TOKEN], ["-m", "seed=1,2", TOKEN], ["name=${oc.env:MY_TOKEN}"]):
        with pytest.raises(SecurityError, match="MY_TOKEN"):
            check(read_arguments(typed_in))
    assert not list(tmp_path.iterdir())
    for group, text in (
        ("security", "environment: [MY_TOKEN]"),
        ("optimizer", "name: SGD\noptions: {x: '${oc.env:MY_TOKEN}'}"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(f"# own\n{text}\n")
    with pytest.raises(SecurityError):
        check(read_arguments(["--config-dir=conf", "security=own", "optimizer=own"]))


@pytest.mark.parametrize("leave", [LEAVE, "security.environment=MY_TOKEN", "security=off"])
def test_a_variable_that_may_be_read_is_read(leave: str) -> None:
    assert compose([TOKEN, leave]).optimizer.options["x"] == CANARY


def test_a_default_stands_in_for_what_is_not_set_and_a_value_is_not_resolved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def value(text: str, *names: str) -> object:
        permission = f"security.environment=[{','.join(names)}]"
        return compose([f"+optimizer.options.x='{text}'", permission]).optimizer.options["x"]

    assert value("${oc.env:NOT_SET,${oc.env:MY_TOKEN}}", "NOT_SET", "MY_TOKEN") == CANARY
    with pytest.raises(ConfigError, match="NOT_SET is not set"):
        value("${oc.env:NOT_SET}", "NOT_SET")
    monkeypatch.setenv("LEADS_ON", "${oc.env:MY_TOKEN}")
    assert value("${oc.env:LEADS_ON}", "LEADS_ON") == "${oc.env:MY_TOKEN}"


def test_another_hydra_application_in_this_process_reads_as_it_always_did() -> None:
    assert OmegaConf.create({"a": "${oc.env:MY_TOKEN}"}).a == CANARY
    with initialize_config_dir(str(CONF), version_base="1.3"):
        theirs = hydra_compose("config", ["+optimizer.options.x=${oc.env:MY_TOKEN}"])
    with pytest.raises(SecurityError):  # but what becomes a run of ours
        typed(theirs)


def test_a_config_is_written_with_the_name_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "17")
    monkeypatch.setenv("KIND", "mlp")  # which another key has, too
    leave = "security.environment=[MY_TOKEN,SHORT,SEED,KIND]"
    config = compose([
        TOKEN, leave, "+optimizer.options.y=${oc.env:SHORT}", "seed=${oc.env:SEED}",
        "+optimizer.options.z=[1,p-${oc.env:SHORT}-q]", "+optimizer.options.w=seventeen",
        "+optimizer.options.k=${oc.env:KIND}",
    ])  # fmt: skip
    written = WrittenConfig(config).flat()
    values = {name: written[f"optimizer.options.{name}"] for name in "xyzkw"}
    assert values == {
        "x": "${oc.env:MY_TOKEN}", "y": "${oc.env:SHORT}", "z": [1, "p-${oc.env:SHORT}-q"],
        "k": "${oc.env:KIND}", "w": "seventeen",
    }  # fmt: skip
    assert written["seed"] == "${oc.env:SEED}"
    assert WrittenConfig(config).plain()["model"]["kind"] == "mlp"
    assert json.dumps(CANARY)[1:-1] not in json.dumps(WrittenConfig(config).plain())
    assert config.optimizer.options["x"] == CANARY  # in memory


def test_a_renewed_token_makes_no_other_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_hash(compose([TOKEN, LEAVE]))
    monkeypatch.setenv("MY_TOKEN", "canary-of-tomorrow")
    assert config_hash(compose([TOKEN, LEAVE])) == before


def test_a_capture_is_opened_again_with_the_value_where_leave_is_given() -> None:
    kept = WrittenConfig(compose([TOKEN, LEAVE])).plain()
    with pytest.raises(SecurityError, match=r"security\.environment=\[MY_TOKEN\]"):
        config_from_plain(kept)
    with secrets.environment_access(["MY_TOKEN"]):
        assert config_from_plain(kept).optimizer.options["x"] == CANARY
        kept["optimizer"]["options"]["x"] = "${oc.env:MY_TOKEN}${seed}"
        with pytest.raises(SecurityError, match="interpolation is not allowed"):
            config_from_plain(kept)


@pytest.mark.parametrize(
    "value",
    [CANARY, "two\nlines of it", 'a "quoted" one', "back\\slash\\es", "ünïcödé-ü",
     "12345678901234567", "with  two  spaces"],
)  # fmt: skip
def test_no_kind_of_file_spells_a_value_so_that_it_is_missed(value: str) -> None:
    masking.add_secret("X", value)
    spelled = [value, json.dumps(value), repr(value), html.escape(value), markdown.escape(value),
               escape_control_chars(value), json.dumps(value, ensure_ascii=False),
               shlex.quote(value), " ".join(value.split())]  # fmt: skip
    for text in spelled:
        masked = masking.mask_secrets(f"<{text}>")
        assert "${oc.env:X}" in masked, text
        assert not any(part in masked for part in value.split() if len(part) > 4), text


def test_short_words_and_numbers_do_not_put_honest_text_out() -> None:
    for name, value in {"A": "1", "B": "cuda", "C": "20240101", "D": ""}.items():
        masking.add_secret(name, value)
    text = '{"seed": 20240101, "device": "cuda", "steps": 1}'
    assert masking.mask_secrets(text) == text


def test_a_value_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts would be as secret, and spelled in other ways."""
    monkeypatch.setenv("PAIR", "[first-secret,second-secret]")
    for value in ("${oc.decode:${oc.env:PAIR}}", "${oc.create:{a:${oc.env:PAIR}}}"):
        with pytest.raises(SecurityError, match="one variable for each value") as refused:
            compose([f"+optimizer.options.x='{value}'", "security.environment=[PAIR]"])
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "typed_in"),
    [
        ("name", ["name=${oc.env:MY_TOKEN}"]),
        ("hydra.run.dir", ["hydra.run.dir=outputs/${oc.env:MY_TOKEN}"]),
        ("hydra.output_subdir", ["hydra.output_subdir=x${oc.env:MY_TOKEN}"]),
        ("hydra.job.name", ["hydra.job.name=${oc.env:MY_TOKEN}", "hydra/job_logging=default"]),
        ("hydra.sweep.subdir", ["-m", "seed=0,1", "+optimizer.options.pw=${oc.env:MY_TOKEN}",
                                "hydra.sweep.subdir=${hydra.job.num}_${optimizer.options.pw}"]),
        ("hydra.sweep.dir", ["-m", "seed=0,1", "name=${oc.env:MY_TOKEN}"]),
        ("hydra.run.dir", ["hydra.run.dir=outputs/xcanary_4b1d"]),  # typed, as a shell inserts it
        ("hydra.run.dir", ["name=canary_4b1d"]),
        ("benchmark.arms", ["job=benchmark", "benchmark.arms=[none,'name=xcanary_4b1d']"]),
        ("benchmark.arms", ["job=benchmark", "benchmark.arms=[none,'x: name=${oc.env:SHORT}']"]),
        ("search.storage", ["search.storage=outputs/canary_4b1d.db"]),
        ("search.storage", ["search.storage=outputs/${oc.env:SHORT}.db"]),
    ],
)  # fmt: skip
def test_no_file_or_folder_is_called_after_a_value(
    key: str, typed_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary_4b1d")
    with pytest.raises(SecurityError, match="into a file or folder name") as refused:
        check(read_arguments([*typed_in, "security.environment=[MY_TOKEN,SHORT]"]))
    assert key in str(refused.value) and "canary" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_one_that_a_variable_holds_is_no_name_of_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", str(tmp_path))
    for folder in (tmp_path, Path("/")):
        monkeypatch.chdir(folder)
        check(read_arguments([f"hydra.run.dir={tmp_path}/outputs/x", LEAVE]))


@pytest.mark.parametrize(
    ("typed_in", "value", "shown"),
    [
        ("name=x${oc.env:SHORT}/", "p@s", "hydra.run.dir"),
        ("seed=${oc.env:SHORT}", "abc", "${oc.env:SHORT}"),
        ("model._target_=${oc.env:SHORT}", "p@s", "hydra.run.dir"),
        ("training.batch_size=${oc.env:SHORT}", "-17", "${oc.env:SHORT}"),
        ("hydra.launcher.jobs=${oc.env:SHORT}", "x1", "${oc.env:SHORT}"),
    ],
)
def test_a_refusal_shows_the_name_of_a_value_however_short(
    typed_in: str, value: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT", value)
    with pytest.raises((SecurityError, ConfigError)) as refused:
        check(read_arguments([typed_in, "security.environment=[SHORT]"]))
    assert value not in str(refused.value) and shown in str(refused.value)


def test_a_final_error_names_short_values_too(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SHORT", "p@ss")
    quick = "data=cancer device=cpu optimization=none training.steps=1 hydra.run.dir=outputs/mine"
    typed_in = [*quick.split(), "training.monitor=${oc.env:SHORT}", "security.environment=[SHORT]"]
    folder = Path("outputs/mine")
    folder.mkdir(parents=True)  # so that it stays
    assert launch(check(read_arguments(typed_in))) == 2
    log, reason = (folder / "run.log").read_text(), Summary.read(folder).reason
    for text in (log, reason, capsys.readouterr().err):
        assert "unknown metric '${oc.env:SHORT}'" in text and "p@ss" not in text


@pytest.mark.parametrize("part", [[], ["-p", "seed"]])
def test_a_config_that_is_shown_has_the_name_of_a_number_too(
    part: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SHORT", "12345")
    asked = ["--cfg", "job", "--resolve", *part, "seed=${oc.env:SHORT}", "training.steps=7"]
    assert launch(check(read_arguments([*asked, "security.environment=[SHORT]"]))) == 0
    shown = capsys.readouterr().out
    assert "${oc.env:SHORT}" in shown and "12345" not in shown
    assert part or ("steps: 7" in shown and "level: standard" in shown)


def test_text_that_hydra_prints_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    (tmp_path / "theirs" / "experiment" / "own.yaml").write_text(
        '# @package _global_\noptimizer: {options: {x: "a\\u202Eb\\u2066c\\u0085d\\ud800"}}\n'
    )
    asked = ["--cfg", "all", "--config-dir=theirs", "+experiment=own"]
    launch(check(read_arguments(asked)))
    shown = capsys.readouterr().out
    assert "\\u202e" in shown
    assert len(shown.splitlines()) > 5
    assert all(line.replace("\t", "").isprintable() for line in shown.split("\n"))


NO_TABLE = ["data=tabular", f"data.path={Path(__file__).parent}", "data.target=y"]


@pytest.mark.parametrize("mistake", [["optimizer.name=Lion"], NO_TABLE])
def test_a_mistake_that_the_build_finds_leaves_no_folder(
    mistake: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert launch(check(read_arguments([*mistake, "device=cpu", "optimization=none"]))) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def assert_silent(folder: Path, *done: subprocess.CompletedProcess[str]) -> None:
    """Neither canary is in a file, a file's name or the output, in any spelling."""
    masking.add_secret("MY_TOKEN", CANARY)
    wanted = {text.encode() for text in (*masking.known_secrets(), "canary-4b1d", OTHER)}
    printed = "".join(one.stdout + one.stderr for one in done).encode()
    assert not [text for text in wanted if text in printed]
    assert b"canary-4b1d" not in b"".join(printed.split())  # folded
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) >= 5
    for path in files:
        content = path.read_bytes() + str(path.relative_to(folder)).encode()
        assert not [text for text in wanted if text in content], path


QUICK = ["data=digits", "device=cpu", "optimization=none", "training.steps=4",
         "model._target_=canary_pkg.Net", "security.trusted=[canary_pkg]", LEAVE,
         "+model.token=${oc.env:MY_TOKEN}"]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "canary_pkg.py").write_text(PACKAGE)
    return tmp_path


def test_a_canary_is_in_nothing_that_a_run_and_an_evaluation_leave_behind(place: Path) -> None:
    trained = runs.command(place, *QUICK)
    assert trained.returncode == 0, trained.stderr
    (folder,) = (place / "outputs" / "runs").glob("*/*")
    again = ["job=evaluate", f"checkpoint.resume={folder.relative_to(place)}"]
    evaluated = runs.command(place, *again, "security.trusted=[canary_pkg]", LEAVE)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "${oc.env:MY_TOKEN}" in (folder / ".hydra" / "config.yaml").read_text()
    assert_silent(place, trained, evaluated)


def test_a_canary_is_in_nothing_that_a_failing_run_leaves_behind(place: Path) -> None:
    failed = runs.command(place, *QUICK, "+model.fail=true")
    assert failed.returncode == 1
    assert "cannot log in with ${oc.env:MY_TOKEN}" in failed.stderr
    assert_silent(place, failed)


FAILING = "+model.fail=true"
RANKS = ["distributed=ddp", "distributed.processes=2"]
ARMS = ["job=benchmark", "benchmark.arms=[none,basic]", "benchmark.budget_s=3"]
ROWS = ["data._target_=canary_pkg.Rows", "data.arguments.token=${oc.env:MY_TOKEN}"]
PROCESSES: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "ranks": (RANKS, (0,)),
    "failing ranks": ([*RANKS, FAILING], (1,)),
    "shards": (["distributed=fsdp", "distributed.processes=2", FAILING], (1,)),
    "sweep": (["-m", "seed=1,2", "+model.fail=false,true"], (7,)),
    "spawned job": (["-m", "seed=1", "sweep.start=spawn", FAILING], (7,)),
    "job of ranks": (["-m", "seed=1", *RANKS, FAILING], (7,)),
    "benchmark": ([*ARMS, "benchmark.parity=true"], (0, 7)),
    "failing arms": ([*ARMS, FAILING], (7,)),
    "verified ranks": (["job=verify", "verify.what=resume", *RANKS, FAILING], (1,)),
    "data workers": (["data.workers=2", *[f"+{one}" for one in ROWS[1:]], ROWS[0]], (2,)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("typed_in", "codes"), PROCESSES.values(), ids=PROCESSES)
def test_a_canary_is_in_nothing_that_other_processes_leave_behind(
    typed_in: list[str], codes: tuple[int, ...], place: Path
) -> None:
    done = runs.command(place, *QUICK, *typed_in)
    assert done.returncode in codes, done.stderr
    assert "${oc.env:MY_TOKEN}" in done.stdout + done.stderr or done.returncode == 0
    assert_silent(place, done)


class Rebuilt:
    """Fails with the secret while a new process unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, (CANARY,)


def _fail(text: object) -> None:
    raise ValueError(f"cannot log in with {text}")


@pytest.mark.parametrize("argument", [CANARY, Rebuilt()], ids=["running", "unpickling"])
def test_a_new_process_masks_before_it_unpickles_its_other_arguments(
    argument: object, capfd: pytest.CaptureFixture[str]
) -> None:
    masking.add_secret("MY_TOKEN", CANARY)
    process = multiprocessing.get_context("spawn").Process(
        target=run_masked, args=(MaskingState(), _fail, argument)
    )
    process.start()
    process.join()
    printed = capfd.readouterr().err
    assert process.exitcode == 1
    assert "cannot log in with ${oc.env:MY_TOKEN}" in printed and "canary" not in printed


def test_a_job_masks_values_that_its_sweep_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    masking.add_secret("MY_TOKEN", CANARY)
    variables, read_end, write_end = parent_death_pipe([])
    monkeypatch.setattr(masking, "_variable_by_text", {})
    monkeypatch.setenv(*next(iter(variables.items())))
    monkeypatch.setattr(job_context, "watch_parent", lambda *_: None)
    sent = os.read(read_end, 1 << 16)
    os.close(read_end)
    os.close(write_end)
    monkeypatch.setattr(job_context, "_read_stdin", lambda: sent)
    assert b"canary" not in sent and take_job_context().secrets == ["MY_TOKEN"]
    assert masking.mask_secrets(CANARY) == "${oc.env:MY_TOKEN}"


def test_an_answer_of_the_sandbox_is_masked_and_its_question_has_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    masking.add_secret("MY_TOKEN", "canary-4b1d.npy")
    (tmp_path / "canary-4b1d.npy").write_bytes(b"x" * 100)
    asked: list[Any] = []

    def answer(_: Sandbox, request: Any, seconds: float) -> Any:
        asked.append(request)
        where, evidence = "canary-4b1d.npy", "x" * 390 + " canary-4b1d.npy"
        return {"format": "npy", "reasons": [["x.y", int(Severity.REFUSAL), where, evidence, ""]]}

    monkeypatch.setattr(Sandbox, "_start", lambda _: None)
    monkeypatch.setattr(Sandbox, "_send_request", answer)
    with Sandbox() as sandbox, FileBytes.open_in_place(tmp_path / "canary-4b1d.npy") as data:
        _, (reason,) = sandbox.examine(data, "canary-4b1d.npy", FileLimits())
    assert asked[0]["name"] == "${oc.env:MY_TOKEN}.npy"
    assert "canary" not in f"{reason.where} {reason.evidence}"


def test_folded_lines_and_shortened_texts_hold_no_part_of_a_value(capsys: Any) -> None:
    masking.add_secret("MY_TOKEN", "canary-" * 20)
    text = f"{'x' * 40} {'canary-' * 20}"
    print_stdout(text, facts_table([("name", text, "")]), Text(text))
    joined = text.replace(" ", "")  # a cut between words is within the value
    shortened = shorten(text, 60) + shorten(joined, 60) + limit_length(joined, 100)
    assert "canary" not in capsys.readouterr().out + shortened
