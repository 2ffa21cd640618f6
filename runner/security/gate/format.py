"""What a file is: its content and its name have to say the same.

Little of the content is read for that: the first bytes and, where those may begin a pickle, as much
as it takes to tell.
"""

from __future__ import annotations

import tarfile

from runner.security.gate.program import Peekable, is_program
from runner.security.gate.refused import DAMAGED, SAVE_AGAIN, Refused

Buffer = bytes | memoryview

LOADABLE = (
    ".bin", ".ckpt", ".distcp", ".joblib", ".keras", ".nemo", ".npk", ".npy", ".npz", ".onnx",
    ".pickle", ".pkl", ".pt", ".pt2", ".pte", ".pth", ".ptl", ".safetensors", ".tar", ".torch",
    ".ts",
)  # fmt: skip
"""Names of files that hold models or arrays, or claim to."""
RAW_NAMES = (".bin",)  # of those, what numbers without a header are called too

TORCH_NAMES = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar", ".pt.tar")
NAMES = {
    "safetensors": (".safetensors",),
    "torch_zip": TORCH_NAMES,
    "torch_legacy": TORCH_NAMES,
    "pickle": (".pkl", ".pickle", *TORCH_NAMES),
    "npy": (".npy",),
    "npz": (".npz",),
}
# the first pickle of a file by torch.save as it was before 1.6: its magic number
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

CONVERT = "load it on a machine apart, and save its state_dict alone, as safetensors"
# By name: what is code, or is read by code that unpickles.
CODE_NAMES = {
    ".pt2": ("program.export", "an exported program (torch.export), which is code", CONVERT),
    ".ptl": ("program.torchscript", "a TorchScript program, which is code", CONVERT),
    ".metadata": (
        "dcp.unsupported", "a distributed checkpoint (DCP), which torch's own reader unpickles",
        "turn it into one file with torch.distributed.checkpoint.format_utils.dcp_to_torch_save "
        "where you trust it",
    ),
    ".distcp": (
        "dcp.unsupported", "part of a distributed checkpoint (DCP), which torch's reader unpickles",
        "turn it into one file with torch.distributed.checkpoint.format_utils.dcp_to_torch_save "
        "where you trust it",
    ),
    ".keras": ("format.unsupported", "a Keras model, which can hold code", CONVERT),
    ".joblib": ("format.unsupported", "a joblib file, which is a pickle", CONVERT),
    ".npk": ("format.unsupported", "not a format that the runner reads", CONVERT),
    ".onnx": ("format.unsupported", "an ONNX graph, which is not a file of tensors", CONVERT),
}  # fmt: skip
# By first bytes: known, and not read here.
OTHERS = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"PK\x07\x08", "part of a zip archive"),
    (b"\x1f\x8b", "compressed with gzip"),
    (b"BZh", "compressed with bzip2"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"(\xb5/\xfd", "compressed with zstandard"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"#!", "a script"),
)
UNKNOWN = "format.unknown"
EMPTY = "format.empty"
HEAD = 512  # bytes that tell a format
KNOWN = "the runner reads safetensors, torch.save (.pt .pth .ckpt .bin), .npy and .npz"


def is_models_name(name: str) -> bool:
    """Whether it is one that a loader of models or arrays would be given."""
    return name.lower().endswith(LOADABLE)


def identify(data: Peekable, name: str) -> str:
    """The format. Raises Refused for one that is not read, or that the name denies."""
    lower = name.lower()
    for suffix, (code, what, way_out) in CODE_NAMES.items():
        if lower.endswith(suffix):
            raise Refused(code, "", f"is {what}", way_out)
    kind = _by_content(data, lower)
    if not lower.endswith(NAMES[kind]):
        raise Refused(
            "format.name", name, f"its content is {_words(kind)}, and its name says otherwise",
            f"if that is what it should be, rename it to end in {NAMES[kind][0]}",
        )  # fmt: skip
    return kind


def is_zip(head: bytes) -> bool:
    """Whether a zip archive begins with these bytes, and not with its end."""
    return head.startswith(b"PK\x03\x04")


def is_raw(data: Peekable) -> bool:
    """Whether a file is of none of the formats known here: numbers without a header, or nothing."""
    try:
        _by_content(data, "")
    except Refused as refused:
        return refused.reason.code in (UNKNOWN, EMPTY)
    return False


def _by_content(data: Peekable, name: str) -> str:
    head = bytes(data[:HEAD])
    if not head:
        raise Refused(EMPTY, "", "the file is empty", DAMAGED)
    if is_zip(head):
        first = first_member(head)
        is_npz = first.endswith(b".npy") or name.endswith(".npz") and b"data.pkl" not in first
        return "npz" if is_npz else "torch_zip"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    for magic, what in OTHERS:
        if head.startswith(magic):
            raise Refused("format.unsupported", "at 0", f"is {what}", f"{KNOWN}; {CONVERT}")
    if _is_tar(head):
        raise Refused("format.unsupported", "at 0", "is a tar archive", f"{KNOWN}; {SAVE_AGAIN}")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= len(data):
        return "safetensors"
    if head.startswith(LEGACY):
        return "torch_legacy"
    if is_program(data):
        return "pickle"
    raise Refused(
        UNKNOWN, "at 0", f"its first bytes, {head[:8].hex(' ')}, are those of no format known here",
        f"{KNOWN}; numbers without a header, such as token ids, are no model",
    )  # fmt: skip


def first_member(head: bytes) -> bytes:
    """The name of the first file in a zip archive, as far as it is in the first bytes, in small
    letters.
    """
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].lower()


def _is_tar(head: bytes) -> bool:
    """By the sum of its first block: the oldest tars, which loaders take, say nothing else."""
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return head[257:262] == b"ustar"
    return True


def _words(kind: str) -> str:
    return {
        "torch_zip": "a zip archive (torch.save)",
        "torch_legacy": "torch.save's old format",
        "pickle": "a pickle",
    }.get(kind, kind)
