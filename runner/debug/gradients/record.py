"""The looks of a run at its gradients: `debug/gradients.json`, of bounded size."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.debug.gradients.layers import Layer
from runner.storage import read_record, replace_text

log = logging.getLogger("runner")

FILE = "debug/gradients.json"
ROWS = 20_000  # about 5 MB; a row is a layer at one look
FEWEST = 8  # looks, of however many layers


class GradientRecord:
    """Keeps the first looks and the last ones; in between more and more are left out."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, Sequence[Layer | dict[str, Any]]]] = []
        self.units: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.looks)

    def add(self, step: int, layers: Sequence[Layer], dead: Mapping[str, tuple[int, int]]) -> None:
        """Another look."""
        self.looks.append((step, layers))
        self.units += [
            {"step": step, "layer": name, "dead": gone, "units": units}
            for name, (gone, units) in dead.items()
        ]
        most = max(FEWEST, ROWS // max(1, len(layers)))
        if len(self.looks) > most:
            first, last = most // 4, len(self.looks) - most // 2
            thinned = self.looks[first:last:2]
            self.looks = [*self.looks[:first], *thinned, *self.looks[last:]]
            steps = {step for step, _ in self.looks}
            self.units = [row for row in self.units if row["step"] in steps]

    def resume(self, folder: Path | None, step: int) -> None:
        """Go on with what an earlier part of the run wrote, up to `step`."""
        if folder is None or not step:
            return
        try:
            found = json.loads(read_record(folder / FILE))
            looks: dict[int, list[dict[str, Any]]] = {}
            for row in found["layers"]:
                if row["step"] <= step:
                    looks.setdefault(row["step"], []).append(row)
            self.units = [row for row in found["units"] if row["step"] <= step]
            self.looks = list(looks.items())
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be gone on with: %s", FILE, error)

    def write(self, folder: Path, finding: str) -> None:
        """Replace the file; a disk that does not take it is no fault of the run."""
        path = folder / FILE
        rows = [
            {"step": step, **layer.row()} if isinstance(layer, Layer) else layer
            for step, layers in self.looks
            for layer in layers
        ]
        text = json.dumps({"finding": finding, "layers": rows, "units": self.units})
        try:
            path.parent.mkdir(exist_ok=True)
            replace_text(path, text + "\n")
        except OSError as error:
            log.warning("%s is not written: %s", FILE, error)
