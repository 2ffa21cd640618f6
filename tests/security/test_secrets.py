"""A config reads what it was given leave to; what it read is in memory alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from runner import masking
from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.composing import compose, from_plain, typed
from runner.config import config_hash, flat, plain
from runner.errors import ConfigError, SecurityError
from runner.overrides.groups import CONF
from runner.record import markdown
from runner.record.text import escape_control_chars
from runner.security import secrets
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
"""


@pytest.fixture(autouse=True)
def variables(nothing_remembered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three variables, and nothing remembered from test to test."""
    monkeypatch.setenv("MY_TOKEN", CANARY)
    monkeypatch.setenv("SHORT", "abc")
    monkeypatch.setenv("OTHER", OTHER)


# who may read


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:MY_TOKEN}",
        "${oc.env:MY_TOKEN,none}",
        "${oc.env:NOT_SET,${oc.env:MY_TOKEN}}",
        "x-${oc.env:MY_TOKEN}-y",
        "${oc.decode:${oc.env:MY_TOKEN}}",
        "${oc.create:{a:${oc.env:MY_TOKEN}}}",
        "${oc.env:${oc.decode:MY_TOKEN}}",
        "${${oc.decode:oc}.env:MY_TOKEN}",
        "${oc.env:MY-TOKEN}",
    ],
)
def test_a_variable_that_nobody_gave_leave_for_is_refused_by_name(value: str) -> None:
    with pytest.raises(SecurityError) as refused:
        compose([f"+optimizer.options.x={quoted(value)}", "security.environment=[NOT_SET]"])
    assert refused.value.exit_code == 3
    if "}." in value:  # the name of what resolves it is put together: refused before any of it is
        return
    assert str(refused.value).startswith("optimizer.options.x: ")
    assert CANARY not in str(refused.value)
    if "-TOKEN" not in value:
        assert "security.environment=[MY_TOKEN]" in str(refused.value)


def test_a_refusal_comes_before_anything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for typed_in in ([TOKEN], ["-m", "seed=1,2", TOKEN], ["name=${oc.env:MY_TOKEN}"]):
        with pytest.raises(SecurityError, match="MY_TOKEN"):
            check(read_arguments(typed_in))
    assert not list(tmp_path.iterdir())


def test_a_config_file_cannot_give_itself_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "security").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer").mkdir()
    (tmp_path / "conf" / "security" / "own.yaml").write_text("# own\nenvironment: [MY_TOKEN]\n")
    (tmp_path / "conf" / "optimizer" / "own.yaml").write_text(
        "# own\nname: SGD\noptions: {x: '${oc.env:MY_TOKEN}'}\n"
    )
    with pytest.raises(SecurityError):
        check(read_arguments(["--config-dir=conf", "security=own", "optimizer=own"]))


@pytest.mark.parametrize("leave", [LEAVE, "security.environment=MY_TOKEN", "security=off"])
def test_what_was_given_leave_for_is_read(leave: str) -> None:
    config = compose([TOKEN, leave])
    assert config.optimizer.options["x"] == CANARY


def test_a_default_stands_in_for_what_is_not_set() -> None:
    value = quoted("${oc.env:NOT_SET,${oc.env:MY_TOKEN}}")
    typed_in = [f"+optimizer.options.x={value}", "security.environment=[NOT_SET,MY_TOKEN]"]
    assert compose(typed_in).optimizer.options["x"] == CANARY
    with pytest.raises(ConfigError, match="NOT_SET is not set"):
        compose(["+optimizer.options.x=${oc.env:NOT_SET}", "security.environment=[NOT_SET]"])


def test_what_a_variable_stands_for_in_turn_is_a_text_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEADS_ON", "${oc.env:MY_TOKEN}")
    leave = "security.environment=[LEADS_ON]"
    config = compose(["+optimizer.options.x=${oc.env:LEADS_ON}", leave])
    assert config.optimizer.options["x"] == "${oc.env:MY_TOKEN}"


def test_another_hydra_application_in_this_process_reads_as_it_always_did() -> None:
    assert OmegaConf.create({"a": "${oc.env:MY_TOKEN}"}).a == CANARY
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = hydra_compose("config", ["+optimizer.options.x=${oc.env:MY_TOKEN}"])
    with pytest.raises(SecurityError):  # but what becomes a run of ours
        typed(found)


# what is written


def test_a_config_is_written_with_the_name_in_place_of_the_value() -> None:
    leave = "security.environment=[MY_TOKEN,SHORT,SEED]"
    os.environ["SEED"] = "17"
    try:
        config = compose([
            TOKEN, leave, "+optimizer.options.y=${oc.env:SHORT}", "seed=${oc.env:SEED}",
            "+optimizer.options.z=[1,p-${oc.env:SHORT}-q]", "+optimizer.options.w=seventeen",
        ])  # fmt: skip
    finally:
        del os.environ["SEED"]
    written = flat(config)
    assert written["optimizer.options.x"] == "${oc.env:MY_TOKEN}"
    assert written["optimizer.options.y"] == "${oc.env:SHORT}"
    assert written["optimizer.options.z"] == [1, "p-${oc.env:SHORT}-q"]
    assert written["seed"] == "${oc.env:SEED}"
    assert written["optimizer.options.w"] == "seventeen"
    kept = plain(config)
    assert json.dumps(CANARY)[1:-1] not in json.dumps(kept)
    assert config.optimizer.options["x"] == CANARY  # in memory


def test_a_key_that_happens_to_have_the_same_value_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHORT", "mlp")
    config = compose(["+optimizer.options.x=${oc.env:SHORT}", "security.environment=[SHORT]"])
    assert plain(config)["model"]["kind"] == "mlp"
    assert flat(config)["optimizer.options.x"] == "${oc.env:SHORT}"


def test_a_token_that_was_renewed_makes_no_other_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = config_hash(compose([TOKEN, LEAVE]))
    monkeypatch.setenv("MY_TOKEN", "canary-of-tomorrow")
    assert config_hash(compose([TOKEN, LEAVE])) == before


def test_a_capture_is_opened_again_with_the_value_where_leave_is_given() -> None:
    kept = plain(compose([TOKEN, LEAVE]))
    with pytest.raises(SecurityError, match=r"security\.environment=\[MY_TOKEN\]"):
        from_plain(kept)
    with secrets.environment_access(["MY_TOKEN"]):
        assert from_plain(kept).optimizer.options["x"] == CANARY
    kept["optimizer"]["options"]["x"] = "${oc.env:MY_TOKEN}${seed}"
    with secrets.environment_access(["MY_TOKEN"]), pytest.raises(SecurityError, match="stands for"):
        from_plain(kept)


@pytest.mark.parametrize(
    "value",
    [CANARY, "two\nlines of it", 'a "quoted" one', "back\\slash\\es", "ünïcödé-ü",
     "12345678901234567", "with  two  spaces"],
)  # fmt: skip
def test_no_kind_of_file_spells_a_value_so_that_it_is_missed(value: str) -> None:
    import html
    import shlex

    masking.learn("X", value)
    spelled = [value, json.dumps(value), repr(value), html.escape(value), markdown.escape(value),
               escape_control_chars(value), json.dumps(value, ensure_ascii=False),
               shlex.quote(value),
               " ".join(value.split())]  # fmt: skip
    for text in spelled:
        found = masking.masked(f"<{text}>")
        assert "${oc.env:X}" in found, text
        assert not any(part in found for part in value.split() if len(part) > 4), text


def test_short_words_and_numbers_do_not_put_honest_text_out() -> None:
    masking.learn("A", "1")
    masking.learn("B", "cuda")
    masking.learn("C", "20240101")
    masking.learn("D", "")
    text = '{"seed": 20240101, "device": "cuda", "steps": 1}'
    assert masking.masked(text) == text


@pytest.mark.parametrize(
    "value", ["${oc.decode:${oc.env:PAIR}}", "${oc.create:{a:${oc.env:PAIR}}}"]
)
def test_a_value_is_not_taken_apart(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts would be as secret, and spelled in other ways."""
    monkeypatch.setenv("PAIR", "[first-secret,second-secret]")
    typed_in = f"+optimizer.options.x={quoted(value)}"
    with pytest.raises(SecurityError, match="one variable for each value") as refused:
        compose([typed_in, "security.environment=[PAIR]"])
    assert "secret" not in str(refused.value)


def test_an_error_quotes_no_value_however_short() -> None:
    for name in ("MY_TOKEN", "SHORT"):
        with pytest.raises(ConfigError) as refused:
            compose([f"seed=${{oc.env:{name}}}", f"security.environment=[{name}]"])
        assert os.environ[name] not in str(refused.value)
        assert f"${{oc.env:{name}}}" in str(refused.value)


@pytest.mark.parametrize(
    "where", ["name=${oc.env:MY_TOKEN}", "hydra.run.dir=outputs/${oc.env:SHORT}"]
)
def test_no_folder_is_called_after_a_value(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "canary-4b1d")
    with pytest.raises(SecurityError, match="folder"):
        check(read_arguments([where, "security.environment=[MY_TOKEN,SHORT]"]))


# the canary


def quoted(value: str) -> str:
    """As a text that Hydra reads, with what it stands for."""
    return f"'{value}'"


run = runs.command


def assert_silent(folder: Path, *done: subprocess.CompletedProcess[str]) -> None:
    """Neither canary is in any file, name of a file, or in what was said; in no spelling."""
    masking.learn("MY_TOKEN", CANARY)
    wanted = {text.encode() for text in (*masking.known(), "canary-4b1d", OTHER)}
    said = "".join(one.stdout + one.stderr for one in done).encode()
    assert not [text for text in wanted if text in said]
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len(files) > 5
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
    trained = run(place, *QUICK)
    assert trained.returncode == 0, trained.stderr
    (folder,) = (place / "outputs" / "runs").glob("*/*")
    evaluated = run(place, "job=evaluate", f"checkpoint.resume={folder.relative_to(place)}",
                    "security.trusted=[canary_pkg]", LEAVE)  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    assert "${oc.env:MY_TOKEN}" in (folder / ".hydra" / "config.yaml").read_text()
    assert_silent(place, trained, evaluated)


def test_a_canary_is_in_nothing_that_a_failing_run_leaves_behind(place: Path) -> None:
    failed = run(place, *QUICK, "+model.fail=true")
    assert failed.returncode == 1
    assert "cannot log in with ${oc.env:MY_TOKEN}" in failed.stderr
    shown = run(place, *QUICK, "--cfg", "job", "--resolve")
    assert "token: ${oc.env:MY_TOKEN}" in shown.stdout
    assert_silent(place, failed, shown)


@pytest.mark.slow
def test_a_canary_is_in_nothing_that_a_sweep_leaves_behind(place: Path) -> None:
    swept = run(place, *QUICK, "-m", "seed=1,2", "+model.fail=false,true")
    assert swept.returncode == 7
    assert_silent(place, swept)


@pytest.mark.slow
def test_a_canary_is_in_nothing_that_a_benchmark_leaves_behind(place: Path) -> None:
    measured = run(place, *QUICK, "job=benchmark", "benchmark.budget_s=5")
    assert measured.returncode in (0, 7), measured.stderr
    assert_silent(place, measured)
