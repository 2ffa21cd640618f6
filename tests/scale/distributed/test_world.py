"""What processes send to each other as Python objects has no tensors of a device."""

from collections import defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.core.errors import UsageError
from runner.core.execution import evaluation
from tests import runs
from tests.scale.distributed.processes import alone, world_of_one

Pair = namedtuple("Pair", "first second")
REFUSED = r"World.{}: a tensor of shape \[2\] on meta would arrive on the sender's device"


@dataclass
class Facts:
    """A value of a user's own."""

    values: dict[str, Any] = field(default_factory=dict)


def nests(tensor: Tensor) -> dict[str, Any]:
    layer = nn.Linear(1, 2)
    layer.bias = nn.Parameter(tensor)
    return {
        "plain": tensor,
        "dict": {"loss": 1.0, "count": tensor},
        "list in tuple": (1, ["text", tensor]),
        "set": {tensor},
        "namedtuple": Pair(1, tensor),
        "defaultdict": defaultdict(list, {"a": [tensor]}),
        "dataclass": Facts({"a": {"b": tensor}}),
        "attribute": SimpleNamespace(inner=SimpleNamespace(value=tensor)),
        "parameter of a module": layer,
        "exception": ValueError("text", tensor),
    }


def test_tensors_of_a_device_are_refused_before_anything_is_pickled_or_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickled: list[Any] = []
    own = Tensor.__reduce_ex__
    monkeypatch.setattr(
        Tensor, "__reduce_ex__", lambda x, protocol: (pickled.append(x), own(x, protocol))[1]
    )
    with world_of_one() as world:
        for value in nests(torch.zeros(2, device="meta")).values():
            with pytest.raises(UsageError, match=REFUSED.format("all_gather")):
                world.all_gather(value)
            with pytest.raises(UsageError, match=REFUSED.format("broadcast_choice")):
                world.broadcast_choice(lambda value=value: value)
        assert [x for x in pickled if x.device.type == "meta"] == []
        for name, value in nests(torch.ones(2)).items():
            if name != "set":  # its tensors are compared by identity
                (same,) = world.all_gather(value)
                assert type(same) is type(value)
                assert type(world.broadcast_choice(lambda value=value: value)) is type(value)


def test_all_processes_raise_where_rank_zero_decides_for_a_tensor_of_a_device() -> None:
    with world_of_one() as world:
        sent: list[Any] = []
        own = torch.distributed.broadcast_object_list
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.distributed, "broadcast_object_list",
                lambda values, source: (sent.extend(values), own(values, source))[1],
            )  # fmt: skip
            with pytest.raises(UsageError):
                world.broadcast_choice(lambda: {"a": torch.zeros(2, device="meta")})
    assert isinstance(sent[1], UsageError)


def test_the_totals_of_a_validation_are_on_the_cpu_before_they_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        devices = "cuda:0", "cuda:1"
        first, second = (torch.zeros(3, device=device) for device in devices)
    sums = {"loss": first, "own": {"parts": [second]}}
    with alone(runs.config("distributed=ddp", "data=cancer", "checkpoint=off")) as run:
        monkeypatch.setattr(evaluation, "_batch_sums", lambda *_: sums)
        monkeypatch.setattr(evaluation, "_add_sums", lambda totals, new: new or totals)
        monkeypatch.setattr(run.objective, "all_metrics", lambda totals: {})
        monkeypatch.setattr(run.objective, "confusion", lambda totals: None)
        gathered: list[Any] = []
        monkeypatch.setattr(run.world, "all_gather", lambda x: [gathered.append(x), x][1:])
        evaluation.evaluate(run)
    (totals,) = gathered
    parts = totals["loss"], *totals["own"]["parts"]
    assert [part.device.type for part in parts] == ["cpu", "cpu"]
