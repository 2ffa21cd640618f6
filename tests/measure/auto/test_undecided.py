"""`optimization=auto` without a decision keeps the techniques of `basic`, unless refuted."""

from __future__ import annotations

import pytest

from runner import compose
from runner.core.errors import WorkerFailure
from runner.measure.auto import resolve
from runner.measure.auto.search import NONE, Candidate, SearchResult
from tests.runs import opened

FREE = ["system", "fused_optimizer"]
AUTO = ("optimization=auto", "training.steps=5", "device=cpu")


def plainest(**outcome: object) -> list[Candidate]:
    row = Candidate(" ".join(FREE), FREE)
    for name, value in outcome.items():
        setattr(row, name, value)
    return [row]


def selected(
    result: SearchResult, monkeypatch: pytest.MonkeyPatch, *typed: str
) -> tuple[set[str], str]:
    """The techniques that are on, and the reason, after a search with this result."""
    monkeypatch.setattr(resolve, "_select", lambda config, given: result)
    given = resolve.resolve_auto(compose([*AUTO, *typed]))
    assert given.optimization is not None
    enabled = {name for name, one in given.optimization.techniques() if one.enabled}
    return enabled, given.chosen[0].reason


def test_an_undecided_search_keeps_the_techniques_of_basic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("optimization=basic", "training.steps=5") as run:
        basic = {row.name for row in run.unapplied_techniques if row.requested}
        basic |= {name for name, _ in run.techniques}
    tried = plainest(final_interval=(0.97, 1.04))
    undecided = SearchResult(reason="no candidate was faster", tried=tried)
    enabled, reason = selected(undecided, monkeypatch)
    assert enabled == basic == set(FREE)
    assert reason == "no candidate was faster; undecided, so the techniques of basic are kept"


def test_a_failed_measurement_keeps_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WorkerFailure("failed", "it does not start")

    monkeypatch.setattr(resolve, "estimate_run", fail)
    given = resolve.resolve_auto(compose([*AUTO]))
    assert given.optimization is not None
    assert {name for name, one in given.optimization.techniques() if one.enabled} == set(FREE)


@pytest.mark.parametrize(
    ("outcome", "typed", "kept"),
    [
        ({"final_interval": (0.80, 0.95)}, [], set()),  # certainly slower
        ({"parity": "FAIL"}, [], set()),
        ({}, ["optimization.auto.without=[system]"], {"fused_optimizer"}),
        ({}, ["optimization.auto.without=[system,fused_optimizer]"], set()),
    ],
)
def test_what_is_refuted_or_excluded_is_not_kept(
    outcome: dict[str, object], typed: list[str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, _ = selected(SearchResult(tried=plainest(**outcome)), monkeypatch, *typed)
    assert enabled == kept


def test_a_selection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = SearchResult("amp", ["amp"], "1.3 times as fast", tried=plainest())
    assert selected(chosen, monkeypatch)[0] == {"amp"}
    assert NONE == "none"
