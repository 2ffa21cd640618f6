"""The allow list of names in a config: which dotted names may become objects, and how.

Deny by default, and refuse before importing, since an import already runs code. Allowed are:

- a public class or function that the source files of torch named in `SOURCES` define, by its exact
  name (`torch.nn.Linear`, `torch.nn.functional.relu`); the files are read as text;
- a class or function defined in a package that `security.trusted` names.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from runner.core.errors import ConfigError, SecurityError
from runner.core.format import join_names, nearest
from runner.core.schemas.security import NAME

SOURCES = {
    "torch.nn": ("nn/modules/*.py", "nn/parameter.py", "nn/parallel/data_parallel.py"),
    "torch.nn.functional": ("nn/functional.py",),
    "torch.nn.init": ("nn/init.py",),
    "torch.optim": ("optim/*.py",),
    "torch.optim.lr_scheduler": ("optim/lr_scheduler.py",),
    "torch.optim.swa_utils": ("optim/swa_utils.py",),
    "torch.utils.data": tuple(
        f"utils/data/{name}.py"
        for name in ("dataset", "dataloader", "distributed", "sampler", "_utils/collate")
    ),
}
"""Public torch modules, and the files (below torch/) that define their names."""
DEFINITION = re.compile(
    r"^(?:class|def) ([A-Za-z]\w*)|^([a-z]\w*) = (?:_add_docstr|boolean_dispatch|_\w+)\b",
    re.MULTILINE,
)
NEVER_TRUSTED = sys.stdlib_module_names | {
    *("hydra", "hydra_plugins", "omegaconf", "pip", "pkg_resources", "runner", "setuptools"),
    *("test", "torch", "yaml"),
}
ANY_PACKAGE = "*"
"""As a trusted package, under security=off: any name is allowed."""
INSTANTIATE_KEYS = ("_target_", "_args_", "_partial_", "_convert_")
"""Keys of Hydra's instantiate; `_convert_` is ignored, since values are plain containers."""
SIZES_HINT = (
    "arguments called in_features, in_channels, image_size, classes, vocab or sequence get the "
    "sizes of the data"
)


@cache
def torch_names() -> frozenset[str]:
    """Return the allowed torch names, by public module and by defining module."""
    spec = find_spec("torch")  # without importing it
    folder = Path((spec and spec.origin) or "absent").parent
    names: set[str] = set()
    for public_module, patterns in SOURCES.items():
        for file in (file for pattern in patterns for file in folder.glob(pattern)):
            module = ".".join(("torch", *file.relative_to(folder).with_suffix("").parts))
            for groups in DEFINITION.findall(file.read_text(encoding="utf-8")):
                names |= {f"{public_module}.{''.join(groups)}", f"{module}.{''.join(groups)}"}
    return frozenset(names)


def nearest_name(target: str) -> str:
    """Return the torch name that was probably meant, or ""."""
    short_name = target.rpartition(".")[2]
    same_ending = [name for name in sorted(torch_names()) if name.endswith(f".{short_name}")]
    return min(same_ending, key=len, default=nearest(target, torch_names(), 0.85) or "")


def find_allowed_package(target: str, key: str, trusted: Sequence[str]) -> str:
    """Return the package to import `target` from. Raises SecurityError; imports nothing."""
    for package in trusted:
        if package != ANY_PACKAGE:
            _check_trusted(package)
    if not _is_dotted_name(target):
        raise SecurityError(f"{key}: {target!r} is not a plain dotted name, such as package.Class")
    packages = [package for package in trusted if is_in_package(target, package)]
    if packages:
        return min(packages, key=len)
    if target.startswith("torch.") and target in torch_names():  # only then read torch's files
        return "torch"
    if ANY_PACKAGE in trusted:
        return target.partition(".")[0]
    raise _untrusted_error(key, target, "it is not trusted", target)


def resolve(target: str, key: str, trusted: Sequence[str]) -> Any:
    """Import and return the class or function named `target`, if it is allowed.

    `key` is its config key, for messages. Raises SecurityError if the name is not allowed and
    ConfigError if it does not exist.
    """
    package = find_allowed_package(target, key, trusted)
    if package != "torch":
        append_current_folder()  # user code may be there
    value = _import_target(target, package, key)
    if package == "torch" or ANY_PACKAGE in trusted:
        return value
    if not isinstance(value, type | FunctionType | MethodType):
        kind = type(value).__name__
        raise SecurityError(f"{key}: {target} is a {kind}; name a class or a function")
    module = getattr(value, "__module__", None) or ""
    if not any(is_in_package(module, one) for one in trusted):
        raise _untrusted_error(key, target, f"it is defined in {module or 'no module'}", module)
    return value


