"""The table of names, held against what is installed."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from packaging.version import Version

from runner.security.intent.registry import OURS, ROOTS, nearest, torch_names
from runner.security.targets import NEVER_TRUSTED, inside, resolve

TESTED = Version("2.13")
INSTALLED = Version(Version(torch.__version__).base_version)
PLACES = (*ROOTS, "torch.optim.lr_scheduler", "torch.optim.swa_utils")


def public_classes() -> set[str]:
    """Classes that are torch's own, by the places where people find them."""
    found = set()
    for place in PLACES:
        for name, value in vars(import_module(place)).items():
            home = getattr(value, "__module__", "")
            own = isinstance(value, type) and not name.startswith("_") and value.__name__ == name
            there = home == place if place not in ROOTS else inside(home, place)
            if own and there and "datapipes" not in home:
                found.add(f"{place}.{name}")
    return found


def test_every_public_class_of_the_installed_torch_is_in_it() -> None:
    assert public_classes() - torch_names() == set()


def test_every_name_in_it_is_a_class_of_the_installed_torch() -> None:
    there = public_classes()
    gone = {name for name in torch_names() if any(name == f"{p}.{name.rpartition('.')[2]}"
            for p in PLACES)} - there  # fmt: skip
    assert gone == set() or INSTALLED < TESTED


@pytest.mark.parametrize("target", sorted(torch_names() | OURS))
def test_a_name_in_it_leads_to_what_it_says(target: str) -> None:
    try:
        found = resolve(target, "model._target_", [])
    except Exception:
        assert INSTALLED < TESTED, target
    else:
        assert found.__name__ == target.rpartition(".")[2]


def test_what_was_probably_meant_is_found_and_never_something_far_off() -> None:
    assert nearest("torch.nn.Linaer") == "torch.nn.Linear"
    assert nearest("torch.Linear") == "torch.nn.Linear"
    assert nearest("torch.optim.Adam") == "torch.optim.Adam"
    assert nearest("os.system") == ""


def test_neither_the_standard_library_nor_any_loader_can_be_trusted_as_a_whole() -> None:
    assert {"os", "subprocess", "torch", "hydra", "runner", "pip", "yaml"} <= NEVER_TRUSTED
