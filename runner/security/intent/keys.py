"""Which keys of Hydra's own a config may set; what is not here is refused."""

from __future__ import annotations

import re

from hydra.core.config_store import ConfigStore

from runner.errors import SecurityError

ALLOWED = (
    "hydra.mode", "hydra.verbose", "hydra.output_subdir", "hydra.run", "hydra.sweep",
    "hydra.job.name", "hydra.job.chdir", "hydra.job.id", "hydra.job.num", "hydra.job.config",
    "hydra.launcher", "hydra.sweeper", "hydra.callbacks", "hydra.job_logging",
    "hydra.hydra_logging", "hydra.help", "hydra.hydra_help", "hydra.searchpath",
)  # fmt: skip
REFUSED = {
    "hydra.job.env_set": "a config sets no variables of processes; set them where you start it",
    "hydra.job.env_copy": "a config reads no variables of processes; use security.environment",
    "hydra.runtime": "Hydra fills it in itself",
    "hydra.overrides": "Hydra fills it in itself",
    "hydra.job.override_dirname": "Hydra fills it in itself",
    "hydra.job.config_name": "type --config-name=…",
}
GROUPS = ("callbacks", "env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher",
          "output", "sweeper")  # fmt: skip
OF_LAUNCHERS = frozenset(
    """_target_ account array_parallelism backend batch_size constraint cpus_per_gpu cpus_per_task
    exclude fail_fast gpus_per_node gpus_per_task gres jobs max_num_timeout mem_gb mem_per_cpu
    mem_per_gpu n_jobs name nodes partition pre_dispatch prefer qos require retries
    signal_delay_s stderr_to_stdout tasks_per_node timeout timeout_min timeout_s verbose
    submitit_folder""".split()
)
OF_SWEEPERS = frozenset(
    """_target_ direction max_batch_size max_failure_rate n_jobs n_trials params sampler
    search_space study_name budget early_stop ax_config optim parametrization
    custom_search_space""".split()
)
"""Keys of plugins that a file may set: none that is a command line, a script or an address."""
DOTS = re.compile(r"[./]")


def check_key(key: str, package: str | None = None) -> None:
    """Raise SecurityError for a typed key of Hydra's that is not for people to set.

    A key that there is not is for Hydra to say.
    """
    for name in (key, *([package] if package else [])):
        first, _, rest = name.partition("/")
        if first == "hydra" and rest and DOTS.split(rest)[0] not in GROUPS:
            raise SecurityError(f"{name}: is refused: groups are {', '.join(GROUPS)}")
        why = next((REFUSED[k] for k in REFUSED if name == k or name.startswith(f"{k}.")), "")
        if why:
            raise SecurityError(f"{name}: is refused: {why}")
        if name == "hydra" or (package and name == package and name.startswith("hydra")):
            raise SecurityError(f"{name}: is refused: set its keys one by one, {ALLOWED[3]}.dir=…")


def default_of(group: str, choice: object) -> dict[str, object]:
    """What an installed plugin brings along itself; empty where it is somebody's file."""
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    if not isinstance(choice, str) or f"{choice}.yaml" not in store.list(group):
        return {}
    found = OmegaConf.to_container(store.load(f"{group}/{choice}.yaml").node, resolve=False)
    return {str(k): v for k, v in found.items()} if isinstance(found, dict) else {}