def construct(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    sizes: Mapping[str, Any],
    key: str,
    positional: Sequence[Any] = (),
) -> Any:
    """Call `factory` with `arguments` and those of `sizes` that its signature accepts.

    `key` is the config group, such as `model`. Raises ConfigError for unknown or missing arguments;
    exceptions of the factory pass through, with a note naming the keys.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # a C function without a signature checks its own arguments
        return factory(*positional, **arguments)
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    keywords = {p.name: p for p in named[len(positional) :]}
    values = {**{k: v for k, v in sizes.items() if k in keywords}, **arguments}
    name = getattr(factory, "__name__", str(factory))
    signature_text = f"{name} takes {', '.join(keywords) or 'no arguments'}"
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [k for k in values if k not in keywords and not accepts_any]
    if unknown:
        near = nearest(unknown[0], keywords)
        fix = f"did you mean +{key}.{near}=…? {signature_text}" if near else signature_text
        raise ConfigError(f"{key}.{unknown[0]}", f"{name} has no such argument", fix)
    missing = [k for k, p in keywords.items() if p.default is p.empty and k not in values]
    if missing:
        fix = f"add +{key}.{missing[0]}=…; {signature_text}"
        fix += f"; {SIZES_HINT}" if sizes else ""
        raise ConfigError(f"{key}.{missing[0]}", f"{name} needs a value for it", fix)
    try:
        return factory(*positional, **values)
    except Exception as error:
        if arguments:
            error.add_note(f"{name} got {', '.join(f'{key}.{k}' for k in arguments)}")
        raise


def instantiate_nested(arguments: Any, resolve: Callable[[str, str], Any], key: str) -> Any:
    """Construct nested `{_target_: …}`, if allowed, by `_args_`; `_partial_` makes a `partial`."""
    if isinstance(arguments, Mapping):
        mapping = {k: instantiate_nested(v, resolve, f"{key}.{k}") for k, v in arguments.items()}
        if "_target_" not in mapping:
            return mapping
        factory = resolve(mapping["_target_"], f"{key}._target_")
        values = {name: value for name, value in mapping.items() if name not in INSTANTIATE_KEYS}
        positional = mapping.get("_args_") or []
        if mapping.get("_partial_"):
            return partial(factory, *positional, **values)
        return construct(factory, values, {}, key, positional)
    if isinstance(arguments, list | tuple):
        return [instantiate_nested(v, resolve, f"{key}.{i}") for i, v in enumerate(arguments)]
    return arguments


def is_in_package(name: str, package: str) -> bool:
    """Whether the dotted `name` equals `package` or lies in it."""
    return name == package or name.startswith(f"{package}.")


def append_current_folder() -> None:
    """Append the current folder to sys.path, after all installed packages."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _is_dotted_name(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and not any(p.startswith("__") for p in name.split("."))


def _check_trusted(package: str) -> None:
    if not _is_dotted_name(package):
        raise SecurityError(f"security.trusted: {package!r} is not the name of a package")
    if package.partition(".")[0] in NEVER_TRUSTED:
        problem = f"{package} cannot be trusted as a whole, since it can run any code"
        fix = "wrap the class or function in a package of your own, and trust that"
        raise SecurityError(f"security.trusted: {problem}; {fix}")


def _untrusted_error(key: str, target: str, why: str, source: str) -> SecurityError:
    """Return the error; `source` is the module that would have to be trusted."""
    top, near = source.partition(".")[0], nearest_name(target)
    fix = f"if you trust that code, add security.trusted=[{top}]"
    if top in NEVER_TRUSTED or not top:
        fix = "wrap it in a class or function of your own package, and trust that package"
        if near and near != target:
            fix = f"did you mean {near}?"
    return SecurityError(f"{key}: {target} is refused: {why}; {fix}")


def _import_target(target: str, root: str, key: str) -> Any:
    """Import `root`, then resolve the remaining names; imports only submodules of `root`."""
    value: Any = _import(root, key, target)
    path = root
    for part in target[len(root) + 1 :].split(".") if target != root else []:
        if not hasattr(value, part):
            missing = _missing_attribute(key, path, part, value)
            if not isinstance(value, ModuleType) or not hasattr(value, "__path__"):
                raise missing
            _import(f"{path}.{part}", key, target, missing)
            value = sys.modules[f"{path}.{part}"]
        else:
            value = getattr(value, part)
        path = f"{path}.{part}"
    return value


def _import(module: str, key: str, target: str, missing: ConfigError | None = None) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, SyntaxError) as error:
        if missing is not None and isinstance(error, ImportError) and error.name == module:
            raise missing from None
        line = " ".join(str(error).split())
        fix = f"is {module} installed, or in the current folder {os.getcwd()}?"
        if isinstance(error, SyntaxError):
            fix = "correct that file"
        problem = f"{target} cannot be imported: {type(error).__name__}: {line}"
        raise ConfigError(key, problem, fix) from error


def _missing_attribute(key: str, path: str, part: str, value: Any) -> ConfigError:
    """Return the error, with the nearest name or a module's own classes and functions."""
    near = nearest(part, [name for name in dir(value) if not name.startswith("_")])
    fix = f"did you mean {path}.{near}?" if near else ""
    if isinstance(value, ModuleType) and not near:
        own = [
            name
            for name, x in vars(value).items()  # without importing lazy attributes
            if isinstance(x, type | FunctionType)
            and is_in_package(x.__module__ or "", path)
            and not name.startswith("_")
        ]
        fix = f"it has {join_names(own)}" if own else ""
    return ConfigError(key, f"{path} has no {part!r}", fix)
