"""What a search may still begin: what that takes, what time is left, and what it can gain.

Estimates come from what has been seen: how long `none` took to start, how long the last one took
to compile and the last judgement to come. What was begun on a wrong one is ended once the search
has taken `OVER` times its budget, but for the judgement of what is `WORTH` waiting for.
"""

from __future__ import annotations

from collections.abc import Callable

from runner.techniques.break_even import COLD_S

OVER = 1.5  # times the budget: what was begun is ended then
WORTH = 10.0  # times what a judgement takes, saved by what is judged: then it is waited for
FASTER = 2.0  # times as fast as the best so far: more is not to be hoped for
FINAL_S = 6.0  # of the final at least
FINAL_STEPS = 108  # and so many at `none`: twelve blocks, of three steps of `none` and its control
STEPS = 100  # of the plain run that a judgement takes, all its runs together
PRECISION = ("tf32", "amp")  # where these are on, numbers are judged without them too


class Budget:
    """The time of one search, from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()
        self.start_s = 0.0  # of a process that compiles nothing
        self.step_s = 0.0  # at `none`
        self.compiling_s = COLD_S
        self.judged = 1.0  # times as long as was estimated

    @property
    def final_s(self) -> float:
        """Seconds that a final gets, however little is left."""
        return max(FINAL_S, FINAL_STEPS * self.step_s)

    def left(self) -> float:
        """Seconds of it; below 0 once it is overdrawn."""
        return self.seconds - (self.clock() - self.began)

    def until_end(self) -> float:
        """Seconds until what was begun is ended."""
        return max(0.0, self.left() + (OVER - 1) * self.seconds)

    def for_judging(self, costs: float, gain: float) -> float:
        """Seconds that a judgement may take, of what would save the run `gain` seconds."""
        return max(self.until_end(), 2 * costs if gain >= WORTH * costs else 0.0)

    def starting(self, compiles: bool) -> float:
        """Seconds until a candidate has made its first steps."""
        return self.start_s + (self.compiling_s if compiles else 0.0)

    def judging(self, techniques: list[str], compiles: bool) -> float:
        """Seconds until its numbers are judged: it is compiled another way, and in two precisions.

        Where a second seed has to say whether a failure was chance, it is twice that.
        """
        times = 2 if any(name in techniques for name in PRECISION) else 1
        plain = self.start_s + STEPS * self.step_s
        return self.judged * (plain + (times * self.compiling_s if compiles else 0.0))

    def finishing(self) -> float:
        """Seconds that have to be left for a final, its control and a judgement."""
        return self.start_s + FINAL_S + self.judging([], False)

    def why_not(self, techniques: list[str], compiles: bool, best_s: float) -> str:
        """Why one more candidate is not begun, the run taking `best_s` with the best so far."""
        takes = self.starting(compiles)
        if takes + self.finishing() > self.left():
            return (
                f"starting it takes about {takes:.0f} s, measuring and judging what is best "
                f"{self.finishing():.0f} s, and {max(0.0, self.left()):.0f} s are left of "
                f"optimization.auto.budget_s={self.seconds:g}"
            )
        costs = takes + (self.judging(techniques, True) if compiles else 0.0)
        return self.no_gain(
            costs, best_s * (1 - 1 / FASTER) - (self.compiling_s if compiles else 0.0)
        )

    @staticmethod
    def no_gain(costs: float, gain: float) -> str:
        """That finding out takes longer than it could save the run; empty where it does not."""
        if costs <= gain:
            return ""
        return f"finding out takes about {costs:.0f} s, and it could save {max(0.0, gain):.0f} s"
