"""Transfer of loss, norm and skip flags to the host, in windows of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.core.device.device import copy_to_host
from runner.core.interfaces.hook import Report, Step

if TYPE_CHECKING:
    from runner.core.train.user_values import UserValues

MAX_REPORTED_WINDOWS = 4  # windows kept after they were reported
MAX_SKIPPED_STEPS = 10_000  # remembered skipped steps


@dataclass
class _Window:
    """Consecutive steps with numbers that are being copied to the host."""

    first: int
    earlier: list[list[float]]  # rows already read by a checkpoint within the window
    rows: Tensor  # [steps, 3]: loss, gradient norm, skipped
    ready: torch.Event | None  # recorded after an asynchronous copy
    elapsed: float | Callable[[], float]  # seconds spent in steps until its end
    samples: int


class StepMetricsReader:
    """Collects the numbers of steps on the device and returns them as reports.

    On an accelerator a window is copied to pinned memory and read when the next one is closed,
    so the host does not wait; reports are then one window late.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Tensor] = []
        self.earlier: list[list[float]] = []
        self.first = 0
        self.samples = 0
        self.seconds = 0.0
        self.windows: deque[_Window] = deque()
        self.reported: deque[tuple[int, list[list[float]]]] = deque(maxlen=MAX_REPORTED_WINDOWS)
        self.skipped: deque[int] = deque(maxlen=MAX_SKIPPED_STEPS)  # numbers of reported steps
        self.user: UserValues | None = None  # what user code logs; None: nothing yet
        self.ended = False  # the training has: nothing is written any more

    def user_values(self) -> UserValues:
        """Return the collection of what user code logs; it is copied with each window."""
        if self.user is None:
            from runner.core.train.user_values import UserValues  # most runs need none

            self.user = UserValues()
        return self.user

    def add(self, step: Step, samples: int) -> None:
        """Add a step to the window, without a host sync."""
        if not self.steps and not self.earlier:
            self.first = step.number
        self.steps += (step.loss, step.grad_norm, step.skipped)
        self.samples += samples

    def close(self, seconds: float | Callable[[], float]) -> None:
        """Close the window and start its copy; `seconds` in steps so far, or a function of them."""
        rows, ready = copy_to_host(self._take_rows())
        self.windows.append(_Window(self.first, self.earlier, rows, ready, seconds, self.samples))
        self.earlier, self.samples = [], 0
        if self.user is not None:
            self.user.start_copy()

    def reports(self, wait: bool) -> list[Report]:
        """Return reports of the windows that have arrived; with `wait`, of all closed ones."""
        arrived = []
        while self.windows and (wait or self.windows[0].ready is None or len(self.windows) > 1):
            window = self.windows.popleft()
            if window.ready is not None:
                window.ready.synchronize()  # host sync: rarely a wait, the copy is one window old
            rows = window.earlier + window.rows.tolist()  # host sync: none, they have arrived
            before = self.seconds
            self.seconds = window.elapsed() if callable(window.elapsed) else window.elapsed
            self.reported.append((window.first, rows))
            self.skipped += [n for n, row in enumerate(rows, window.first) if row[2] > 0]
            losses, norms = [row[0] for row in rows], [row[1] for row in rows]
            skipped, seconds = [row[2] > 0 for row in rows], self.seconds - before
            report = Report(window.first, losses, norms, skipped, 0.0, seconds, window.samples)
            arrived.append(report)
        return arrived

    @property
    def first_unread(self) -> int | None:
        """The first step with numbers not yet on the host; None if all are."""
        if self.windows:
            return self.windows[0].first
        return self.first if self.steps or self.earlier else None

    def since(self, step: int) -> list[list[float]] | None:
        """Return loss, norm and skip flag from `step` on; None if it is not kept. Host sync."""
        numbered: dict[int, list[float]] = {}
        for first, rows in self.reported:
            numbered.update(enumerate(rows, first))
        for window in self.windows:
            if window.ready is not None:
                window.ready.synchronize()  # host sync: only after a fault
            # host sync: none, they have arrived
            numbered.update(enumerate(window.earlier + window.rows.tolist(), window.first))
        window_state = self.state()
        numbered.update(enumerate(window_state["rows"], window_state["first"]))
        steps = range(step, max(numbered, default=0) + 1)
        return [numbered[n] for n in steps] if steps and steps.start in numbered else None

    def _take_rows(self) -> Tensor:
        if not self.steps:
            return torch.zeros(0, 3, dtype=torch.float32)
        rows = torch.stack(self.steps).to(torch.float32).view(-1, 3)
        self.steps = []
        return rows

    def state(self) -> dict[str, Any]:
        """Return the open window. Host sync."""
        self.earlier = self.earlier + self._take_rows().tolist()  # host sync: once a checkpoint
        return {"first": self.first, "rows": self.earlier, "samples": self.samples}

    def load(self, state: dict[str, Any]) -> None:
        """Restore an open window."""
        self.first, self.earlier, self.samples = state["first"], state["rows"], state["samples"]
