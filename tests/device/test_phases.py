"""Peaks of stretches that nest and overlap, and the process's own, which they do not disturb."""

from __future__ import annotations

import threading

import pytest

from runner.device import memory, phases

MIB = 2**20


@pytest.fixture(autouse=True)
def _restartable() -> None:
    if not memory.reset_peak():
        pytest.skip("the mark cannot be restarted here")


def hold(mib: int) -> None:
    """More than 32 MiB is always mapped afresh; less may come from pages the heap still holds."""
    block = bytearray(b"x") * (mib * MIB)
    del block


def added(found: phases.Peak) -> float:
    return (found.process - found.process_before) / MIB


def test_each_stretch_has_its_own_peak_and_the_outer_one_the_most() -> None:
    with phases.peak() as outer:
        with phases.peak() as first:
            hold(120)
        with phases.peak() as second:
            hold(60)
    assert 115 < added(first) < 140 and 55 < added(second) < 80 and 115 < added(outer) < 140


def test_what_an_outer_stretch_held_before_an_inner_one_began_is_not_lost() -> None:
    with phases.peak() as outer:
        hold(80)
        with phases.peak() as inner:
            hold(10)
    assert added(outer) > 75 and added(inner) < 40


def test_the_peak_of_the_process_survives_restarts_until_it_is_reset() -> None:
    hold(120)
    most = memory.peak_process_bytes()
    with phases.peak():
        hold(10)
    assert memory.process_mark() < most - 60 * MIB
    assert memory.peak_process_bytes() >= most - MIB
    memory.reset_peak()
    assert memory.peak_process_bytes() < most - 60 * MIB


def test_a_stretch_in_another_thread_takes_nothing_from_ours() -> None:
    began, over = threading.Event(), threading.Event()
    theirs: list[phases.Peak] = []

    def other() -> None:
        with phases.peak() as found:
            theirs.append(found)
            began.set()
            over.wait(10)

    with phases.peak() as ours:
        hold(70)
        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(10)  # its beginning restarts the mark
    over.set()
    thread.join()
    assert added(ours) > 65 and added(theirs[0]) < 60


def test_where_the_mark_cannot_be_restarted_samples_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "reset_peak", lambda device=None: False)
    with phases.peak() as found:
        block = bytearray(b"x") * (90 * MIB)
        found_by_then = threading.Event()
        found_by_then.wait(20 * phases.EVERY_S)
        del block
    assert not found.exact and added(found) > 80
