"""Every option opens, and what it needs is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from runner.data.config import OPTIONS, Arrays, DataConfig, Tabular
from runner.data.open import OPENERS, open_data
from runner.errors import ConfigError

WITHOUT_FILES = ["cancer", "digits", "stdlib_parts", "stdlib_text", "synthetic"]


def nothing(target: str, key: str) -> Any:
    raise LookupError(target)


def test_every_option_has_an_opener() -> None:
    assert set(OPENERS) == set(OPTIONS)


@pytest.mark.parametrize("kind", WITHOUT_FILES)
def test_data_without_files_of_the_users_opens_as_it_is(kind: str) -> None:
    source = open_data(OPTIONS[kind](), nothing)
    assert len(source.train) > len(source.validation) > 0
    assert not set(source.train.tolist()) & set(source.validation.tolist())
    assert source.in_memory


def test_a_field_without_a_value_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="data.path: data=arrays needs it"):
        open_data(Arrays(), nothing)
    with pytest.raises(ConfigError, match="data.target"):
        open_data(Tabular(path="people.csv"), nothing)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="no data 'digit'"):
        open_data(DataConfig(kind="digit"), nothing)
