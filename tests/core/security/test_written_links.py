"""What a run writes goes through no link in its folder: the link is replaced, or the run refuses.

A link is planted at each path that the same job has written in another folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.core.errors import SecurityError
from runner.core.record import storage
from runner.core.record.library_files import private_folder, refuse_links
from tests.runs import command

OUTSIDE = "what lies outside"
SHORT = (
    "data=cancer", "model.width=8", "device=cpu", "device.threads=1", "monitoring=quiet",
    "optimization=none",
)  # fmt: skip
JOBS = {
    "train": ("debug=full", "training.steps=4"),
    "evaluate": ("job=evaluate", "evaluate.export=export"),
    "predict": ("job=predict",),
    "benchmark": (
        "job=benchmark", "benchmark.arms=[none,basic]", "benchmark.budget_s=2",
        "benchmark.warmup_steps=4", "benchmark.block_s=0.02", "training.steps=30",
        "benchmark.narrow=0.5",
    ),
    "sweep": ("-m", "seed=0,1", "training.steps=1"),
    "ranks": ("distributed=ddp", "distributed.processes=2", "training.steps=4", "debug=full"),
}  # fmt: skip
RECORD = ("summary.json", "metrics.jsonl", "checkpoints", "sweep.json")  # refused if they exist


def run(job: str, folder: Path, *typed: str) -> tuple[int, str]:
    """Start a job that writes into the folder; return its exit code and stderr."""
    place = f"hydra.sweep.dir={folder}" if job == "sweep" else f"hydra.run.dir={folder}"
    done = command(folder.parent, *SHORT, *JOBS[job], place, *typed)
    return done.returncode, done.stderr


def contents(folder: Path) -> dict[str, bytes | None]:
    """Files by path, and folders."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """The folder that a job has written without planted links, and what it must be given."""
    done: dict[str, tuple[Path, list[str]]] = {}

    def of(job: str) -> tuple[Path, list[str]]:
        if job not in done:
            evaluates = job in ("evaluate", "predict")
            typed = [f"checkpoint.resume={of('train')[0]}"] if evaluates else []
            folder = tmp_path_factory.mktemp(job) / "run"
            code, errors = run(job, folder, *typed)
            assert code == 0, errors
            done[job] = folder, typed
        return done[job]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_no_file_of_a_run_is_written_through_a_link_in_its_place(
    job: str, written: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    clean, typed = written(job)
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for number, path in enumerate(path for path in clean.rglob("*") if not path.is_dir()):
        name = path.relative_to(clean)
        if any(part.startswith("step_0") for part in name.parts):
            continue  # these folders are written under other names
        if job == "sweep" and len(name.parts) > 1:
            continue  # its jobs get other folders
        for link in (folder / name, (folder / name).with_name(f".{path.name}.tmp")):
            target = outside / f"{number}{link.name}"
            for parent in (target.parent, link.parent):
                parent.mkdir(parents=True, exist_ok=True)
            if name.parts[0] not in RECORD and path.name not in RECORD:
                target.write_text(OUTSIDE)  # else what is written would appear
            link.symlink_to(target)
    before = contents(outside)
    code, errors = run(job, folder, *typed)
    assert contents(outside) == before
    assert code in (0, 3), errors
    remaining = [p for p in clean.rglob("*") if p.is_file() and not p.is_symlink()]
    names = [p.relative_to(clean) for p in remaining if "tfevents" not in p.name]
    assert code or not [name for name in names if (folder / name).is_symlink()]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_linked_folder_in_a_run_is_refused_or_replaced(
    job: str, written: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    clean, typed = written(job)
    for number, path in enumerate(path for path in clean.rglob("*") if path.is_dir()):
        if path.is_symlink() or path.name.startswith("step_0") or path.parts[-2:-1] == ("1",):
            continue  # a run refuses a folder that has checkpoints; the second job is as the first
        if job == "sweep" and len(path.relative_to(clean).parts) > 1:
            continue  # its jobs get other folders
        link = tmp_path / str(number) / "run" / path.relative_to(clean)
        outside = tmp_path / str(number) / "outside"
        outside.mkdir(parents=True)
        (outside / "own.txt").write_text(OUTSIDE)
        for file in path.rglob("*"):
            if file.is_file() and not any(name in RECORD for name in file.parts):
                (outside / file.relative_to(path)).parent.mkdir(parents=True, exist_ok=True)
                (outside / file.relative_to(path)).write_text(OUTSIDE)
        link.parent.mkdir(parents=True)
        link.symlink_to(outside)
        before = contents(outside)
        code, errors = run(job, tmp_path / str(number) / "run", *typed)
        assert contents(outside) == before, link
        is_refused = link.name in errors and "refused" in errors
        assert is_refused or (code == 0 and not link.is_symlink()), (link, code, errors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A guarded folder with links `file` and `sub` to a file and a folder outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text(OUTSIDE)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").symlink_to(outside / "file")
    (folder / "sub").symlink_to(outside)
    storage.guard_folder(folder)
    return folder


def write(path: Path, mode: str) -> None:
    with open(path, mode, opener=storage.safe_opener) as file:
        file.write(b"ours")


def nothing(file: storage.HashedFile) -> None:
    """Write nothing."""


WRITES: dict[str, Callable[[Path], object]] = {
    "append": lambda path: write(path, "ab"),
    "write": lambda path: write(path, "wb"),
    "text": lambda path: storage.replace_text(path, "ours"),
    "file": lambda path: storage.write_file(path, nothing),
    "link": lambda path: storage.update_link(path, "step_1"),
    "record": lambda path: storage.RetryingAppender(lambda: path).close(),
    "copy": lambda path: storage.link_or_copy(Path(__file__), path),
    "delete": storage.remove_file,
    "delete folder": storage.remove_folder,
    "folder": lambda path: storage.make_folder(path / "inner"),
    "rename": lambda path: storage.rename(path, path.with_name("new")),
    "rename to": lambda path: storage.rename(path.parents[1] / "file", path),
    "library": lambda path: private_folder(path.parent).__enter__(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("inner", ["sub", "deep/sub"])
def test_a_linked_folder_in_a_guarded_one_is_refused(name: str, inner: str, folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / "deep").mkdir()
    (folder / "deep" / "sub").symlink_to(outside)
    before = contents(outside)
    with pytest.raises(SecurityError, match=f"{inner}: refused: it is a link, to .*outside"):
        WRITES[name](folder / inner / "file")
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["append", "write", "text", "record", "link", "delete"])
@pytest.mark.parametrize("nofollow", [True, False])
def test_a_link_in_place_of_a_file_is_replaced(
    name: str, nofollow: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nofollow:
        monkeypatch.setattr(storage, "NO_LINK", 0)
    WRITES[name](folder / "file")
    assert (folder.parent / "outside" / "file").read_text() == OUTSIDE
    target = storage.read_link(folder / "file") if name == "link" else None
    assert target == "step_1" if name == "link" else not (folder / "file").is_symlink()


@pytest.mark.parametrize("nofollow", [True, False])
def test_a_link_that_appears_while_a_file_is_opened_is_not_written_through(
    nofollow: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before it sees none; without O_NOFOLLOW the one after it does."""
    if not nofollow:
        monkeypatch.setattr(storage, "NO_LINK", 0)
    is_link, answers = storage._is_link, [False]
    monkeypatch.setattr(storage, "_is_link", lambda *a: answers.pop() if answers else is_link(*a))
    with pytest.raises(OSError):
        write(folder / "file", "ab")
    assert (folder.parent / "outside" / "file").read_text() == OUTSIDE


