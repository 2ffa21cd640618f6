"""The door for names in a config: which dotted names may become objects, and how these are built.

Deny by default, and refuse before importing: an import already runs code. What passes is

- a class of ours or of torch that the registry has by its exact name (`intent/registry.py`);
- a class or function defined in a package that `security.trusted` names.

What was imported is then looked at: it must be what its name says, defined where it may be.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import Any

from runner.errors import ConfigError, SecurityError
from runner.security.intent import registry

NEVER_TRUSTED = sys.stdlib_module_names | {
    "hydra", "hydra_plugins", "omegaconf", "pip", "pkg_resources", "runner", "setuptools", "test",
    "torch", "yaml",
}  # fmt: skip
EVERYTHING = "*"
"""In place of a package, under security=off: any name passes."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)


def resolve(target: str, key: str, trusted: list[str]) -> Any:
    """The class or function that `target` names, imported only once it is known to be allowed.

    `key` is the config key it stands in, for the messages. Raises SecurityError for what is not
    allowed and ConfigError for what is allowed but not there.
    """
    root = permit(target, key, trusted)
    if root == EVERYTHING or root in trusted:  # the user's own code may lie there
        append_current_folder()
    if root == EVERYTHING:
        return _walk(target, target.partition(".")[0], key, trusted)
    if root in trusted:
        found = _walk(target, root, key, trusted)
        defined_in = getattr(found, "__module__", None) or ""
        if not isinstance(found, type | FunctionType | MethodType):
            raise SecurityError(
                f"{key}: {target} is a {type(found).__name__}; name a class or a function"
            )
        if not any(inside(defined_in, package) for package in trusted):
            raise _refusal(key, target, f"it is defined in {defined_in or 'no module'}", defined_in)
        return found
    found = _walk(target, root, key, [root])
    defined_in, name = getattr(found, "__module__", ""), target.rpartition(".")[2]
    is_it = isinstance(found, type) and found.__name__ == name and inside(defined_in, root)
    if not is_it:
        raise _refusal(key, target, f"it is not the class {name} of {root}", "torch")
    return found


def permit(target: str, key: str, trusted: list[str]) -> str:
    """The package from which `target` may be imported. Raises SecurityError, imports nothing."""
    open_to_all = EVERYTHING in trusted
    for package in trusted:
        if package != EVERYTHING:
            _check_trusted(package)
    parts = target.split(".")
    if not NAME.fullmatch(target) or any(part.startswith("__") for part in parts):
        raise SecurityError(f"{key}: {target!r} is not a plain dotted name, such as package.Class")
    roots = [package for package in trusted if inside(target, package)]
    if roots:
        return min(roots, key=len)
    root = registry.root_of(target)
    if open_to_all and not root:
        return EVERYTHING
    if not root:
        raise _refusal(key, target, "it is not trusted", target)
    return root


def construct(
    factory: Callable[..., Any], arguments: Mapping[str, Any], sizes: Mapping[str, Any], key: str
) -> Any:
    """Call `factory` with `arguments` and those of `sizes` that its signature names.

    `key` is the config group, such as `model`. An argument that is unknown or missing is a
    ConfigError; what the constructor itself raises passes through, with a note of the keys.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # written in C without a signature: it checks for itself
        return factory(**arguments)
    keywords = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    given = {**{k: v for k, v in sizes.items() if k in keywords}, **arguments}
    name = getattr(factory, "__name__", str(factory))
    takes = f"{name} takes {', '.join(keywords) or 'no arguments'}"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [k for k in given if k not in keywords and not takes_any]
    if unknown:
        near = get_close_matches(unknown[0], list(keywords), 1)
        fix = f"did you mean +{key}.{near[0]}=…? {takes}" if near else takes
        raise ConfigError(f"{key}.{unknown[0]}", f"{name} has no such argument", fix)
    missing = [k for k, p in keywords.items() if p.default is p.empty and k not in given]
    if missing:
        raise ConfigError(
            f"{key}.{missing[0]}",
            f"{name} needs a value for it",
            f"add +{key}.{missing[0]}=…; {takes}",
        )
    try:
        return factory(**given)
    except Exception as error:
        if arguments:
            error.add_note(f"{name} got {', '.join(f'{key}.{k}' for k in arguments)}")
        raise


def nested(arguments: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every `_target_` inside the arguments of a class, by its key."""
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            if name == "_target_":
                yield f"{key}._target_", value
            else:
                yield from nested(value, f"{key}.{name}")
    elif isinstance(arguments, list | tuple):
        for i, value in enumerate(arguments):
            yield from nested(value, f"{key}.{i}")


