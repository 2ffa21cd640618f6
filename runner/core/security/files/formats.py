"""Identify a file's format by its first bytes; its suffix must not contradict them."""

from __future__ import annotations

import io
import mmap
import os
import re
import string
import zipfile
from pathlib import Path

from runner.core.findings import Reason, Severity

Data = bytes | mmap.mmap

ZIP_MAGIC, NPY_MAGIC = b"PK\x03\x04", b"\x93NUMPY"  # first bytes
HEAD_BYTES = 1 << 12  # bytes read to identify a format
MAX_HEADER_BYTES = 25_000_000  # of a safetensors file
MAX_TENSORS = 100_000  # of a safetensors file: its loader takes 100 µs for each
SAVE_AGAIN = "save it again as safetensors, or with torch.save of tensors and plain containers"
DAMAGED = "get the file again, or compare its sha256 with that of its author"
CONVERT = "load it on a machine apart, and save its state_dict alone, as safetensors"
FORMATS_HINT = "the runner reads safetensors, torch.save, .npy and .npz"

MODEL_SUFFIXES = tuple(
    ".bin .ckpt .distcp .joblib .keras .nemo .npk .npy .npz .onnx .pickle .pkl .pt .pt2 .pte .pth "
    ".ptl .safetensors .tar .torch .ts".split()
)
"""Suffixes of files that hold models or arrays."""
DCP_INDEX = ".metadata"  # the whole file name
DCP = (
    "a distributed checkpoint (DCP), which torch's own reader unpickles "
    "(torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts it)"
)
UNSUPPORTED_FORMATS = {
    ".distcp": DCP,
    DCP_INDEX: DCP,
    ".pt2": "an exported program (torch.export), which is code",
    ".ptl": "a TorchScript program, which is code",
    ".keras": "a Keras model, which can hold code",
    ".joblib": "a joblib file, which is a pickle",
    ".onnx": "an ONNX graph, not a file of tensors",
}
FORMAT_OF_SUFFIX = {".safetensors": "safetensors", ".npy": "npy", ".npz": "npz"}
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Protocols 2 to 5 begin with a version byte; older ones are recognised by an import opcode.
PICKLE = re.compile(rb"\x80[\x02-\x05]")
OLD_PICKLE = re.compile(rb"[ci][A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\r?\n", re.ASCII)
ARCHIVE_MAGIC = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\0",
    "zstd": b"\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18",
    "7z": b"7z\xbc\xaf\x27\x1c",
    "rar": b"Rar!\x1a\x07",
}
TAR_MAGIC = slice(257, 262), b"ustar"
OUTSIDE = re.compile(r"^[/~]|^[A-Za-z]:|\\|://|(^|/)\.\.(/|$)")
MODEL_IN_ZIP = re.compile(rb"data\.pkl|\.npy|\x93NUMPY", re.I)


class FileRefusal(Exception):
    """The file must not be loaded, for the given reason."""

    def __init__(self, code: str, where: str, evidence: str, way_out: str = DAMAGED) -> None:
        evidence = printable(evidence)
        self.reason = Reason(code, Severity.REFUSAL, printable(where), evidence, way_out)
        super().__init__(str(self.reason))


def printable(text: object, limit: int = 300) -> str:
    """Return text from a file as one short line without control characters."""
    full = " ".join(str(text).split())
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in full[:limit])
    return escaped if len(full) <= limit else f"{escaped}…"


def is_model_name(name: str) -> bool:
    """Whether loaders of models or arrays accept this file name."""
    return name.lower().endswith(MODEL_SUFFIXES) or name == DCP_INDEX


def leads_outside(name: object) -> bool:
    """Whether a name in a list of files is no text, or no path below the list's folder."""
    return type(name) is not str or not name.isprintable() or OUTSIDE.search(name) is not None


