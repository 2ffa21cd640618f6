"""Large work is shared out, small work is not, and nobody can tell from what comes of it."""

from __future__ import annotations

import threading
import time

import pytest

from runner.security.gate.threads import LARGE, at_once


def test_only_large_items_are_handed_to_threads_and_order_stays() -> None:
    here = threading.get_ident()
    sizes = [1, LARGE, 2, 3 * LARGE, LARGE - 1]
    done = at_once(lambda size: (size, threading.get_ident() == here), sizes, lambda size: size)
    assert done == [(size, size < LARGE) for size in sizes]
    assert at_once(str, [], len) == []


def test_the_first_error_is_raised_and_the_rest_given_up() -> None:
    begun = []

    def work(size: int) -> int:
        begun.append(size)
        time.sleep(0.002 if size > LARGE else 0)
        return LARGE // (size - LARGE)

    with pytest.raises(ZeroDivisionError):
        at_once(work, [LARGE, *range(LARGE + 1, LARGE + 1001)], lambda size: size)
    assert LARGE in begun and len(begun) < 1000
