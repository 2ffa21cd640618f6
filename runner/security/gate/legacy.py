"""torch.save's format before 1.6: five pickles in a row, and then the bytes of the storages."""

from __future__ import annotations

import io

from runner.security.gate.format import LEGACY, Buffer
from runner.security.gate.marks import Box
from runner.security.gate.pickles import read_next
from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.refused import SAVE_AGAIN, Refused

PROTOCOL = 1001


def check(data: Buffer, bounds: Bounds, whose: Whose) -> None:
    """Raises Refused, and NeedsPickle for one that is sound and asks for more than plain data."""
    stream = io.BytesIO(data)
    stream.seek(len(LEGACY))
    if read_next(stream, "protocol", bounds).value != PROTOCOL:
        raise Refused("torch.legacy", "protocol", f"is not {PROTOCOL}")
    system = read_next(stream, "system", bounds).value
    rows = zip(system.names, system.values, strict=True) if type(system) is Box else ()
    if not any(name == "little_endian" and value is True for name, value in rows):
        raise Refused(
            "torch.legacy", "system", "was not written by a little-endian machine", SAVE_AGAIN
        )
    made = read_next(stream, "pickle", bounds)
    keys = read_next(stream, "keys", bounds).value
    order = keys.values if type(keys) is Box and keys.kind == "list" else []
    if len(order) != getattr(keys, "count", -1) or sorted(order) != sorted(made.storages):
        raise Refused("torch.legacy", "keys", "are not those of the storages that tensors lie in")
    at = stream.tell()
    for key in order:
        storage = made.storages[key]
        count = int.from_bytes(data[at : at + 8], "little")
        if count * storage.item != storage.size or at + 8 + storage.size > len(data):
            raise Refused("torch.storage", f"at {at}", f"storage {key} has another size")
        at += 8 + storage.size
    if at != len(data):
        raise Refused("torch.trailing", f"at {at}", f"{len(data) - at:,} bytes after its end")
    if made.bytes > len(data) * bounds.ratio + bounds.free:
        raise Refused(
            "torch.expanded", "pickle", f"its tensors would take {made.bytes:,} bytes", SAVE_AGAIN
        )
