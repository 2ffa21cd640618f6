"""Signatures of others, by the package `model-signing` (extra `sign`); no cryptography of our own.

A signature lies beside what it is for, as NAME.sig, or within a folder as model.sig. It holds a
list of files with their sha256. The package proves that the list is the signer's and that the files
on the disk are those of the list; here each sha256 is compared once more with that of the bytes
which were checked and are loaded, so that a file swapped in between is no signed one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.security.gate.policy import Policy
from runner.security.gate.refused import shown
from runner.security.trust import OTHER, FileFacts, Reason, Severity
from runner.storage import read_file

NAME = "model.sig"
SUFFIX = ".sig"
LIMIT = 1 << 26  # bytes of a signature that is read: it has a line for every file
EXTRA = 'install the extra: pip install "runner[sign]"'


@dataclass(frozen=True)
class Signature:
    """Who vouches for the files, and what there is to say about it."""

    signer: str = ""  # empty: nobody of security.signers
    reasons: list[Reason] = field(default_factory=list)


def find(path: Path) -> Path | None:
    """The signature that is for the file or folder `path`."""
    places = [path / NAME] if os.path.isdir(path) else []
    whole = Path(os.path.abspath(path))  # `.` has no name
    places.append(whole.parent / (whole.name + SUFFIX))
    return next((place for place in places if os.path.isfile(place)), None)


def signature_of(path: Path, files: Mapping[str, FileFacts], policy: Policy) -> Signature:
    """Whether somebody of `policy.signers` signed all `files` of `path` that are ever loaded.

    Raises UsageError where signers are named and the package to check them with is missing, or
    one of their keys is.
    """
    found = find(path)
    if found is None:
        return Signature()
    if not policy.signers:
        return _not_signed("signature.unknown", Severity.NOTE, found.name,
                           "there is a signature, and security.signers names nobody")  # fmt: skip
    for key in policy.signers:
        if not key.is_file():
            raise UsageError(f"security.signers: there is no file {key} (a public key, PEM)")
    verifying = _verifying()
    if found.stat().st_size > LIMIT:
        return _not_signed("signature.size", Severity.WARNING, found.name, "it is too large")
    text = read_file(found)
    told = ""
    with tempfile.TemporaryDirectory(prefix="runner-") as apart:
        copy = Path(apart) / found.name  # what is verified is what is read below
        copy.write_bytes(text)
        for key in policy.signers:
            config = verifying.Config().use_elliptic_key_verifier(public_key=key)
            try:
                config.verify(path, copy)
            except Exception as error:  # ValueError, and what its parsers raise
                told = f"{type(error).__name__}: {shown(error)}"
                continue
            return _bound(text, files, _identity(key), found)
    return _not_signed(
        "signature.invalid", Severity.WARNING, found.name, f"no signer of yours made it: {told}"
    )


def _bound(text: bytes, files: Mapping[str, FileFacts], signer: str, found: Path) -> Signature:
    """The signer's word, if it is about the very bytes that were looked at."""
    try:
        signed = _resources(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return _not_signed("signature.form", Severity.WARNING, found.name,
                           f"its list of files cannot be read: {shown(error)}")  # fmt: skip
    loaded = {name: facts for name, facts in files.items() if facts.format != OTHER}
    if len(files) == 1 and len(signed) == 1:  # of a single file, whose name is not in the list
        signed = dict.fromkeys(files, next(iter(signed.values())))
    for name, facts in sorted((loaded or files).items()):
        if signed.get(name) != facts.sha256:
            return _not_signed("signature.other", Severity.WARNING, name,
                               "the signature is not about this file's bytes")  # fmt: skip
    return Signature(signer)


def _resources(text: bytes) -> dict[str, str]:
    """File names and sha256, from the verified envelope; files signed in shards are left out."""
    payload: Any = json.loads(base64.b64decode(json.loads(text)["dsseEnvelope"]["payload"]))
    rows = payload["predicate"]["resources"]
    return {str(r["name"]): str(r["digest"]) for r in rows if r["algorithm"] == "sha256"}


def _identity(key: Path) -> str:
    return f"{key.name} sha256:{hashlib.sha256(key.read_bytes()).hexdigest()[:16]}"


def _verifying() -> Any:
    try:
        return import_module("model_signing.verifying")
    except ImportError as error:
        raise UsageError(
            f"security.signers: a signature cannot be checked ({shown(error)}); {EXTRA}, or leave "
            "security.signers out"
        ) from error


def _not_signed(code: str, severity: Severity, where: str, evidence: str) -> Signature:
    return Signature(reasons=[Reason(code, severity, where, evidence, "so it counts as unsigned")])
