"""A folder that somebody handed over is gone on with, and nothing is changed outside of it."""

import json
import os
import sys
from pathlib import Path

import pytest

from runner.core.checkpoint import folder as folders
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.lock import lock
from runner.core.errors import SecurityError
from runner.core.security.paths import distrust_resumed_folder, output_roots, run_tree_folders
from runner.scale.sweep.job_process import CONSOLE_LOG, JobProcess
from runner.scale.sweep.plan import archive_job
from tests.runs import checked, command

TYPED = ["-m", "seed=0,1", "training.epochs=1", "device=cpu", "optimization=none"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["runner"])


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A run of somebody else's, with a checkpoint."""
    folder = tmp_path / "victim"
    for step in (1, 2):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").write_text("{}")
    (folder / "events.out.tfevents.1").write_text("curve")
    return folder


def everything(folder: Path) -> dict[str, str]:
    return {str(p): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def a_sweep(folder: Path, name: str = "0") -> Path:
    """One job that failed, in a folder of that name."""
    folder.mkdir(parents=True)
    job = {"number": 0, "overrides": ["seed=0", "training.epochs=1", f"sweep.resume={folder}"],
           "folder": name, "status": "failed"}  # fmt: skip
    (folder / "sweep.json").write_text(
        json.dumps({"command": "", "hash": "", "jobs": [job], "started": ""})
    )
    return folder


@pytest.mark.parametrize("name", ["0", "0/console.log", ".lock", "multirun.yaml", ".earlier"])
def test_a_sweep_with_a_link_that_leads_out_of_it_is_refused(name: str, victim: Path) -> None:
    handed, before = a_sweep(Path("handed")), everything(victim)
    (handed / name).parent.mkdir(exist_ok=True)
    (handed / name).symlink_to(victim)
    with pytest.raises(SecurityError, match=f"handed/{name}: refused: it is a link"):
        checked(*TYPED, "sweep.resume=handed")
    assert everything(victim) == before


def test_a_run_with_a_link_that_leads_out_of_it_is_not_gone_on_with(victim: Path) -> None:
    run = Path("handed")
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "checkpoints" / "last").symlink_to("step_00000001")  # as every run has
    typed = ["checkpoint.resume=handed", "device=cpu"]
    assert "hydra.run.dir=" in checked(*typed).arguments[-1]
    (run / ".hydra-resumed").symlink_to(victim)
    with pytest.raises(SecurityError, match=r"\.hydra-resumed: refused"):
        checked(*typed)


@pytest.mark.parametrize("link", ["0", "a", ".earlier"])
def test_a_job_is_moved_and_cleared_in_its_sweep_alone(link: str, victim: Path) -> None:
    handed, before = a_sweep(Path("handed")), everything(victim)
    for job in ("0", "a/b"):
        place = handed / job
        if link == job.partition("/")[0]:
            (handed / link).symlink_to(victim if link == "0" else victim.parent)
        else:
            (place / "checkpoints").mkdir(parents=True)
    if link == ".earlier":
        (handed / link).symlink_to(victim)
    with pytest.raises(SecurityError, match=f"handed/{link}: refused"):
        archive_job(handed, "a/b" if link == "a" else "0")
    assert everything(victim) == before


def test_checkpoints_are_deleted_in_the_run_s_own_folder_alone(victim: Path) -> None:
    run, before = Path("handed"), everything(victim)
    run.mkdir()
    (run / "checkpoints").symlink_to(victim / "checkpoints")
    with pytest.raises(SecurityError, match="checkpoints: refused: symlink"):
        Checkpointer(run, keep=1)
    root = Path("own")
    root.mkdir()
    for step in (1, 2):
        (root / f"step_{step:08d}").symlink_to(victim / "checkpoints" / f"step_{step:08d}")
    folders.prune(root, 1, set())
    assert [path.name for path in root.iterdir()] == ["step_00000002"]
    assert everything(victim) == before


def test_no_file_is_emptied_or_written_to_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in (".lock", CONSOLE_LOG):
        Path(name).symlink_to(precious)
    lock(Path()).release()  # by a file in the place of the link
    child = JobProcess.start(
        [sys.executable, "-c", "print('said')"], dict(os.environ), Path(), None
    )
    child.process.wait()
    child.close()
    assert precious.read_text() == "precious" and Path(CONSOLE_LOG).read_text() == "said\n"


def test_every_job_of_a_sweep_lies_in_its_folder(tmp_path: Path) -> None:
    where = "+optimizer.options.where=inside,../outside"
    typed = [*TYPED[:1], *TYPED[2:], where, "hydra.sweep.subdir=${optimizer.options.where}"]
    done = command(Path.cwd(), *typed)
    assert done.returncode == 3
    assert "hydra.sweep.subdir: ../outside is refused" in done.stderr
    assert not list(Path().rglob("*side"))


@pytest.mark.parametrize("subdir", ["/elsewhere/0", "../../../../elsewhere/0"])
def test_a_job_s_folder_is_named_below_the_output_root(subdir: str) -> None:
    with pytest.raises(SecurityError, match="is refused"):
        checked(*TYPED, f"hydra.sweep.subdir={subdir}")
    with pytest.raises(SecurityError, match="is refused"):
        checked(f"hydra.output_subdir={subdir}")


@pytest.mark.parametrize("key", ["sweep.resume", "checkpoint.resume", "replay.path"])
def test_a_config_file_cannot_resume_a_run_outside_the_run_tree(key: str, tmp_path: Path) -> None:
    a_sweep(tmp_path / "elsewhere")
    if key == "checkpoint.resume":
        (tmp_path / "elsewhere" / "checkpoints" / "step_00000012").mkdir(parents=True)
    (Path("conf") / "experiment").mkdir(parents=True)
    group, _, name = key.partition(".")
    text = f"# @package _global_\n{group}: {{{name}: '{tmp_path / 'elsewhere'}'}}\n"
    (Path("conf") / "experiment" / "own.yaml").write_text(text)
    typed = [*(TYPED if group == "sweep" else TYPED[2:]), "--config-dir=conf", "experiment=own"]
    typed += ["job=replay"] if group == "replay" else []
    with pytest.raises(SecurityError, match=f"{key}: .*elsewhere is refused"):
        checked(*typed)
    if group == "replay":
        return
    found = checked(*typed, f"{key}={tmp_path / 'elsewhere'}")
    assert found.session is None or found.session.folder == tmp_path / "elsewhere"


def test_a_sweep_that_is_gone_on_with_does_not_vouch_for_itself(tmp_path: Path) -> None:
    handed = a_sweep(tmp_path / "far" / "outputs" / "handed")
    session = checked(*TYPED, f"sweep.resume={handed}").session
    assert session is not None and session.resumed and session.folder == handed
    chosen = checked(*TYPED, f"hydra.sweep.dir={handed}").session
    assert chosen is not None and not chosen.resumed
    with distrust_resumed_folder(None, chosen=not session.resumed):
        assert run_tree_folders(handed / "0") == output_roots()
    with distrust_resumed_folder(None, chosen=not chosen.resumed):
        assert handed.parent in run_tree_folders(handed / "0")