def assembled(arguments: Any, resolve: Callable[[str, str], Any], key: str) -> Any:
    """The arguments with each `{_target_: …}` in them made, innermost first, if it is allowed."""
    if isinstance(arguments, Mapping):
        made = {k: assembled(v, resolve, f"{key}.{k}") for k, v in arguments.items()}
        if "_target_" not in made:
            return made
        return construct(resolve(made.pop("_target_"), f"{key}._target_"), made, {}, key)
    if isinstance(arguments, list | tuple):
        return [assembled(v, resolve, f"{key}.{i}") for i, v in enumerate(arguments)]
    return arguments


def inside(name: str, package: str) -> bool:
    """Whether the dotted `name` is `package` or lies in it."""
    return name == package or name.startswith(f"{package}.")


def append_current_folder() -> None:
    """Make modules in the current folder importable, after everything that is installed."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _check_trusted(package: str) -> None:
    if not NAME.fullmatch(package) or any(part.startswith("__") for part in package.split(".")):
        raise SecurityError(f"security.trusted: {package!r} is not the name of a package")
    if package.partition(".")[0] in NEVER_TRUSTED:
        raise SecurityError(
            f"security.trusted: {package} cannot be trusted as a whole, since it can run anything; "
            "name your own package, and wrap there what you need"
        )


def _refusal(key: str, target: str, why: str, source: str) -> SecurityError:
    top, near = source.partition(".")[0], registry.nearest(target)
    if near and near != target and (top in NEVER_TRUSTED or not top):
        return SecurityError(f"{key}: {target} is refused: {why}; did you mean {near}?")
    if top in NEVER_TRUSTED or not top:
        way = "wrap it in a class or function of your own package and trust that: "
        top = "my_package"
    else:
        way = "if you trust that code, add "
    return SecurityError(f"{key}: {target} is refused: {why}; {way}security.trusted=[{top}]")


def _walk(target: str, root: str, key: str, allowed: list[str]) -> Any:
    """Import `root`, then follow the names; never through a module outside `allowed`."""
    found: Any = _import(root, key, target)
    path = root
    for part in target[len(root) + 1 :].split(".") if target != root else []:
        if isinstance(found, ModuleType) and not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            if not hasattr(found, "__path__"):
                raise _absent(key, path, part, known)
            _import(f"{path}.{part}", key, target, absent=_absent(key, path, part, known))
            found = sys.modules[f"{path}.{part}"]
        elif not hasattr(found, part):
            raise _absent(key, path, part, dir(found))
        else:
            found = getattr(found, part)
        path = f"{path}.{part}"
        strays = not any(inside(getattr(found, "__name__", ""), a) for a in allowed)
        if isinstance(found, ModuleType) and strays and EVERYTHING not in allowed:
            raise _refusal(key, target, f"it leads into {found.__name__}", found.__name__)
    return found


def _import(module: str, key: str, target: str, absent: ConfigError | None = None) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if absent is not None and error.name == module:
            raise absent from None
        raise _unimportable(key, target, module, error) from error
    except (ImportError, SyntaxError) as error:
        raise _unimportable(key, target, module, error) from error


def _unimportable(key: str, target: str, module: str, error: Exception) -> ConfigError:
    line = " ".join(str(error).split())
    return ConfigError(
        key,
        f"{target} cannot be imported: {type(error).__name__}: {line}",
        f"is {module} installed, or in the current folder {os.getcwd()}?",
    )


def _absent(key: str, path: str, part: str, known: list[str]) -> ConfigError:
    near = get_close_matches(part, known, 1)
    return ConfigError(
        key, f"{path} has no {part!r}", f"did you mean {path}.{near[0]}?" if near else ""
    )
