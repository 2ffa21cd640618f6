"""Outputs in containers of any kind: looked into, or refused."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import safe_inference, sanitise
from runner.errors import UsageError


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
    for opaque in (Opaque(), Odd(), {"a": {x}}, deque([x]), {"a": x}.values()):
        with pytest.raises(TypeError, match="sanitise: a .* holds tensors"):
            sanitise(opaque)


X = torch.tensor([[1.0, math.nan]])
ODD = {
    "sparse_coo": (X.to_sparse, r"output\.to_dense\(\)"),
    "sparse_csr": (X.to_sparse_csr, r"output\.to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([X[0], X[0]]), r"list\(output\.unbind\(\)\)"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_are_not_dense_are_refused_with_what_to_do(kind: str) -> None:
    make, way_out = ODD[kind]
    odd = make()
    for output in (odd, {"a": [odd]}):
        with pytest.raises(UsageError, match=way_out):
            sanitise(output)
    for kind, options in (("probabilities", {}), ("classes", {"classes": 2})):
        with pytest.raises(UsageError, match=way_out):
            sanitise(odd, kind, **options)


class ToSparse(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


def test_safe_inference_refuses_a_sparse_output_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="layout sparse_coo"):
        safe_inference(ToSparse(), torch.ones(2, 2))


def test_what_holds_itself_or_would_be_used_up_is_refused() -> None:
    circle: list[Any] = [X]
    circle.append({"again": circle})
    with pytest.raises(UsageError, match="has a list that holds itself"):
        sanitise(circle)
    shared = [X]
    assert sanitise([shared, shared])[1].read()["nan"] == 2
    left = iter([X, X])
    for output in ((x for x in [X]), {"a": left}):
        with pytest.raises(UsageError, match="would be used up by a look at it; give a list"):
            sanitise(output)
    assert len(list(left)) == 2


def test_arrays_come_back_as_arrays() -> None:
    array = np.array([[0.5, math.nan], [0.5, 0.5]], np.float32)
    clean, changes = sanitise({"a": array[::-1], "name": np.array(["x"])})
    assert clean["a"].tolist() == [[0.5, 0.5], [0.5, 0.0]] and clean["a"].dtype == np.float32
    assert changes.read()["nan"] == 1 and math.isnan(array[0, 1])
    assert sanitise(array, "probabilities")[0].tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert sanitise(np.array([7, 1]), "classes", classes=3)[0].tolist() == [2, 1]
    whole = np.arange(3)
    assert sanitise(whole)[0] is whole
    for odd in (np.array([X, None], object), np.array([math.nan], ">f4"),
                np.ma.masked_array([1.0], [True])):  # fmt: skip
        with pytest.raises(UsageError, match="sanitise: an array of .* is no tensor"):
            sanitise(odd)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_there_is_not_is_refused(dim: int) -> None:
    with pytest.raises(UsageError, match=f"dim={dim}, and the output has 2 dimensions"):
        sanitise(X, "probabilities", dim=dim)
