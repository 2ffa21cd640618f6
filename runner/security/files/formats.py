"""The format of a file, by its first bytes; its name decides only where it contradicts them."""

from __future__ import annotations

import io
import mmap
import re
import zipfile
import zlib
from pathlib import Path

from runner.errors import CheckpointError
from runner.security.trust import Reason, Severity

Data = bytes | mmap.mmap

ZIP, NPY = b"PK\x03\x04", b"\x93NUMPY"  # first bytes
HEAD = 1 << 12  # bytes that tell a format
SAVE_AGAIN = "save it again as safetensors, or with torch.save of tensors and plain containers"
DAMAGED = "get the file again, or compare its sha256 with that of its author"
CONVERT = "load it on a machine apart, and save its state_dict alone, as safetensors"
KNOWN = "the runner reads safetensors, torch.save, .npy and .npz"

MODEL_SUFFIXES = tuple(
    ".bin .ckpt .distcp .joblib .keras .nemo .npk .npy .npz .onnx .pickle .pkl .pt .pt2 .pte .pth "
    ".ptl .safetensors .tar .torch .ts".split()
)
"""Names of files that hold models or arrays, or claim to."""
DCP_INDEX = ".metadata"  # the whole name
DCP = (
    "a distributed checkpoint (DCP), which torch's own reader unpickles "
    "(torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts it)"
)
UNSUPPORTED_NAMES = {
    ".distcp": DCP,
    DCP_INDEX: DCP,
    ".pt2": "an exported program (torch.export), which is code",
    ".ptl": "a TorchScript program, which is code",
    ".keras": "a Keras model, which can hold code",
    ".joblib": "a joblib file, which is a pickle",
    ".onnx": "an ONNX graph, which is no file of tensors",
}
EXACT_NAMES = {".safetensors": "safetensors", ".npy": "npy", ".npz": "npz"}
PICKLE_NAMES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
UNSUPPORTED_CONTENT = re.compile(
    rb"GGUF|\x89HDF\r\n\x1a\n|PK\x05\x06|PK\x07\x08|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf"
    rb"|\x7fELF|MZ|#!|<!DOCTYPE|<html|version https"
)
# Protocols 2 to 5 begin with their number; older ones are told by the import of a name.
PICKLE = re.compile(rb"\x80[\x02-\x05]")
OLD_PICKLE = re.compile(rb"[ci][A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\r?\n", re.ASCII)
LATE_PICKLE = re.compile(rb"data\.pkl", re.I)


class Refused(Exception):
    """Nothing of this file may be loaded."""

    def __init__(self, code: str, where: str, evidence: str, way_out: str = DAMAGED) -> None:
        evidence = printable(evidence)
        self.reason = Reason(code, Severity.REFUSAL, printable(where), evidence, way_out)
        super().__init__(str(self.reason))


def printable(text: object, limit: int = 300) -> str:
    """Text out of a file, in one short line without control characters."""
    whole = str(text)
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in whole[:limit])
    return plain if len(whole) <= limit else f"{plain}…"


def is_model_name(name: str) -> bool:
    """Whether a loader of models or arrays would be given a file of this name."""
    return name.lower().endswith(MODEL_SUFFIXES) or name == DCP_INDEX


def check_name(name: str) -> None:
    """Raise Refused for a name whose files are code, or are read by code that unpickles."""
    what = UNSUPPORTED_NAMES.get(DCP_INDEX if name == DCP_INDEX else Path(name.lower()).suffix)
    if what is not None:
        raise Refused("format.unsupported", "", f"is {what}", CONVERT)


def identify(data: Data, name: str) -> str:
    """safetensors, torch_zip, npz, npy or pickle. Raises Refused for all else."""
    check_name(name)
    suffix = Path(name.lower()).suffix
    kind = _identify_content(data, suffix)
    wanted = EXACT_NAMES.get(suffix, kind)
    if wanted != kind:
        evidence = f"its content is {kind}, and its name says {wanted}"
        raise Refused("format.name", name, evidence, "rename it if that is what it should be")
    return kind


def _identify_content(data: Data, suffix: str) -> str:
    head = bytes(data[:HEAD])
    if head.startswith(ZIP):
        return _identify_zip(data)
    if head.startswith(NPY):
        return "npy"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= len(data):
        return "safetensors"
    if UNSUPPORTED_CONTENT.match(head) or head[257:262] == b"ustar":
        what = printable(head[:8])
        raise Refused("format.unsupported", "at 0", f"begins with {what}", f"{KNOWN}; {CONVERT}")
    if head and (suffix in PICKLE_NAMES or PICKLE.match(head) or OLD_PICKLE.search(head)):
        return "pickle"  # torch's own loader says what is wrong with it
    begins = f"begins with {head[:8].hex(' ')}, as no format known here" if head else "is empty"
    raise Refused("format.unknown", "at 0", begins, KNOWN)


def open_zip(data: Data) -> zipfile.ZipFile:
    """The archive in these bytes. Raises Refused where Python's reader finds none."""
    try:
        return zipfile.ZipFile(data if isinstance(data, mmap.mmap) else io.BytesIO(data))  # type: ignore[arg-type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise Refused("zip.directory", "", f"is no readable zip archive: {error}") from None


def _identify_zip(data: Data) -> str:
    length = int.from_bytes(data[26:28], "little")
    if bytes(data[30 : 30 + length]).endswith(b"/data.pkl"):  # torch.save writes it first
        return "torch_zip"
    with open_zip(data) as archive:
        names = [name.lower() for name in archive.namelist()]
    for ending, kind in (("data.pkl", "torch_zip"), (".npy", "npz")):
        if any(name.endswith(ending) for name in names):
            return kind
    evidence = f"is a zip archive without data.pkl or arrays: {names[:3]}"
    raise Refused("format.unknown", "", evidence, KNOWN)


def is_loadable(path: Path) -> bool:
    """Whether loaders read the file, by its name or by its content; an unreadable one may be."""
    suffix = path.suffix.lower()
    if is_model_name(path.name) and suffix != ".bin":  # also numbers without a header are .bin
        return True
    try:
        if not path.is_file() or not path.stat().st_size:
            return False
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _is_model_content(path, data, suffix)
    except FileNotFoundError:
        return False
    except (CheckpointError, OSError):
        return True


def _is_model_content(path: Path, data: mmap.mmap, suffix: str) -> bool:
    try:
        kind = _identify_content(data, "")
    except Refused as refused:
        code = refused.reason.code
        if suffix == ".bin" and code in ("zip.directory", "format.unsupported"):
            return True
        # numpy and torch.load open archives in which no name announces an array or a pickle
        if data[:4] != ZIP:
            return False
        return _holds_array(path) if code == "format.unknown" else bool(LATE_PICKLE.search(data))
    return kind != "pickle" or suffix == ".bin" or PICKLE.match(data[:2]) is not None


def _holds_array(path: Path) -> bool:
    """Whether a member begins as an .npy file does: `np.load` reads it under any name."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            try:
                with archive.open(member) as file:
                    if file.read(len(NPY)) == NPY:
                        return True
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, OSError):
                continue  # encrypted or damaged: numpy cannot read it either
    return False
