"""`--cfg`: a config that is only printed, with names in place of what the environment holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf


@contextmanager
def by_name() -> Iterator[None]:
    """While entered, Hydra prints configs without the types of their keys.

    `${oc.env:NAME}` is resolved to that name then, which is no number and no flag.
    """
    before: Any = Hydra.get_sanitized_cfg

    def untyped(self: Hydra, cfg: DictConfig, cfg_type: str) -> DictConfig:
        found: Any = OmegaConf.to_container(before(self, cfg, cfg_type), resolve=False)
        return DictConfig(found)

    Hydra.get_sanitized_cfg = untyped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_sanitized_cfg = before  # type: ignore[method-assign]
