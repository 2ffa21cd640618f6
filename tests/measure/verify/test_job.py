"""job=verify shows its result on the terminal, in verify.json and by its exit code."""

from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import ConfigError, NotVerified, StorageError
from runner.core.jobs import load_job
from runner.core.schemas.jobs import JobKind
from tests import runs

QUICK = ["job=verify", "device.threads=1", "model.width=16"]


def verify(folder: Path, *overrides: str) -> dict[str, Any]:
    """What is in verify.json."""
    load_job(JobKind.verify)(runs.config(*QUICK, *overrides), folder)
    return runs.read(folder, "verify.json")


def test_a_level_that_is_right_passes_and_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    found = verify(tmp_path, "optimization=basic", "verify.steps=3")
    assert (found["what"], found["verdict"]) == ("parity", "explained by precision")
    assert (found["techniques"], found["steps"]) == (["system", "fused_optimizer"], 3)
    kinds = {row["kind"] for row in found["rows"]}
    assert kinds == set("loss grad_norm gradient update parameter output".split())
    runs_logged = [text for text in caplog.messages if text.startswith("verify: ")]
    assert runs_logged == ["verify: a run with system, fused_optimizer"]
    assert "effects that begin after 3 steps" in found["not_judged"]
    out = capsys.readouterr().out
    assert all(part in out for part in ("explained by precision", "not judged", "verify.json"))


@pytest.mark.usefixtures("parity_mutants")
def test_a_mutant_is_an_error_that_names_it_and_the_first_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant = "optimization.extra=[parity_mutants.DroppedGradient]"
    with pytest.raises(NotVerified, match=r"optimization\.DroppedGradient: grad_norm at step 1"):
        verify(tmp_path, "optimization=basic", mutant, "security.trusted=[parity_mutants]")
    assert NotVerified.exit_code == 1
    found = runs.read(tmp_path, "verify.json")
    assert (found["verdict"], found["culprits"]) == ("FAIL", ["DroppedGradient"])
    assert found["alone"]["fused_optimizer"] == "explained by precision"
    assert "culprit" in capsys.readouterr().out


def test_a_resume_that_is_exact_passes_and_says_what_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    found = verify(tmp_path, "verify.what=resume", "verify.steps=8", "model.dropout=0.1")
    assert (found["what"], found["verdict"], found["cut"]) == ("resume", "exact", 5)
    assert found["killed"] == 6
    assert min(found["compared"][kind] for kind in ("optimizer", "guard", "random", "metric")) > 0
    assert [text for text in caplog.messages if text.startswith("verify: ")] == [
        "verify: a run to be killed after step 4 of 8",
        "verify: a run to be killed after step 6 of 8",
        "verify: the 8 steps without an interruption",
        "verify: the killed run, resumed from step 5",
    ]
    assert "it killed twice and resumed from 3 and 5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimization=none"], "optimization"),
        (["verify.steps=0"], "verify.steps"),
        (["verify.what=resume", "verify.steps=1"], "verify.steps"),
    ],
)
def test_a_request_that_proves_nothing_is_refused_by_its_key(
    overrides: list[str], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        runs.config(*QUICK, *overrides)


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="verify.json"):
        verify(tmp_path / "absent", "optimization=basic", "verify.steps=1")
