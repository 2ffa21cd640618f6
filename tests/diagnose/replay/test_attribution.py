"""The search for techniques, over steps whose badness is a rule of which techniques are on."""

from collections.abc import Callable, Collection

import pytest

from runner.diagnose.replay.investigation import MAX_ATTEMPTS, TechniqueSearch
from runner.diagnose.replay.results import Attempt, Blame

ULTRA = (
    "system tf32 channels_last amp attention chunked_loss accumulation recompute "
    "whole_step compile fused_optimizer pipeline"
).split()
FEW = ["amp", "attention", "recompute", "tf32", "channels_last"]
Rule = Callable[[set[str]], bool]


def search(
    names: list[str], rule: Rule, most: int = MAX_ATTEMPTS, notes: dict[str, str] | None = None
) -> tuple[Blame, list[frozenset[str]]]:
    """What comes out where a step with some techniques on is bad by `rule`, and what was tried."""
    tried = []

    def make(off: Collection[str]) -> Attempt:
        tried.append(frozenset(off))
        return Attempt(bad=rule(set(names) - set(off)))

    as_it_was = Attempt(bad=True, techniques=list(names), notes=notes or {})
    return TechniqueSearch(as_it_was, make, most).search(), tried


@pytest.mark.parametrize(
    ("culprits", "verdict"),
    [
        (["recompute"], "recompute"),
        (["compile", "whole_step"], "both compile the model"),
        (["amp", "tf32"], "amp (bfloat16) and tf32: the step is good only without all of them"),
        (["attention", "recompute", "tf32"], "only without all of them"),
    ],
)
@pytest.mark.parametrize("others", [FEW, ULTRA], ids=["few", "ultra"])
def test_the_set_is_the_smallest(culprits: list[str], verdict: str, others: list[str]) -> None:
    names = list(dict.fromkeys([*others, *culprits]))
    found, tried = search(names, lambda on: bool(on & set(culprits)), notes={"amp": "bf16"})
    assert sorted(found.techniques) == culprits
    assert verdict in found.verdict
    assert tried[0] == frozenset(names) - {"pipeline"}  # all off comes first
    assert len(set(tried)) == len(tried) == len(found.trials)  # nothing twice


def test_two_that_only_together_are_bad_are_both_named() -> None:
    names = ["amp", "recompute", "fused_optimizer"]
    found, _ = search(names, lambda on: {"amp", "recompute"} <= on)
    assert found.techniques == ["amp"]  # one is enough to leave out
    assert sorted(found.needed) == ["amp", "recompute"]
    assert "amp and recompute together" in found.verdict


@pytest.mark.parametrize(
    ("names", "tries", "verdict"),
    [
        (ULTRA, 1, "no technique is the cause"),
        (
            ["pipeline"],
            0,
            "no technique was active: the cause is in the model, the data or the weights",
        ),
    ],
)
def test_where_it_is_bad_without_any_none_is_blamed(
    names: list[str], tries: int, verdict: str
) -> None:
    found, tried = search(names, lambda on: True)
    assert (found.techniques, len(tried)) == ([], tries)
    assert verdict in found.verdict


@pytest.mark.parametrize("most", [2, 15])
def test_it_never_tries_more_often_than_it_may(most: int) -> None:
    found, _ = search(ULTRA, lambda on: bool(on & {"tf32", "system"}), most=most)
    assert len(found.trials) == most
    assert {"tf32", "system"} <= set(found.techniques)
    assert "not narrowed down further" in found.verdict
