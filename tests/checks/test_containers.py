"""Outputs in containers of any kind: looked into, or refused."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import sanitise


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    name: str = "mine"


class Opaque:
    def __init__(self) -> None:
        self.logits = torch.tensor([math.nan])


class Odd(Mapping[str, Any]):
    """A mapping that is not made of items."""

    def __getitem__(self, key: str) -> Any:
        return {"a": torch.tensor([math.nan])}[key]

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_every_container_is_looked_into_or_refused() -> None:
    x = torch.tensor([1.0, math.nan])
    lists: defaultdict[str, Any] = defaultdict(list, a=x)
    for nest in (lists, OrderedDict(a=x), UserDict(a=x), MappingProxyType({"a": x})):
        clean, changes = sanitise(nest)
        assert type(clean) is type(nest) and clean["a"].tolist() == [1, 0]
        assert changes.read()["nan"] == 1 and nest["a"] is x
    assert sanitise(lists)[0]["new"] == []
    answer = Answer(x)
    clean, changes = sanitise([answer])
    assert clean[0].logits.tolist() == [1, 0] and clean[0].name == "mine"
    assert changes.read()["nan"] == 1 and answer.logits is x
    for opaque in (Opaque(), Odd(), {"a": {x}}):
        with pytest.raises(TypeError, match="sanitise: a .* holds tensors"):
            sanitise(opaque)
