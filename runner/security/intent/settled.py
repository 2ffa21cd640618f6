"""What Hydra itself will act on, with every reference followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security.secrets import resolved, shows

LOGS = ("job_logging", "hydra_logging")
CALLED = ("launcher", "sweeper", "callbacks", *LOGS)
FOLDERS = {"run": ("dir",), "sweep": ("dir", "subdir")}
"""What the folder of a job is made of."""
SHOWN = (("output_subdir",), ("job", "name"), ("sweep", "subdir"))  # names of folders and files
WRITES = ("filename", "submitit_folder", "temp_folder", "mmap_folder")


def check_leads(config: DictConfig) -> None:
    """Raise ConfigError where what Hydra will act on cannot be resolved."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    in_a_job(config, tree["hydra"], "run", complete=True)


def in_a_job(config: DictConfig, hydra: Any, of: str, complete: bool = False) -> dict[str, Any]:
    """What Hydra itself will act on, `of` a run, as it would be in the first job of a sweep, or in
    the `job` that this is the config of. `folder` is where that writes to.
    """
    found: dict[str, Any] = {"choices": hydra["runtime"].get("choices") or {}, "of": of}
    with ExitStack() as stack:
        if of != "job":
            stack.enter_context(_as_in_a_job(config, hydra, of))
        for part in (*CALLED, "output_subdir", "run", "sweep"):
            found[part] = _settled(hydra.get(part), ("hydra", part), config, complete)
        found["name"] = value_of(config, ("hydra", "job", "name"), complete)
        found["folder"] = value_of(config, ("hydra", "runtime", "output_dir"))
    return found


@contextmanager
def _as_in_a_job(config: DictConfig, hydra: Any, of: str) -> Iterator[None]:
    """While entered, the config has what Hydra fills in; a copy of it would take far longer."""
    job, runtime = config.hydra.job, config.hydra.runtime
    with open_dict(config):
        job.num, job.id = 0, "0"
        parts = [value_of(config, ("hydra", of, key)) for key in FOLDERS[of]]
        runtime.output_dir = "???" if None in parts else os.path.join(*map(str, parts))
        try:
            yield
        finally:
            job.num, job.id = hydra["job"].get("num", "???"), hydra["job"].get("id", "???")
            runtime.output_dir = hydra["runtime"].get("output_dir", "???")


def _settled(raw: Any, path: tuple[Any, ...], whole: DictConfig, complete: bool) -> Any:
    """The same with every reference followed; None for those that lead nowhere."""
    if isinstance(raw, dict):
        return {k: _settled(v, (*path, k), whole, complete) for k, v in raw.items()}
    if isinstance(raw, list):
        return [_settled(v, (*path, n), whole, complete) for n, v in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw:
        return None if raw == "???" else raw
    value = value_of(whole, path, complete)
    if OmegaConf.is_config(value):
        raise SecurityError(
            f"{'.'.join(map(str, path))}: {raw} is refused: it stands for a whole group of "
            "settings; write them there"
        )
    return value


def value_of(whole: DictConfig, path: tuple[Any, ...], complete: bool = False) -> Any:
    """What a key comes to; None where that leads nowhere."""
    try:
        found, told = resolved(whole, path)
    except OmegaConfBaseException as error:
        if complete:
            key = str(error.full_key or ".".join(map(str, path)))
            raise ConfigError(key, " ".join(str(error).split())) from error
        return None
    if told is not None and (path[-1] in WRITES or path[1:] in SHOWN):
        raise shows(".".join(map(str, path)), told)
    return found