def check_name(name: str) -> None:
    """Raise FileRefusal for names of formats that contain code or need unpickling."""
    suffix = DCP_INDEX if name == DCP_INDEX else Path(name.lower()).suffix
    if suffix in UNSUPPORTED_FORMATS:
        raise FileRefusal("format.unsupported", "", f"is {UNSUPPORTED_FORMATS[suffix]}", CONVERT)


def identify_format(data: Data, name: str) -> str:
    """Return safetensors, torch_zip, npz, npy or pickle. Raises FileRefusal for other content."""
    check_name(name)
    suffix, head = Path(name.lower()).suffix, bytes(data[:HEAD_BYTES])
    if archive := _identify_archive(head):
        evidence = f"is a {archive} archive, which may hold files of any kind"
        raise FileRefusal("format.archive", "", evidence, "unpack it, and scan its content")
    kind = _identify_zip(data) if head.startswith(ZIP_MAGIC) else _identify_head(head, len(data))
    if not kind and head and suffix in PICKLE_SUFFIXES:
        kind = "pickle"  # torch's loader reports what is wrong
    if not kind:
        evidence = "is empty"
        if head:
            is_text = not head[:24].translate(None, string.printable.encode())
            start = f"the text {head[:24].decode()!r}" if is_text else head[:8].hex(" ")
            evidence = f"begins with {start}, which matches no known format"
        raise FileRefusal("format.unknown", "", evidence, f"{FORMATS_HINT}; {CONVERT}")
    expected = FORMAT_OF_SUFFIX.get(suffix, kind)
    if expected != kind:
        evidence = f"its content is {kind}, but its extension says {expected}"
        raise FileRefusal("format.name", name, evidence, "rename it if the content is right")
    return kind


def check_safetensors_header(data: Data) -> None:
    """Raise FileRefusal for a header that takes minutes, or gigabytes, to read."""
    size = int.from_bytes(data[:8], "little")
    evidence = f"its header has {size:,} bytes, more than {MAX_HEADER_BYTES:,}"
    if size <= MAX_HEADER_BYTES:
        count = bytes(data[8 : 8 + size]).count(b"{")  # one of each; a key may be escaped
        if count <= MAX_TENSORS:
            return
        evidence = f"its header names {count:,} tensors, more than {MAX_TENSORS:,}"
    raise FileRefusal("safetensors.header", "", evidence, "save the tensors in several files")


def _identify_head(head: bytes, size: int) -> str:
    """Return the format of a file that is not a zip; "" if unknown."""
    if head.startswith(NPY_MAGIC):
        return "npy"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        return "safetensors"
    return "pickle" if PICKLE.match(head) or OLD_PICKLE.search(head) else ""


def _identify_archive(head: bytes) -> str:
    """Return the kind of an archive or compressed file other than zip; "" if it is none."""
    where, magic = TAR_MAGIC
    kinds = [kind for kind, start in ARCHIVE_MAGIC.items() if head.startswith(start)]
    return next(iter(kinds), "tar" if head[where] == magic else "")


def open_zip(data: Data) -> zipfile.ZipFile:
    """Open bytes as a zip archive. Raises FileRefusal if Python's reader cannot."""
    try:
        return zipfile.ZipFile(data if isinstance(data, mmap.mmap) else io.BytesIO(data))  # type: ignore[arg-type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise FileRefusal("zip.directory", "", f"not a readable zip archive: {error}") from None


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
    raise FileRefusal("format.unknown", "", evidence, FORMATS_HINT)


def is_loadable(path: Path) -> bool:
    """Whether loaders would read the file, by name or content; True if it cannot be read."""
    may_be_raw = path.suffix.lower() == ".bin"  # often raw numbers without a header
    if is_model_name(path.name) and not may_be_raw:
        return True
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head, size = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
            if not head.startswith(ZIP_MAGIC):
                kind = _identify_head(head, size) or (_identify_archive(head) if may_be_raw else "")
                return bool(kind) and (kind != "pickle" or may_be_raw or bool(PICKLE.match(head)))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return MODEL_IN_ZIP.search(data) is not None
    except OSError:
        return True
