"""A folder with a record is continued by its own run alone; nothing replaces the record."""

import json
from pathlib import Path

import pytest

from runner import build, compose
from runner.core.checkpoint.ownership import ARCHIVE, archive_record, check_folder, is_own_resume
from runner.core.errors import SecurityError, UsageError
from runner.core.record.summary import Summary
from runner.scale.sweep.plan import JobPlan, can_continue
from runner.scale.sweep.state import Job
from tests.runs import QUICK
from tests.runs import checked as ask

RUN, OTHER = "outputs/runs/a/old", "outputs/runs/a/other"
RECORDS = {
    "summary": ["summary.json"],
    "metrics": ["metrics.jsonl"],
    "checkpoints": ["checkpoints/step_00000012/manifest.json"],
    "a checkpoint that was being replaced": ["checkpoints/.old-step_00000012/manifest.json"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_record(where: str, names: list[str]) -> Path:
    for name in names:
        path = Path(where, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    return Path(where)


def make_run(where: str = RUN) -> Path:
    run = make_record(where, ["summary.json", "metrics.jsonl", *RECORDS["checkpoints"]])
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text("[]\n")
    return run


def content(folder: Path) -> dict[str, str]:
    return {str(p): p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("names", RECORDS.values(), ids=RECORDS)
def test_a_new_run_in_a_folder_with_a_record_is_refused_before_anything_is_written(
    names: list[str],
) -> None:
    run = make_record(RUN, names)
    before = content(run)
    with pytest.raises(UsageError, match="use another hydra.run.dir.*checkpoint.resume=auto"):
        ask(f"hydra.run.dir={RUN}")
    with pytest.raises(UsageError, match=f"{RUN} has the "):
        build(compose(QUICK), run)
    assert content(run) == before


HERE, CONTINUED = f"hydra.run.dir={RUN}", f"checkpoint.resume={RUN}"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        *((f"{job} {HERE}", f"{RUN} has the checkpoints of another run") for job in (
            f"job=evaluate {CONTINUED}", f"job=predict {CONTINUED}", "job=doctor", "job=benchmark",
            f"job=evaluate {CONTINUED}/checkpoints/step_00000012",
        )),
        (f"-m seed=0,1 hydra.sweep.dir={RUN}", "use another hydra.sweep.dir"),
        (f"{CONTINUED} hydra.run.dir={OTHER}", f"continue that run: checkpoint.resume={OTHER}$"),
    ],
)  # fmt: skip
def test_another_job_in_the_folder_of_a_run_is_refused(typed: str, says: str) -> None:
    runs = make_run(), make_run(OTHER)
    before = [content(run) for run in runs]
    with pytest.raises(UsageError, match=says):
        ask(*typed.split())
    assert [content(run) for run in runs] == before


def test_a_resume_of_one_run_in_the_folder_of_another_is_refused() -> None:
    make_run()
    make_record(OTHER, ["metrics.jsonl"])
    typed = f"checkpoint.resume={RUN}"
    with pytest.raises(UsageError, match=f"{OTHER} has the metrics.jsonl of another run"):
        ask(typed, f"hydra.run.dir={OTHER}")
    with pytest.raises(UsageError, match=f"{OTHER} has the metrics.jsonl of another run"):
        build(compose([*QUICK, typed]), OTHER)
    assert ask(typed, "hydra.run.dir=outputs/new").config is not None


@pytest.mark.parametrize("end", ["", "/checkpoints", "/checkpoints/step_00000012"])
def test_a_run_is_resumed_in_its_own_folder_however_it_is_named(end: str, folder: Path) -> None:
    run = make_run()
    (folder / "link").symlink_to(run)
    for place in (RUN, str(run.absolute()), f"{RUN}/", "link"):
        assert is_own_resume(Path(place), f"{RUN}{end}")
        assert ask(f"checkpoint.resume={RUN}{end}", f"hydra.run.dir={place}").config is not None
    assert not is_own_resume(Path(OTHER), f"{RUN}{end}")
    check_folder(run, "auto", trains=True)
    with pytest.raises(UsageError):
        check_folder(run, "auto", trains=False)


def test_auto_without_a_checkpoint_moves_the_record_aside_and_starts_afresh() -> None:
    names = ["summary.json", "metrics.jsonl", "report.md", "debug/x.json", "run.log"]
    run = make_record(RUN, names)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 5}) + "\n")
    assert ask("checkpoint.resume=auto", f"hydra.run.dir={RUN}").config is not None
    with build(compose([*QUICK, "checkpoint.resume=auto"]), run):
        assert not (run / "metrics.jsonl").exists()
    earlier = run / ARCHIVE / "run-1"
    assert json.loads((earlier / "metrics.jsonl").read_text()) == {"step": 5}
    moved = {"summary.json", "metrics.jsonl", "report.md", "debug"}
    assert {path.name for path in earlier.iterdir()} == moved
    assert (run / "run.log").read_text() == "{}\n"
    make_record(RUN, ["summary.json"])
    archive_record(run)  # a second time: nothing is replaced
    assert (earlier / "metrics.jsonl").exists() and (run / ARCHIVE / "run-2").is_dir()


LOST = "the weights are not finite after step 9; stability=basic skips bad steps"


@pytest.mark.parametrize(
    ("ended_by", "reason", "moved"),
    [("policy", LOST, True), ("policy", "step 9: the loss was nan", False), ("error", LOST, False)],
)
def test_checkpoints_are_moved_aside_with_the_record_where_the_weights_are_lost(
    ended_by: str, reason: str, moved: bool
) -> None:
    run = make_run()
    Summary("failed", reason, ended_by).write(run)
    assert can_continue(JobPlan(Job(0, [], "0"), trains=True), run) is not moved
    archive_record(run)
    assert (run / "checkpoints").exists() is not moved
    assert (run / ARCHIVE / "run-1" / "checkpoints").exists() is moved


def test_a_record_is_not_moved_through_a_link_out_of_its_folder(folder: Path) -> None:
    run = make_record(RUN, ["summary.json"])
    (run / ARCHIVE).symlink_to(folder)
    with pytest.raises(SecurityError, match="is a link"):
        archive_record(run)


def test_a_run_that_slurm_has_requeued_continues_in_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    request = ask(f"hydra.run.dir={RUN}")
    assert request.config is not None and request.config.checkpoint.resume == "auto"


def test_a_rank_that_torchrun_has_restarted_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_record(RUN, ["summary.json"])
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    typed = ["distributed=ddp", f"hydra.run.dir={RUN}"]
    with pytest.raises(UsageError, match="has the summary.json"):
        ask(*typed)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ask(*typed).config is not None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("RANK", "1")  # rank 0 may have begun
    assert ask(*typed).config is not None
