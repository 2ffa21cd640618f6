"""What a pickle asks for that plain data do not need, for the person who is refused it."""

from __future__ import annotations

import io
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

from runner.security.gate.format import CONVERT
from runner.security.gate.meanings import NAMES
from runner.security.gate.refused import Refused, shown

OR_RUN_IT = "; or, if you trust who made it, security.allow_pickle=[its sha256]"
WAY_OUT = f"{CONVERT}{OR_RUN_IT}"
MOST = 1000  # names that are looked for


class NeedsPickle(Refused):
    """It is sound as far as can be seen, and only an unrestricted unpickler can load it."""

    def filled_in(self, sha256: str, may_run: bool) -> Refused:
        """The refusal of the file of that digest, which no way out lets run unless it `may_run`."""
        told = OR_RUN_IT.replace("its sha256", sha256) if may_run else ""
        reason = self.reason
        way_out = reason.way_out.replace(OR_RUN_IT, told)
        return Refused(reason.code, reason.where, reason.evidence, way_out)


def dotted(argument: str) -> str:
    """The name that a GLOBAL asks for, as Python 3 calls it."""
    module, _, name = argument.partition(" ")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def named(stream: io.BytesIO, where: str, needs: NeedsPickle) -> NeedsPickle:
    """The same refusal, naming what the pickle asks for where it does."""
    if needs.reason.code == "pickle.global":
        return needs
    for name, at in wanted(stream):
        if name not in NAMES:
            return NeedsPickle(
                "pickle.global", f"{where} at {at}", f"asks for {shown(name)}", WAY_OUT
            )
    return needs


def wanted(stream: io.BytesIO) -> list[tuple[str, int]]:
    """The first names that it asks for with their places, as far as it can be read."""
    found: list[tuple[str, int]] = []
    texts: list[str] = []
    try:
        for opcode, argument, at in pickletools.genops(stream):
            if opcode.name in ("GLOBAL", "INST"):
                found.append((dotted(str(argument)), int(at or 0)))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                found.append((f"{texts[-2]}.{texts[-1]}", int(at or 0)))
            elif isinstance(argument, str):
                texts = [*texts[-1:], argument]
            if len(found) > MOST:
                break
    except (ValueError, IndexError, UnicodeError):
        pass  # what was read so far is only to be shown
    return found
