"""Parser of the command line, which separates Hydra's flags from the overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from runner.core.errors import SecurityError, UsageError

MULTIRUN_MODE = "hydra.mode=MULTIRUN"


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
    def is_sweep(self) -> bool:
        """Whether several jobs are to be run."""
        return self.multirun or MULTIRUN_MODE in self.overrides

    @property
    def config_folders(self) -> list[Path]:
        """Folders with config groups in addition to ours."""
        return [Path(self.config_dir)] if self.config_dir else []

    def hydra_arguments(self) -> list[str]:
        """Return the command line for Hydra."""
        switches = ("resolve", "run", "multirun")
        flags = [f"--{name}" for name in switches if getattr(self, name)]
        return [*flags, *self.flags("cfg", "package"), *self.config_flags(), *self.overrides]

    def config_flags(self) -> list[str]:
        """Return the typed flags that locate configs."""
        return self.flags("config_path", "config_name", "config_dir")

    def flags(self, *names: str) -> list[str]:
        """Return the flags of these names that were typed, with their values."""
        flag_values = [(name.replace("_", "-"), getattr(self, name)) for name in names]
        return [f"--{name}={value}" for name, value in flag_values if value is not None]


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
    parsed = Arguments(**vars(parser.parse_intermixed_args(arguments)))
    for text in arguments:
        if not text.isascii() and any("\udc80" <= sign <= "\udcff" for sign in text):
            escaped = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            fix = "rename the file or folder, or name a link to it"
            raise UsageError(f"{escaped}: has bytes that are not UTF-8; {fix}")
    if parsed.experimental_rerun is not None:
        fix = "use checkpoint.resume=<run folder>, or the command in that run's summary.json"
        raise SecurityError(f"--experimental-rerun: unpickles a file, which can run code; {fix}")
    if parsed.cfg is not None and parsed.is_sweep:
        raise UsageError("--cfg shows one run's config: remove -m and give one value per key")
    if parsed.config_dir is not None and not Path(parsed.config_dir).is_dir():
        raise UsageError(f"--config-dir: there is no folder {parsed.config_dir}")
    return parsed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists what can be typed"
        if message.startswith("unrecognized arguments"):
            from runner.core.config.aliases import find_key

            name = message.partition("--")[2].partition("=")[0].split(" ")[0]
            example = f": {key}=…" if (key := find_key(name)) else ""
            hint = f"settings are typed as key=value, without dashes{example}; {hint}"
        raise UsageError(f"{message}; {hint}")
