"""What is read of `.hydra`, what of it becomes columns, and where a run says it came from."""

import json
import sys
from pathlib import Path

import pytest

from runner.core.record import provenance
from runner.core.record.hydra_files import (
    DEFAULT_COLUMNS,
    hparam_columns,
    overrides_by_key,
    read_flat_config,
    recorded_overrides,
)


def test_usual_keys_and_typed_ones_are_columns_where_they_have_a_value() -> None:
    settings = {"seed": 0, "optimizer.ema": None, "data.path": "/x", "optimizer.lr": float("inf")}
    assert hparam_columns(settings, {}, {}) == ({"seed": 0}, DEFAULT_COLUMNS)
    typed = {"data.path": "/x", "debug": "full", "optimizer.ema": "null", "monitoring.every": "1"}
    expected = {"seed": 0, "data.path": "/x", "debug": "full"}
    assert hparam_columns(settings, typed, {}) == (expected, ["data.path", "debug"])
    shared = {"data.path": "/x", "debug": "none,full"}  # as typed for a sweep
    assert hparam_columns(settings, typed, shared) == (expected, ["debug"])


BOMB = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 12)
)
TAGGED = (b"bool maybe", b"int ''", b"float ''", b"timestamp x")
TIME = b"- !!timestamp 2001-01-01t00:00:00+99999999"
DAMAGE = [b"", b"\xff\xfe\x00", b"a: [1", b"!!python/name:os.system\n", b"- *x", BOMB, TIME]
DAMAGE += [b"[" * 100_000, b"- seed=1\n" * 100_000, *(b"- !!" + value for value in TAGGED)]


def test_what_hydra_wrote_is_read_and_damage_is_nothing(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    overrides, config = tmp_path / ".hydra/overrides.yaml", tmp_path / ".hydra/config.yaml"
    overrides.write_text("- +a.b=1\n- model=mlp\n- ~x\n- c=p=q\n")
    config.write_text("a: {b: 1, c: null}\nd: ${oc.env:HOME}\n")
    found = overrides_by_key(recorded_overrides(tmp_path))
    assert found == {"a.b": "1", "model": "mlp", "x": "removed", "c": "p=q"}
    assert read_flat_config(tmp_path) == {"a.b": 1, "a.c": None, "d": "${oc.env:HOME}"}
    for damage in DAMAGE:
        overrides.write_bytes(damage)
        config.write_bytes(damage)
        assert recorded_overrides(tmp_path) == [], damage[:40]
        assert read_flat_config(tmp_path) == {}, damage[:40]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/somewhere/runner/__main__.py", "data=digits"], "python -P -m runner data=digits"),
        (["/usr/bin/runner", "name=a b"], "python -P -m runner 'name=a b'"),
        (["study.py", "--quick"], "python study.py --quick"),
    ],
)
def test_the_command_runs_again_in_a_shell(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command() == expected


def test_each_session_of_a_resumed_run_is_kept_unless_the_record_is_damaged(
    tmp_path: Path,
) -> None:
    for damaged, count in (("", 1), ("", 2), ("[1, 2", 1)):
        if damaged:
            (tmp_path / "provenance.json").write_text(damaged)
        provenance.record(tmp_path)
        sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
        assert len(sessions) == count
    assert sessions[0].keys() == {"started", "command", "git", "versions"}
    names = {"python", "platform", "torch", "numpy", "hydra-core", "omegaconf"}
    assert names <= sessions[0]["versions"].keys()
