"""The search for techniques, over steps whose badness is a rule of which techniques are on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest

from runner.replay.attribution import MOST, TechniqueSearch
from runner.replay.findings import Attempt, Blame

ULTRA = (
    "system tf32 channels_last amp attention chunked_loss accumulation recompute "
    "whole_step compile fused_optimizer pipeline"
).split()
Rule = Callable[[set[str]], bool]


def search(
    names: list[str], rule: Rule, most: int = MOST, notes: dict[str, str] | None = None
) -> tuple[Blame, list[frozenset[str]]]:
    """What comes out where a step with some techniques on is bad by `rule`, and what was tried."""
    tried = []

    def make(off: Collection[str], settings: Mapping[str, str]) -> Attempt:
        if settings.get("optimization.amp.dtype") == "fp16":
            return Attempt(bad=False)
        if not settings:
            tried.append(frozenset(off))
        return Attempt(bad=rule(set(names) - set(off)))

    as_it_was = Attempt(bad=True, techniques=list(names), notes=notes or {})
    return TechniqueSearch(as_it_was, make, most).blame(), tried


def test_one_technique_is_found_among_many() -> None:
    found, tried = search(ULTRA, lambda on: "recompute" in on)
    assert found.techniques == ["recompute"]
    assert found.verdict == "recompute"
    assert tried[0] == frozenset(ULTRA) - {"pipeline"}  # all off comes first


def test_either_of_two_is_found_though_neither_alone_is_enough() -> None:
    found, _ = search(ULTRA, lambda on: bool(on & {"compile", "whole_step"}))
    assert sorted(found.techniques) == ["compile", "whole_step"]
    assert "either one compiles the model" in found.verdict


def test_two_that_only_together_are_bad_are_both_named() -> None:
    names = ["amp", "recompute", "fused_optimizer"]
    found, _ = search(names, lambda on: {"amp", "recompute"} <= on)
    assert found.techniques == ["amp"]  # one is enough to leave out
    assert sorted(found.needed) == ["amp", "recompute"]
    assert "amp and recompute together" in found.verdict


@pytest.mark.parametrize("culprits", [("amp", "tf32"), ("attention", "recompute", "tf32")])
def test_the_set_is_the_smallest(culprits: tuple[str, ...]) -> None:
    names = ["amp", "attention", "recompute", "tf32", "channels_last"]
    found, _ = search(names, lambda on: bool(on & set(culprits)), most=60)
    assert sorted(found.techniques) == sorted(culprits)


def test_no_technique_is_to_blame_where_it_is_bad_without_any() -> None:
    found, tried = search(ULTRA, lambda on: True)
    assert found.techniques == []
    assert "no technique is to blame" in found.verdict
    assert len(tried) == 1


def test_without_techniques_nothing_is_tried() -> None:
    found, tried = search(["pipeline"], lambda on: True)
    assert tried == []
    assert "in the model, the data or the weights" in found.verdict


@pytest.mark.parametrize("most", [2, 12])
def test_it_never_tries_more_often_than_it_may_and_says_what_it_did_not(most: int) -> None:
    found, tried = search(ULTRA, lambda on: bool(on & {"tf32", "system"}), most=most)
    assert len(found.trials) <= most
    assert len(set(tried)) == len(tried)  # nothing twice
    alone = {name for off in tried if len(off) == 1 for name in off}
    assert set(found.untried) == set(ULTRA) - {"pipeline"} - alone


def test_the_type_of_amp_is_named_and_the_other_one_tried() -> None:
    found, _ = search(["amp", "tf32"], lambda on: "amp" in on, notes={"amp": "bf16"})
    assert found.verdict == "amp (bfloat16); good in float16"
    assert found.trials[-1].settings == {
        "optimization.amp.dtype": "fp16",
        "optimization.amp.initial_scale": "1.0",  # else it would be the scale that overflows
    }
