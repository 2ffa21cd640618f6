"""Ways to train in which a run is killed: the overrides of each."""

from __future__ import annotations

from pathlib import Path

COMMON = [
    "device=cpu", "device.threads=1", "monitoring.progress=false", "name=crash",
    "security.trusted=[crash_package]", "checkpoint.resume=auto", "optimization=none",
]  # fmt: skip
SHORT = ["training.steps=120", "checkpoint.every=7", "training.validate_every=25",
         "monitoring.every=5", "training.batch_size=16"]  # fmt: skip
TABLE = ["data=cancer", "model=mlp"]
POINTS = ["data._target_=crash_package.Points", "model._target_=crash_package.Net"]
HERE = "data.workers=0"
STREAM = ["data._target_=crash_package.Stream", "model._target_=crash_package.Net"]
GPT = ["data=synthetic", "data.form=tokens", "data.sequence=16", "data.samples=160", "model=gpt",
       "model.width=16", "model.heads=2", "model.depth=1", "model.dropout=0.2"]  # fmt: skip

MODES: dict[str, list[str]] = {
    "AdamW": [*SHORT, *TABLE],
    "SGD, average, micro-batch": [
        *SHORT, *POINTS, HERE, "optimizer=sgd", "optimizer.lr=0.05", "optimizer.ema=0.9",
        "training.micro_batch=6", "schedule=cosine",
    ],
    "2 data workers": [*SHORT, *POINTS, "data.workers=2", "optimization=basic"],
    "bad samples": [
        *SHORT, *POINTS, "data.workers=2", "data.bad_samples=drop", "+data.bad=[3,10,18,77,90]",
    ],
    "BatchNorm, dropout, draws": [
        *SHORT, *POINTS, HERE, "+debug.hooks=[{_target_: crash_package.Draws}]",
    ],
    "CNN in bf16": [
        *SHORT, "data=digits", "model=cnn", "model.width=4", "optimization=amp",
        "optimization.amp.dtype=bf16",
    ],
    "fp16 with a loss scale": [
        *SHORT, *TABLE, "optimization=amp", "optimization.amp.dtype=fp16", "schedule=onecycle",
    ],
    "GPT": [*SHORT, *GPT],
    "NaN batches": [
        *SHORT, *POINTS, HERE, "+data.poison=[7,90]", "debug.capture.enabled=false",
    ],
    "a stream": [*SHORT, *STREAM, "data._target_=crash_package.Continued"],
    "a stream, by 2 workers that skip": [*SHORT, *STREAM, "data.workers=2"],
    "whole step": [*SHORT, *TABLE, "optimization.whole_step.enabled=true"],
    "all debug tools": [
        *SHORT, *POINTS, HERE, "debug=full", "debug.every=10", "checkpoint.keep=1",
    ],
    "typed folder": [*SHORT, *TABLE],
    "DDP of 2": [
        *SHORT, *POINTS, HERE, "distributed=ddp", "distributed.processes=2",
        "distributed.restarts=100", "distributed.timeout_s=20",
    ],
}  # fmt: skip
SLOW = {"whole step": 0.35, "all debug tools": 0.35, "DDP of 2": 0.35}
"""Share of the kills of others that a mode gets whose start takes 10 s and more."""


def typed(mode: str, folder: Path) -> list[str]:
    """The command of a mode in a run's folder, for a fresh run and for one that goes on.

    In a typed folder its path is relative to the current folder, and a run that goes on names it.
    """
    if mode == "typed folder":
        goes_on = any(folder.glob("checkpoints/step_*/manifest.json"))
        name = "checkpoint.resume" if goes_on else "hydra.run.dir"
        common = [
            text for text in COMMON if not (goes_on and text.startswith("checkpoint.resume="))
        ]
        return [*common, *MODES[mode], f"{name}={folder.name}"]
    return [*COMMON, *MODES[mode], f"hydra.run.dir={folder}"]
