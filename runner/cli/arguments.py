"""What was typed: Hydra's own flags apart from the overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from runner.errors import SecurityError, UsageError


@dataclass
class Arguments:
    """The command line, taken apart. What is None or False was not typed."""

    overrides: list[str]
    help: bool = False
    version: bool = False
    hydra_help: bool = False
    cfg: str | None = None  # job | hydra | all
    resolve: bool = False
    package: str | None = None
    run: bool = False
    multirun: bool = False
    shell_completion: bool = False
    config_path: str | None = None
    config_name: str | None = None
    config_dir: str | None = None
    experimental_rerun: str | None = None
    info: str | None = None

    @property
    def sweeps(self) -> bool:
        """Whether several jobs are to be run."""
        return self.multirun or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def only_shows(self) -> bool:
        """Whether a config is to be shown, and nothing to be run."""
        return self.cfg is not None or self.info is not None

    @property
    def only_prints(self) -> bool:
        """Whether something is to be shown, a config or Hydra's help, and nothing to be run."""
        return self.only_shows or self.hydra_help or self.shell_completion

    @property
    def is_hydras(self) -> bool:
        """Whether the answer is Hydra's alone, or the config is not ours."""
        return self.hydra_help or self.shell_completion or self.config_path is not None

    @property
    def folders(self) -> list[Path]:
        """Folders that hold config groups besides ours."""
        return [Path(self.config_dir)] if self.config_dir else []

    def for_hydra(self, overrides: Sequence[str]) -> list[str]:
        """A command line for Hydra with these overrides in place of those that were typed."""
        found = []
        for name in ("hydra_help", "resolve", "run", "multirun", "shell_completion"):
            if getattr(self, name):
                found.append(f"--{name.replace('_', '-')}")
        for name in ("cfg", "package", "config_path", "config_name", "config_dir", "info"):
            if getattr(self, name) is not None:
                found.append(f"--{name.replace('_', '-')}={getattr(self, name)}")
        return [*found, *overrides]


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Take a command line apart. Raises UsageError or SecurityError."""
    parser = _Parser(prog="runner", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--experimental-rerun")
    info = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=info)
    found = Arguments(**vars(parser.parse_intermixed_args(arguments)))
    if found.experimental_rerun is not None:
        raise SecurityError(
            "--experimental-rerun: unpickles a file, which can run anything; "
            "use checkpoint.resume=<run folder>, or the command in that run's summary.json"
        )
    if found.cfg is not None and found.sweeps:
        raise UsageError("--cfg shows one run's config: leave -m away, name one value a key")
    if found.config_dir is not None and not Path(found.config_dir).is_dir():
        raise UsageError(f"--config-dir: there is no folder {found.config_dir}")
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists what can be typed"
        if message.startswith("unrecognized arguments"):
            from runner.overrides.aliases import key_of

            name = message.partition("--")[2].partition("=")[0].split(" ")[0]
            key = key_of(name.casefold().replace("-", "_")) or "training.epochs"
            hint = f"settings are typed as key=value, without dashes: {key}=…; {hint}"
        raise UsageError(f"{message}; {hint}")
