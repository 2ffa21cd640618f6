"""verify.what=run: a recorded run comes out again, or what has changed since then is named."""

import json
import shutil
from pathlib import Path

import pytest

from runner.core.config.run_config import config_hash
from runner.core.errors import CheckpointError, ConfigError
from runner.core.interfaces.hook import Verdict
from runner.core.jobs import load_job
from runner.core.record import digests
from runner.core.record.digests import digest_files
from runner.core.record.summary import Summary
from runner.core.schemas.jobs import JobKind
from runner.measure.verify.rerun import compare_runs, verify_rerun
from tests import runs

TABLE = "a,b,label\n" + "".join(f"{i % 7},{i * i % 11},{'yn'[i % 2]}\n" for i in range(60))
QUICK = ("data=tabular", "data.target=label", "model=mlp", "model.width=8", "device.threads=1")
QUICK += ("training.steps=4", "training.batch_size=8", "monitoring.every=1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table, with its table beside it."""
    place = tmp_path_factory.mktemp("recorded")
    (place / "table.csv").write_text(TABLE)
    runs.trained(*QUICK, f"data.path={place}/table.csv", folder=place / "run")
    return place


def typed(place: Path) -> list[str]:
    again = ["job=verify", "verify.what=run", f"checkpoint.resume={place}/run"]
    return [*QUICK, f"data.path={place}/table.csv", *again]


def test_a_run_comes_out_again(recorded: Path, tmp_path: Path) -> None:
    load_job(JobKind.verify)(runs.config(*typed(recorded)), tmp_path)
    result = runs.read(tmp_path, "verify.json")
    assert (result["what"], result["verdict"], result["steps"]) == ("run", "exact", 4)
    assert result["compared"]["metric"] > 20 and result["compared"]["weights"] == 1
    assert result["notes"] == []
    assert not [change for change in result["changes"] if not change.startswith("choice")]


def test_other_data_are_named_with_the_first_step_that_differs(
    recorded: Path, tmp_path: Path
) -> None:
    shutil.copytree(recorded, tmp_path / "there")
    table = tmp_path / "there/table.csv"
    table.write_text(TABLE.replace("\n3,", "\n5,"))
    result = verify_rerun(
        runs.config(*typed(tmp_path / "there"), "data.changed=accept"), tmp_path, "another"
    )
    assert not result.exact and result.differing[0].endswith("at step 1")
    assert result.was != result.now
    assert result.changes[0].startswith("config:")  # data.path is another, too
    assert result.changes[1].startswith("data sha256: was")


def test_what_differs_since_then_is_named(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded / "run", tmp_path / "again", symlinks=True)
    summary = runs.read(tmp_path / "again")
    summary["versions"]["torch"], summary["device"]["name"] = "1.0", "abacus"
    (tmp_path / "again/summary.json").write_text(json.dumps(summary))
    rows = (tmp_path / "again/metrics.jsonl").read_text().splitlines()
    index, row = next((i, r) for i, r in enumerate(rows) if '"step": 3, "split": "train"' in r)
    rows[index] = json.dumps({**json.loads(row), "loss": 7.5})
    (tmp_path / "again/metrics.jsonl").write_text("\n".join(rows))
    then = Summary.read(recorded / "run")
    result = compare_runs(recorded / "run", tmp_path / "again", then, then.config_hash)
    assert result.differing == ["metric train/loss at step 3"] and result.now == "7.5"
    assert [change.partition(":")[0] for change in result.changes] == ["device", "version torch"]
    assert result.cause == result.changes[0] and "now abacus" in result.cause
    same = compare_runs(recorded / "run", recorded / "run", then, then.config_hash)
    assert same.exact and same.changes == [] and same.cause == ""


def test_a_run_that_was_interrupted_comes_out_again_and_other_keys_since_are_the_cause(
    recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    quick, run = (*QUICK, f"data.path={tmp_path}/table.csv"), tmp_path / "run"
    runs.trained(*quick, folder=run, hooks=[runs.AtSteps(2, lambda run: Verdict.STOP)])
    resumed = ("checkpoint.resume=auto", "data.workers=0", "checkpoint.keep=4")
    assert runs.trained(*quick, *resumed, folder=run).resumed_step == 2
    assert verify_rerun(runs.config(*typed(tmp_path)), tmp_path, "").exact
    longer = (*quick, "training.steps=6")
    runs.trained(*longer, f"checkpoint.resume={run}", folder=tmp_path / "fork/run")
    runs.trained(*longer, "checkpoint.resume=auto", folder=run)
    causes = {}
    for folder in (tmp_path, tmp_path / "fork"):
        asked = (*typed(tmp_path), f"checkpoint.resume={folder}/run", longer[-1])
        equality = verify_rerun(runs.config(*asked), tmp_path, "")
        assert not equality.exact
        causes[folder.name] = equality.cause
    assert all("continued at step 4 with training.steps=6 (was 4)" in x for x in causes.values())
    for name in ("provenance.json", "summary.json", "metrics.jsonl"):
        text = (tmp_path / "fork/run" / name).read_text().replace("changed_keys", "of_no_session")
        (tmp_path / "fork/run" / name).write_text(text)
    asked = (*typed(tmp_path), f"checkpoint.resume={tmp_path}/fork/run", longer[-1])
    equality = verify_rerun(runs.config(*asked), tmp_path, "")
    assert "continued from step 4 of another run" in equality.cause


def test_which_run_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: verify\.what=run needs to know"):
        runs.config("job=verify", "verify.what=run")
    config = runs.config(*typed(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no summary\.json"):
        verify_rerun(config, tmp_path, config_hash(config))


def test_a_digest_of_files_notices_bytes_names_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(name.encode() * 3000)
    before = digest_files([str(folder)])
    assert (before["of"], before["files"], before["bytes"]) == ("all bytes", 3, 9000)
    assert digest_files([str(folder)]) == before
    (folder / "b").write_bytes(b"b" * 2999 + b"x")
    assert digest_files([str(folder)])["sha256"] != before["sha256"]
    monkeypatch.setattr(digests, "MAX_FULL_BYTES", 1000)
    sampled = digest_files([str(folder)])
    assert "1024 blocks" in sampled["of"]
    (folder / "b").rename(folder / "d")
    assert digest_files([str(folder)])["sha256"] != sampled["sha256"]
