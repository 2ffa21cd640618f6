"""Text of `--help` and `--version`; groups and options are read from the config files."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

from runner.core.config.groups import GROUP_ALIASES, default_options, group_options
from runner.core.module_path import __version__

ABOUT = """\
Trains a PyTorch model on real data, from a config composed on the command line:
group=option selects a file of conf/, key=value sets one key. Each run writes to its own
folder under outputs/runs/; `python -m runner.report --tensorboard` shows all runs.
"""
COMMON_KEYS = {
    "name": "the runs' folder under outputs/runs/ (default: data-model)",
    "seed": "initial weights, order of samples, augmentation, dropout",
    "training.steps, .epochs": "length of the run; set one of them",
    "training.batch_size": "samples per update",
    "training.validate_every": "steps between validations",
    "optimizer.lr": "the peak of the learning rate",
    "data.path, data.target": "your file or folder, and the column to predict",
    "data.workers": "loader processes (default: chosen, with a reason)",
    "model._target_": "a class of your own, with security.trusted=[its_package]",
    "checkpoint.resume": "auto, or the folder of a run to continue",
    "checkpoint.every": "steps between checkpoints (default: at each validation)",
    "optimization.amp.enabled": "one technique on or off; the same for tf32, compile, …",
    "distributed.processes": "with distributed=ddp: how many train one model together",
    "scan.path": "job=scan: a file or folder to check before use",
    "replay.path": "job=replay: a bad step of a run, in its debug/captures",
    "security.environment": "[NAME]: variables that a config may read as ${oc.env:NAME}",
    "optimization.strict": "true: a technique that does not engage is an error",
}
EXAMPLES = {
    "": "digits with a small network, a few seconds",
    "experiment=stdlib_gpt optimization=advanced": "a GPT on Python's own source",
    "data=tabular data.path=my.csv data.target=price": "your own table",
    "data=images data.path=photos model._target_=my_package.Net \\\n"
    "    security.trusted=[my_package] +model.width=64": "your own model; + hands it an argument",
    "-m optimizer=adamw,sgd seed=0,1,2": "a sweep of six jobs, each in a process of its own",
    "job=benchmark": "which optimisation level is faster here, with intervals",
}
EXIT_CODES = {
    "0": "done",
    "1": "an error in the runner or in your code, with a traceback in run.log; or a failed check",
    "2": "usage error: config, missing file, unavailable device",
    "3": "refused by a security check",
    "4": "gave up: too many bad steps",
    "5": "no usable checkpoint or capture, or writing failed",
    "6": "benchmark: a regression against the stored result",
    "7": "some runs of a sweep or benchmark failed",
    "128+n": "ended by Ctrl-C (130), SIGTERM (143) or the like; a run in training is saved",
}
FLAGS = {
    "--cfg job|hydra|all": "show the composed config and run nothing; -p model shows one part",
    "-m": "run every combination of comma-separated values",
    "-cd FOLDER": "also search FOLDER for groups and experiments",
    "--version": "versions",
}


def help_text() -> str:
    """Return the text of `--help`."""
    command = "runner" if os.path.basename(sys.argv[0]) == "runner" else "python -m runner"
    defaults, groups = default_options(), group_options()
    lines = []
    for group in [*defaults, *(g for g in groups if g not in defaults)]:
        marks = {name: "*" if defaults.get(group) == name else " " for name in groups[group]}
        option_texts = {f"{marks[name]} {name}": text for name, text in groups[group].items()}
        lines.append(_format_table(f"  {group}", option_texts, 22))
    aliases = ", ".join(f"{alias}=" for alias in GROUP_ALIASES)
    examples = [
        f"  # {description}\n  {command} {line}".rstrip() for line, description in EXAMPLES.items()
    ]
    parts = (
        f"Usage: {command} [group=option …] [key=value …]\n\n{ABOUT}",
        "\n".join(["Groups and their options (* is the default)", *lines]),
        f"  Also understood: {aliases}; options in any case",
        _format_table("Keys typed all the time (all of them: --cfg job)", COMMON_KEYS, 26),
        "\n".join(["Examples", *examples]),
        _format_table("Flags", FLAGS, 22),
        _format_table("Exit codes", EXIT_CODES, 10),
    )
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def version_text() -> str:
    """Return the versions of the runner, torch, Hydra and OmegaConf."""
    lines = [f"runner {__version__}"]
    for package in ("torch", "hydra-core", "omegaconf"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines) + "\n"


def _format_table(title: str, rows: dict[str, str], width: int) -> str:
    return "\n".join([title, *(f"  {name:<{width}} {text}" for name, text in rows.items())])
