"""Weights & Biases sink; offline unless `WANDB_MODE` or `WANDB_API_KEY` is set."""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.core.record.library_files import refuse_links
from runner.core.record.sinks.base import MetricsRow, RunDescription, Sink
from runner.core.record.storage import read_record, replace_text

RUN_ID = "wandb-run-id"  # a file in the run's folder
HEADER, BLOCK_BYTES = struct.Struct("<IHB"), 32768  # LevelDB log header: checksum, length, kind
FULL, FIRST, LAST = 1, 2, 4  # record kinds; 3 is a middle piece
MAGIC_BYTES = 7  # bytes at the start of the file
MAX_FILE_BYTES = 1 << 30


class WandbSink(Sink):
    """Logs to W&B; all processes of a run share one id, each with its own offline folder."""

    name = "wandb"

    def __init__(self) -> None:
        self.run: Any = None
        self.rows = 0  # W&B's step counter

    def open(self, run: RunDescription) -> dict[str, int]:
        """Begin a run, or continue the one with the id stored in the folder."""
        import wandb

        id_file = run.folder / RUN_ID
        resumed = id_file.is_file()
        refuse_links(run.folder / "wandb")
        run_id = read_record(id_file, 100).decode().strip() if resumed else secrets.token_hex(4)
        replace_text(id_file, run_id + "\n")
        last_steps: dict[str, int] = {}
        for step, split in read_steps(run.folder / "wandb", run_id):
            self.rows += 1
            last_steps[split] = max(last_steps.get(split, -1), step)
        # so that a run never asks for a login
        default_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.run = wandb.init(
            project=run.name.replace("/", "_")[:120],
            id=run_id,
            name=run.label,
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE") or default_mode,  # type: ignore[arg-type]
            config=dict(run.params),
            tags=[f"{key}:{value}"[:64] for key, value in run.tags.items()],
            resume="allow",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                disable_job_creation=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self.rows = max(self.rows, self.run.step)
        self.run.config.update(dict(run.tags), allow_val_change=True)
        self.run.define_metric("*", step_metric="step")
        return last_steps

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Log each row, with the run's step as `step`."""
        for row in rows:
            values = {**row.tagged, "step": row.step, "split": row.split}
            self.run.log(values, step=self.rows, commit=True)
            self.rows += 1

    def close(self, status: str, files: Sequence[Path]) -> None:
        """Save the files with the run, and end it."""
        for path in files:
            self.run.save(str(path), base_path=str(path.parent), policy="now")
        self.run.finish(exit_code=0 if status in ("done", "stopped") else 1)


def read_steps(folder: Path, run_id: str) -> Iterator[tuple[int, str]]:
    """Yield step and split of each row in the offline files of that run."""
    for path in sorted(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        for row in read_history(path):
            if isinstance(row.get("step"), int) and isinstance(row.get("split"), str):
                yield row["step"], row["split"]


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.wandb` file, up to a truncated record."""
    from wandb.proto import wandb_internal_pb2 as messages

    for data in _records(read_record(path, MAX_FILE_BYTES)):
        record: Any = messages.Record()  # type: ignore[attr-defined]  # made at run time
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in items}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log; pieces do not cross 32 KiB blocks."""
    offset, record = MAGIC_BYTES, b""
    while offset + HEADER.size <= len(data):
        if (block_left := BLOCK_BYTES - offset % BLOCK_BYTES) < HEADER.size:
            offset += block_left
            continue
        _, length, kind = HEADER.unpack_from(data, offset)
        piece = data[offset + HEADER.size : offset + HEADER.size + length]
        if not FULL <= kind <= LAST or len(piece) < length:
            return  # truncated: the process was killed while writing
        offset += HEADER.size + length
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield record
