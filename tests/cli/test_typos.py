"""Misspelled words are told without Hydra, and as Hydra's composition would tell them."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from runner.cli.typos import find_typo
from runner.core.config.composing import compose_raw
from runner.core.config.groups import group_options
from runner.core.errors import ConfigError

WORDS = (
    *("optimisation=baisc", "optimisation=ulrta", "optimization=ulrta", "distributed=dpd"),
    *("seeed=3", "trainnig.steps=3", "training.stpes=4", "optimizer.learning=0.1"),
    *("stability.watch.gpuu=true", "trainnig.batch_size=many", "checkpiont.every=3"),
    *("model=mpl", "data=imagse", "job=eval", "trainer.max_steps=3", "lr=0.1", "wandb=x"),
    *("optimization.amp.dtpye=bf16", "optimization.amp.dtpye=bf17", "seed.x=1", "x=1"),
)


@pytest.mark.parametrize("word", WORDS)
def test_an_early_error_equals_that_of_composing(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_raw([word], hydra_too=True)
    typo = find_typo([word])
    assert typo is None or str(typo) == str(caught.value)


def test_the_usual_mistakes_are_told_at_once() -> None:
    assert sum(find_typo([word]) is not None for word in WORDS) >= 9


def test_no_option_and_no_key_that_exists_is_taken_for_a_mistake() -> None:
    words = [f"{group}={option}" for group, named in group_options().items() for option in named]
    words += [f"{key}=1" for key in _keys(compose_raw(["stability=strict", "debug=full"]))]
    assert len(words) > 200
    assert [word for word in words if find_typo([word])] == []


@pytest.mark.parametrize("word", ["+trainnig.steps=3", "~trainnig", "hydra.jb.name=x", "model.x=1"])
def test_ambiguous_arguments_are_left_to_hydra(word: str) -> None:
    assert find_typo([word]) is None
    assert find_typo(["optimization=ulrta", "hydra.searchpath=[pkg://own]"]) is None


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in map(str, config):
        keys.append(f"{prefix}{key}")
        node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            keys += _keys(node, f"{prefix}{key}.")
    return keys