def test_the_folder_of_a_run_and_its_parents_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "disk" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    folder = tmp_path / "outputs" / "runs" / "a"
    storage.guard_folder(folder)
    storage.make_folder(folder / "debug")
    storage.replace_text(folder / "debug" / "x.json", "1")
    assert (tmp_path / "disk" / "runs" / "a" / "debug" / "x.json").read_text() == "1"


def test_a_library_writes_into_a_new_folder_and_its_files_replace_links(folder: Path) -> None:
    outside = folder.parent / "outside"
    with private_folder(folder) as private:
        (private / "file").write_text("ours")
        (private / "sub").mkdir()
        (private / "sub" / "inner").write_text("ours")
        assert sorted(path.name for path in folder.iterdir()) == [private.name, "file", "sub"]
    assert contents(outside) == {"file": OUTSIDE.encode()}
    assert contents(folder) == {"file": b"ours", "sub": None, "sub/inner": b"ours"}
    with pytest.raises(ValueError, match="failed"), private_folder(folder) as private:
        (private / "file").write_text("half")
        raise ValueError("failed")
    assert contents(folder) == {"file": b"ours", "sub": None, "sub/inner": b"ours"}
    (folder / ".tmp-of-a-killed-run").mkdir()
    with private_folder(folder):
        assert (folder / ".tmp-of-a-killed-run").is_dir()  # it may be another process's
    with private_folder(folder, owned=True):
        pass
    assert contents(folder) == {"file": b"ours", "sub": None, "sub/inner": b"ours"}


def test_a_database_is_refused_if_it_or_a_file_beside_it_is_a_link(folder: Path) -> None:
    refuse_links(folder / "search.db")
    (folder / "search.db-journal").symlink_to(folder.parent / "outside" / "file")
    with pytest.raises(SecurityError, match="search.db-journal: refused: it is a link"):
        refuse_links(folder / "search.db")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("multirun.yaml", marks=pytest.mark.slow),
        ".hydra-resumed/config.yaml",
        "search.db",
    ],
)
def test_a_link_in_place_of_a_file_of_others_is_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("")
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)  # as if the run was started before
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path / "outside")
    typed = {
        "multirun.yaml": ["-m", f"hydra.sweep.dir={folder}", "seed=0,1"],
        "search.db": ["experiment=search", f"hydra.sweep.dir={folder}", "search.trials=1",
                      "optimizer.lr=interval(0.1,0.2)"],
    }.get(name, [f"hydra.run.dir={folder}"])  # fmt: skip
    done = command(tmp_path, *SHORT, "training.steps=2", *typed)
    assert (tmp_path / "outside").read_text() == ""
    assert done.returncode == (3 if name == "search.db" else 0), done.stderr
    assert done.returncode or not (folder / name).is_symlink()
