"""All that a run leaves behind but for times: two runs are equal where these are."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.record.storage import read_link

OF_THE_UPDATE = ("optimizer", "average", "scale", "updates", "backoff")
GUARD = ("stability", "history", "inputs", "reader", "progress")
OF_THE_MACHINE = ("watch_usage/", "watch_ranks/")  # groups of TensorBoard: at other steps, too
WITH_TIMES = ("_hparams_", "about/", "watch_profile/", "watch_memory/", "watch_plots/memory")
"""Tags of which steps are compared."""
UNCOMPARED_FILES = ("debug/history.json", "ranks/1/debug/history.json")  # of a lost process
EVERYTHING = dict.fromkeys(("scalars", "tensors"), 0)
logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says what it purges


def end_state(folder: Path) -> dict[str, str]:
    """A digest for each part of what the run in `folder` ended with."""
    restored = Checkpointer(None, keep=1).restore(folder)
    assert restored is not None and not restored.warnings
    state = restored.state
    parts: dict[str, Any] = {"step": restored.step, "weights": restored.model}
    parts |= {key: state["update"][key] for key in OF_THE_UPDATE}
    parts |= {"random": state["random"], "guard": {key: state[key] for key in GUARD}}
    parts["bad samples"] = state.get("bad_samples")
    checkpoints = folder / "checkpoints"
    parts |= {"checkpoints": sorted(path.name for path in checkpoints.iterdir())}
    parts |= {link: read_link(checkpoints / link) for link in ("best", "last")}
    parts |= {"metrics.jsonl": list(_rows(folder)), "TensorBoard": _events(folder)}
    summary = json.loads((folder / "summary.json").read_text())
    keys = ("status", "steps", "skipped_steps", "metrics", "best", "best_step")
    parts["summary"] = {key: summary[key] for key in keys}
    parts |= {"files": run_files(folder), "layers": _inspected_layers(folder)}
    return {name: digest(value) for name, value in parts.items()}


def _rows(folder: Path) -> Iterator[str]:
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        if json.loads(line)["split"] != "system":
            yield line


def _events(folder: Path) -> dict[str, list[Any]]:
    """All points by tag, as TensorBoard shows them."""
    events = EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()
    tags = events.Tags()
    points: dict[str, list[Any]] = {}
    for tag in tags["scalars"]:
        points[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in tags["tensors"]:
        points[tag] = []
        for event in events.Tensors(tag):
            content = event.tensor_proto.SerializeToString()
            points[tag].append((event.step, None if tag.startswith(WITH_TIMES) else content))
    return {tag: points[tag] for tag in points if not tag.startswith(OF_THE_MACHINE)}


def run_files(folder: Path) -> list[str]:
    """The files of the run; event files count as one."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {"events" if "tfevents" in p.name else str(p.relative_to(folder)) for p in paths}
    stacks = "debug/ranks/"  # of a process that stood still while others were stopped or lost
    return sorted(n for n in names - {*UNCOMPARED_FILES} if not n.startswith((".", stacks)))


def _inspected_layers(folder: Path) -> list[Any]:
    """Steps, layers and dead units that `debug=gradients` has recorded."""
    if not (path := folder / "debug" / "gradients.json").exists():
        return []
    record = json.loads(path.read_text())
    return [(row["step"], row["layer"], row.get("dead")) for key in ("layers", "units")
            for row in record[key]]  # fmt: skip


def digest(value: Any) -> str:
    """Of plain values and tensors, nested in any way."""
    digest = hashlib.sha256()
    for part in _bytes(value):
        digest.update(part)
    return digest.hexdigest()


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _bytes(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _bytes(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()
