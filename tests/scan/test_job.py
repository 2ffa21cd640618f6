import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from runner.core.config.composing import compose
from runner.core.errors import ConfigError, Interrupted, SecurityError, UsageError
from runner.core.findings import Reason, Severity, Trust
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.file_bytes import hash_file
from runner.core.security.files.provenance import Assessment, FileFacts
from runner.scan.job import ScanResult, ScanRow, main, render_terminal
from runner.scan.scan import Scanner
from tests import runs
from tests.core.security.planted import Mark, checkpoint


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of the scan."""
    made = tmp_path / "outputs/scans/scan/now"
    made.mkdir(parents=True)
    return made


def scan(path: Path, folder: Path, *overrides: str):
    return main(compose(["job=scan", f"scan.path='{path}'", *overrides]), folder)


def written(folder: Path):
    return runs.read(folder, "scan.json")


def pinned(*paths: Path) -> str:
    """Known, so that no process is started for them: tests of other things are quick so."""
    return f"security.pinned=[{','.join(hash_file(path)[0] for path in paths)}]"


def test_a_folder_is_told_apart_hostile_first_and_nothing_runs(tmp_path, folder, capsys):
    theirs = tmp_path / "theirs"
    checkpoint(theirs / "deep/step_00000007")
    torch.save({"w": Mark(tmp_path / "mark")}, theirs / "evil.pt")
    np.save(theirs / "good.npy", np.arange(3))
    (theirs / "renamed.dat").write_bytes((theirs / "good.npy").read_bytes())
    (theirs / "README.md").write_text("hello")
    os.mkfifo(theirs / "pipe")
    os.mkfifo(theirs / "pipe.safetensors")
    (theirs / "out").symlink_to(tmp_path / "outputs")
    (theirs / "again.pt").symlink_to("evil.pt")
    with pytest.raises(SecurityError, match="2 of 5 items refused; the first, .*evil.pt"):
        scan(theirs, folder)
    assert not (tmp_path / "mark").exists()
    found = written(folder)
    rows = {Path(row["path"]).name: row["trust"] for row in found["rows"]}
    assert rows == {
        "evil.pt": "REFUSED",
        "pipe.safetensors": "REFUSED",  # where a loader would wait for ever
        "renamed.dat": "UNTRUSTED",  # an array by its content
        "good.npy": "UNTRUSTED",
        "step_00000007": "UNTRUSTED",
    }
    assert list(rows.values()) == ["REFUSED"] * 2 + ["UNTRUSTED"] * 3
    assert {reason["where"] for reason in found["odd"]} == {"pipe", "out"}
    assert found["passed_over"] == 1 and found["complete"] and found["verdict"] == "refused"
    (step,) = [row for row in found["rows"] if row["kind"] == "checkpoint"]
    assert len(step["files"]) == 3
    shown = capsys.readouterr().out
    assert shown.index("evil.pt") < shown.index("good.npy")
    assert "renamed.dat" in shown


def test_own_runs_pass_strict_and_their_copies_elsewhere_do_not(tmp_path, folder):
    run = tmp_path / "outputs/runs/digits/one"
    checkpoint(run / "checkpoints/step_00000007")
    (run / ".hydra").mkdir()
    (run / ".hydra/config.yaml").write_text("a: 1")
    found = scan(run, folder, "security=strict")
    assert [(row.kind, row.assessment.trust.name) for row in found.rows] == [
        ("checkpoint", "CHECKED")
    ]
    assert "1 item, none refused: 1 CHECKED" in found.verdict and found.ignored_files == 1
    moved = tmp_path / "moved"
    os.rename(run, moved)
    step = moved / "checkpoints/step_00000007"
    for path, known in ((moved, step.glob("[ms]*[st]")), (step / "state.pt", [step / "state.pt"])):
        rows = scan(path, folder, "security=strict", pinned(*known)).rows
        assert rows[0].assessment.trust.name == "PINNED"


def test_a_warning_is_told_and_a_note_is_not_and_strict_says_what_to_type():
    found = Assessment("a", Trust.UNTRUSTED, files={"a": FileFacts("ab" * 32, 2048, "npy")})
    found.reasons += [
        Reason("zip.overlap", severity, "a", text, "get it again")
        for severity, text in ((Severity.NOTE, "overlaps b"), (Severity.WARNING, "has NaN"))
    ]
    screen = Console(file=io.StringIO(), width=80)
    screen.print(
        render_terminal(ScanResult("x", SecurityLevel.standard, rows=[ScanRow("file", found)]), 30)
    )
    shown = screen.file.getvalue()
    assert "has NaN" in shown and "overlaps b" not in shown
    told = ScanResult("x", SecurityLevel.strict, rows=[ScanRow("file", found)]).verdict
    assert "has NaN" in told and f"security.pinned=[{'ab' * 32}]" in told


def test_each_file_of_a_dcp_folder_is_refused_with_the_way_out(tmp_path, folder):
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (dcp / name).write_bytes(b"\x80\x02.")
    with pytest.raises(SecurityError, match="3 of 3 items refused"):
        scan(dcp, folder, pinned(dcp / ".metadata"))
    for row in written(folder)["rows"]:
        assert "dcp_to_torch_save" in json.dumps(row["reasons"])


def test_what_holds_nothing_to_load_is_no_pass(tmp_path, folder):
    with pytest.raises(UsageError, match="scan.path: no file or folder"):
        scan(tmp_path / "gone", folder)
    with pytest.raises(UsageError, match="no file or folder"):  # before there is a folder
        runs.checked("job=scan", "scan.path=gone.pt")
    with pytest.raises(ConfigError, match="scan.rows"):
        scan(tmp_path, folder, "scan.rows=-1")
    (tmp_path / "wrong").mkdir()
    for _ in range(2):
        with pytest.raises(UsageError, match="no model or array in"):
            scan(tmp_path / "wrong", folder)
        (tmp_path / "wrong" / "notes.txt").write_text("no model")
    report = written(folder)
    assert (report["verdict"], report["passed_over"]) == ("empty", 1)


def test_so_many_rows_are_shown_and_the_record_has_all_and_names_forge_nothing(
    tmp_path, folder, capsys
):
    names = [*map(str, range(4)), "a\n\x1b[31mb|<b>`[x](y)"]
    for number, name in enumerate(names):
        np.save(tmp_path / f"{name}.npy", np.arange(number))
    known = pinned(*tmp_path.glob("*.npy"))
    scan(tmp_path, folder, "scan.rows=2", known)
    shown = capsys.readouterr().out
    assert shown.count(".npy") == 2 and "and 3 items more, in scan.json" in shown
    assert len(written(folder)["rows"]) == 5
    scan(tmp_path / f"{names[-1]}.npy", folder, known)
    assert "\x1b" not in capsys.readouterr().out


def test_ctrl_c_leaves_what_was_found_so_far(tmp_path, folder, monkeypatch):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(number))
    scan_item = Scanner.scan

    def scan_then_interrupt(self, thing):
        if thing.path.name == "1.npy":
            signal.raise_signal(signal.SIGINT)
        return scan_item(self, thing)

    monkeypatch.setattr(Scanner, "scan", scan_then_interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="after 1 of 3") as interrupted:
        scan(tmp_path, folder, pinned(*tmp_path.glob("*.npy")))
    assert interrupted.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    found = written(folder)
    assert not found["complete"] and [Path(r["path"]).name for r in found["rows"]] == ["0.npy"]


PROGRAM = """
import sys
from runner.__main__ import main
code = main()
assert "torch" not in sys.modules
sys.exit(code)
"""


def test_the_command_refuses_with_3_and_never_imports_torch_itself(tmp_path):
    torch.save({"w": Mark(tmp_path / "mark")}, tmp_path / "evil.pt")
    typed = ["job=scan", "scan.path=evil.pt"]
    done = runs.python("-c", PROGRAM, *typed, folder=tmp_path, COLUMNS="80")
    assert done.returncode == 3, done.stderr
    assert len([line for line in done.stderr.splitlines() if "refused" in line]) == 1
    assert hash_file(tmp_path / "evil.pt")[0] in done.stdout and not (tmp_path / "mark").exists()


def test_a_link_is_judged_by_the_name_that_a_loader_would_be_given(tmp_path, folder):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "evil.dat").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (theirs / "model.pt").symlink_to("evil.dat")
    with pytest.raises(SecurityError, match=r"model\.pt.*system"):
        scan(theirs, folder)


def test_what_cannot_be_looked_at_is_no_success(tmp_path, folder):
    os.mkfifo(tmp_path / "pipe.dat")
    with pytest.raises(SecurityError, match="a pipe"):
        scan(tmp_path / "pipe.dat", folder)
    tmp_path.joinpath("theirs", *["d"] * 65).mkdir(parents=True)
    with pytest.raises(SecurityError, match="below 64 folders"):
        scan(tmp_path / "theirs", folder)


def test_any_plain_path_can_be_named(tmp_path, folder, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    longest = theirs / ("n" * 255)
    longest.write_text("hello\n")
    monkeypatch.chdir(theirs)
    np.save("a.npy", np.ones(2))
    found = scan(Path(), folder, pinned(Path("a.npy")))
    assert (found.ignored_files, len(found.rows)) == (1, 1)
    with pytest.raises(SecurityError, match=r"begins with the text 'hello\\n', which matches no"):
        scan(longest, folder)


def test_token_ids_are_of_another_kind_and_a_pickle_by_the_same_name_is_not(tmp_path, folder):
    theirs = tmp_path / "corpus"
    theirs.mkdir()
    (np.arange(4000) % 97).astype(np.uint16).tofile(theirs / "train.bin")
    (theirs / "empty.bin").touch()
    with pytest.raises(UsageError, match="no model or array"):
        scan(theirs, folder)
    assert json.loads((folder / "scan.json").read_text())["passed_over"] == 2
    live = f"cos\nmkdir\n(S'{tmp_path / 'mark'}'\ntR.".encode()
    for number, data in enumerate((live, live + b"\n", b"N0" + live, live[:-1] + b"\xff")):
        (theirs / f"val{number}.bin").write_bytes(data)
    with pytest.raises(SecurityError, match="4 of 4 items refused; the first, .*val0.bin"):
        scan(theirs, folder)
    assert not (tmp_path / "mark").exists()


def test_a_snapshot_whose_files_are_links_to_its_blobs_is_scanned(tmp_path, folder):
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    np.save(repository / "blobs/made.npy", np.arange(3))
    os.rename(repository / "blobs/made.npy", repository / "blobs/abc")
    (snapshot / "weights.npy").symlink_to("../../blobs/abc")
    (snapshot / "outside.npy").symlink_to("../../../secret.npy")
    np.save(tmp_path / "secret.npy", np.arange(3))
    known = pinned(repository / "blobs/abc")
    with pytest.raises(SecurityError, match="1 of 2 items refused; the first, .*outside.npy"):
        scan(snapshot, folder, known)
    rows = {Path(row["path"]).name: row["trust"] for row in written(folder)["rows"]}
    assert rows == {"outside.npy": "REFUSED", "weights.npy": "PINNED"}
