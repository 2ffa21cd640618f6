"""What was checked is not copied once more to be loaded, and is loaded as the libraries do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runner.security.gate.examine import examine
from runner.security.gate.held import hold
from runner.security.gate.load import SHARES, loaded
from runner.security.gate.policy import Bounds, Policy
from tests.security.files.archives import entry, safetensors, saved


def lies_in(start: int, memory: memoryview) -> bool:
    own = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return bool(own <= start < own + len(memory))


@pytest.mark.parametrize("kind", ["torch_zip", "safetensors"])
def test_tensors_lie_in_the_memory_that_the_file_was_read_to(kind: str, tmp_path: Path) -> None:
    path, drawn = tmp_path / "state", torch.Generator().manual_seed(0)
    state = {"weight": torch.randn(30, 7, generator=drawn), "step": torch.tensor(5)}
    save: Callable[[Any, Path], None] = torch.save if kind == "torch_zip" else save_file
    save(state, path)
    assert SHARES
    with hold(path) as held:
        found = loaded(held.view, kind)
        assert all(lies_in(tensor.data_ptr(), held.view) for tensor in found.values())
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    found["weight"].zero_()  # in this process's memory alone
    again: dict[str, Tensor] = {}
    with hold(path) as held:
        again = loaded(held.view, kind)
    assert torch.equal(again["weight"], state["weight"]) and int(found["step"]) == 5


def test_tensors_that_share_a_storage_still_do(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    torch.save({"all": whole, "rows": whole.view(3, 4), "none": torch.empty(0)}, tmp_path / "a.pt")
    with hold(tmp_path / "a.pt") as held:
        found = loaded(held.view, "torch_zip")
    found["all"][5] = -1
    assert found["rows"][1, 1] == -1 and found["none"].numel() == 0


@pytest.mark.parametrize("kind", ["uint16", "float8_e5m2"])
def test_what_torch_cannot_read_of_its_old_format_is_said_in_plain_words(kind: str) -> None:
    old = saved(torch.ones(3).to(getattr(torch, kind)), _use_new_zipfile_serialization=False)
    (reason,) = examine(old, "a.pth", Policy()).reasons
    assert "torch itself cannot read from its old format" in str(reason)


def test_a_table_of_too_many_tensors_is_refused_before_it_is_read() -> None:
    few = Policy(bounds=Bounds(tensors=3))
    for count, broken in ((3, b""), (4, b"["), (4, b"")):
        table = {f"{i}": entry([0], 0, 0) for i in range(count)}
        data = safetensors({"__metadata__": {"by": "us"}, **table}) + broken
        found = examine(data, "a.safetensors", few)
        codes = [reason.code for reason in found.reasons]
        assert codes == (["safetensors.tensors"] if count > 3 else [])


ARRAYS = {
    "plain": np.arange(24.0).reshape(4, 6),
    "by column": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(4, 6)),
    "nothing": np.empty((0, 3), np.float32),
    "one": np.array(3.5),
    "text": np.array(["a", "bc"]),
    "named": np.zeros(3, [("größe", np.float32), ("n", np.int8)]),
    "other order": np.arange(5, dtype=">f8"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_as_numpy_reads_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, ARRAYS[name])
    wanted = np.load(path)
    with hold(path) as held:
        found = loaded(held.view, "npy")
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.flags.f_contiguous == wanted.flags.f_contiguous and found.flags.writeable
    assert found.tobytes() == wanted.tobytes()
