from __future__ import annotations

from pathlib import Path

import pytest

from runner.record.hydra_files import (
    SHOWN_FIRST,
    hparam_columns,
    overrides_by_key,
    read_flat_config,
    recorded_overrides,
)


def test_usual_keys_and_typed_ones_are_columns_where_they_have_a_value() -> None:
    settings = {"seed": 0, "optimizer.ema": None, "data.path": "/x", "optimizer.lr": float("inf")}
    assert hparam_columns(settings, {}) == ({"seed": 0}, list(SHOWN_FIRST))
    typed = {"data.path": "/x", "debug": "full", "optimizer.ema": "null", "monitoring.every": "1"}
    expected = {"seed": 0, "data.path": "/x", "debug": "full"}
    assert hparam_columns(settings, typed) == (expected, ["data.path", "debug"])


def test_what_hydra_noted_is_read(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- +a.b=1\n- model=mlp\n- ~x\n- c=p=q\n")
    (tmp_path / ".hydra" / "config.yaml").write_text("a: {b: 1, c: null}\nd: ${oc.env:HOME}\n")
    found = overrides_by_key(recorded_overrides(tmp_path))
    assert found == {"a.b": "1", "model": "mlp", "x": "removed", "c": "p=q"}
    assert read_flat_config(tmp_path) == {"a.b": 1, "a.c": None, "d": "${oc.env:HOME}"}


BOMB = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 12)
)
DAMAGE = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "half": b"a: [1",
    "a call": b"!!python/name:os.system\n",
    "aliases": BOMB,
    "an alias": b"- *x",
    "deep": b"[" * 100_000,
    "long": b"- seed=1\n" * 100_000,
    "no bool": b"- !!bool maybe",
    "no int": b"- !!int ''",
    "no float": b"- !!float ''",
    "a time out of bounds": b"- !!timestamp 2001-01-01t00:00:00+99999999",
    "no time": b"- !!timestamp x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_notes_say_nothing(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ".hydra").mkdir()
    for name in ("overrides.yaml", "config.yaml"):
        (tmp_path / ".hydra" / name).write_bytes(damage)
    assert recorded_overrides(tmp_path) == []
    assert read_flat_config(tmp_path) == {}
