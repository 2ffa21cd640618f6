from __future__ import annotations

from pathlib import Path

import pytest

from runner.record.hparams import column_values, common_columns, swept_columns
from runner.record.hydra_files import overrides_by_key, read_flat_config, recorded_overrides


def test_usual_columns_leave_out_what_has_no_value() -> None:
    settings = {"seed": 0, "optimizer.ema": None, "data.path": "/x", "optimizer.lr": float("inf")}
    assert common_columns(settings) == {"seed": 0}


def test_a_swept_setting_has_its_value_and_all_that_it_can_have() -> None:
    found = swept_columns({"optimizer.lr": 0.01}, {}, {"optimizer.lr": [0.1, "1e-2", 0.001]})
    assert found == ({"optimizer.lr": 0.01}, {"optimizer.lr": [0.001, 0.01, 0.1]})


def test_a_value_that_the_domain_lacks_is_in_it_all_the_same() -> None:
    """Rows with a value outside the domain would be hidden."""
    _, domains = swept_columns({"seed": 3}, {}, {"seed": [1, 2]})
    assert domains == {"seed": [1, 2, 3]}


def test_none_is_a_choice_like_others_and_a_column_of_two_kinds_is_text() -> None:
    values, domains = swept_columns({"optimizer.ema": None}, {}, {"optimizer.ema": [None, 0.99]})
    assert values == {"optimizer.ema": "null"}
    assert domains == {"optimizer.ema": ["null", "0.99"]}
    values, domains = swept_columns({"model.widths": [8, 8]}, {}, {"model.widths": [[8, 8], [4]]})
    assert domains == {"model.widths": ["[8, 8]", "[4]"]}


def test_values_of_one_kind_stay_as_they_are() -> None:
    assert column_values([1, "2.5"]) == [1, 2.5]
    assert column_values([True, "false"]) == [True, False]
    assert column_values(["true", 2.0, "x", None]) == ["true", "2", "x", "null"]


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
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff\xfe\x00", b"a: [1", b"!!python/name:os.system\n", BOMB, b"- *x", DEEP,
     b"- seed=1\n" * 100_000, b"- !!bool maybe", b"- !!int ''", b"- !!float ''",
     b"- !!timestamp 2001-01-01t00:00:00+99999999", b"- !!timestamp x"],
    ids=["empty", "no text", "half", "a call", "aliases", "an alias", "deep", "long", "no bool",
         "no int", "no float", "a time out of bounds", "no time"],
)  # fmt: skip
def test_damaged_notes_say_nothing(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ".hydra").mkdir()
    for name in ("overrides.yaml", "config.yaml"):
        (tmp_path / ".hydra" / name).write_bytes(damage)
    assert recorded_overrides(tmp_path) == []
    assert read_flat_config(tmp_path) == {}
