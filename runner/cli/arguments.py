"""Parser of the command line, which separates Hydra's flags from the overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from runner.errors import SecurityError, UsageError

MODE = "hydra.mode=MULTIRUN"


@dataclass
class Arguments:
    """The parsed command line; fields that are None or False were not typed."""

    overrides: list[str]
    help: bool = False
    version: bool = False
    cfg: str | None = None  # job | hydra | all
    resolve: bool = False
    package: str | None = None
    run: bool = False
    multirun: bool = False
    config_path: str | None = None
    config_name: str | None = None
    config_dir: str | None = None
    experimental_rerun: str | None = None

    @property
    def sweeps(self) -> bool:
        """Whether several jobs are to be run."""
        return self.multirun or MODE in self.overrides

    @property
    def folders(self) -> list[Path]:
        """Folders with config groups in addition to ours."""
        return [Path(self.config_dir)] if self.config_dir else []

    def for_hydra(self) -> list[str]:
        """Return the command line for Hydra."""
        switches = ("resolve", "run", "multirun")
        typed = [f"--{name}" for name in switches if getattr(self, name)]
        return [*typed, *self.flags("cfg", "package"), *self.config_flags(), *self.overrides]

    def config_flags(self) -> list[str]:
        """Return the typed flags that locate configs."""
        return self.flags("config_path", "config_name", "config_dir")

    def flags(self, *names: str) -> list[str]:
        """Return the flags of these names that were typed, with their values."""
        typed = [(name.replace("_", "-"), getattr(self, name)) for name in names]
        return [f"--{name}={value}" for name, value in typed if value is not None]


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Parse a command line. Raises UsageError or SecurityError."""
    parser = _Parser(prog="runner", add_help=False)
    parser.add_argument("overrides", nargs="*")
    for long, short in (("help", "-h"), ("run", "-r"), ("multirun", "-m")):
        parser.add_argument(f"--{long}", short, action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    for long, short in (("path", "-cp"), ("name", "-cn"), ("dir", "-cd")):
        parser.add_argument(f"--config-{long}", short)
    parser.add_argument("--experimental-rerun")
    typed = Arguments(**vars(parser.parse_intermixed_args(arguments)))
    if typed.experimental_rerun is not None:
        raise SecurityError(
            "--experimental-rerun: unpickles a file, which can run any code; "
            "use checkpoint.resume=<run folder>, or the command in that run's summary.json"
        )
    if typed.cfg is not None and typed.sweeps:
        raise UsageError("--cfg shows one run's config: remove -m and give one value per key")
    if typed.config_dir is not None and not Path(typed.config_dir).is_dir():
        raise UsageError(f"--config-dir: there is no folder {typed.config_dir}")
    return typed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists what can be typed"
        if message.startswith("unrecognized arguments"):
            from runner.overrides.aliases import key_of

            name = message.partition("--")[2].partition("=")[0].split(" ")[0]
            example = f": {key}=…" if (key := key_of(name)) else ""
            hint = f"settings are typed as key=value, without dashes{example}; {hint}"
        raise UsageError(f"{message}; {hint}")
