"""The names that plain data need in a pickle, and what each may be called with.

The list is one of exact names. What they are called with is checked as closely, since a few of
them make a lot out of little: sizes, bytes, views of a storage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from runner.security.gate.marks import Box, Bytes, Made, Name, Storage, Tensor
from runner.security.gate.policy import Whose
from runner.security.gate.refused import SAVE_AGAIN, Refused

STORAGES = {
    "torch.DoubleStorage": 8, "torch.FloatStorage": 4, "torch.HalfStorage": 2,
    "torch.BFloat16Storage": 2, "torch.LongStorage": 8, "torch.IntStorage": 4,
    "torch.ShortStorage": 2, "torch.CharStorage": 1, "torch.ByteStorage": 1,
    "torch.BoolStorage": 1, "torch.ComplexDoubleStorage": 16, "torch.ComplexFloatStorage": 8,
    "torch.storage.UntypedStorage": 1,
}  # fmt: skip
DTYPES = {
    "torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2,
    "torch.float8_e4m3fn": 1, "torch.float8_e5m2": 1, "torch.float8_e4m3fnuz": 1,
    "torch.float8_e5m2fnuz": 1, "torch.float8_e8m0fnu": 1, "torch.int64": 8, "torch.int32": 4,
    "torch.int16": 2, "torch.int8": 1, "torch.uint64": 8, "torch.uint32": 4, "torch.uint16": 2,
    "torch.uint8": 1, "torch.bool": 1, "torch.complex128": 16, "torch.complex64": 8,
    "torch.complex32": 4,
}  # fmt: skip
# Tensors that the runner does not load, as they are called in a pickle.
OTHER_TENSORS = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without values (meta)",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of another class",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device, through numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
    "torch._utils._rebuild_parameter_with_state": "a parameter with attributes of its own",
    "torch._tensor._rebuild_from_type_v2": "a tensor of another class, or with attributes",
}
LOCATION = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?", re.ASCII)
KEY = re.compile(r"[0-9]{1,20}", re.ASCII)
MOST = 1 << 62  # elements and bytes; what is larger would overflow


def call(name: str, arguments: tuple[Any, ...], made: Made, whose: Whose) -> Any:
    """What calling `name` would give. Raises Refused without a place."""
    if name in OTHER_TENSORS and not (
        whose is Whose.OWN and name == "torch._utils._rebuild_sparse_tensor"
    ):
        raise Refused(
            "tensor.kind", "", f"{OTHER_TENSORS[name]}, which is not loaded",
            "save a plain one: .dequantize(), .to_dense(), .detach() or .clone()",
        )  # fmt: skip
    if name not in _CALLS:
        raise Refused("pickle.call", "", f"calls {name}", "")
    try:
        return _CALLS[name](arguments, made)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        raise Refused(
            "pickle.arguments", "", f"calls {name} with what torch.save never does", SAVE_AGAIN
        ) from None


def build(target: Any, state: Any) -> str:
    """Why this state may not be put into this object; nothing where it may."""
    if type(target) is not Box or target.kind != "OrderedDict":
        return "puts a state into an object"
    # what Module.state_dict() brings along, and load_state_dict() asks for
    if type(state) is Box and state.kind == "dict" and state.names == ["_metadata"]:
        inner = state.values[0]
        if state.count == 1 and type(inner) is Box and inner.kind == "OrderedDict":
            return ""
    names = [name for name in state.names if type(name) is str] if type(state) is Box else []
    return f"gives a dict attributes of its own ({', '.join(name[:40] for name in names)})"


def storage(identity: Any, known: Mapping[str, int] | None) -> Storage:
    """The storage of a persistent id. Raises Refused without a place."""
    parts = identity if type(identity) is tuple else ()
    if known is None and len(parts) == 6 and parts[5] is None:  # the old format's view, not used
        parts = parts[:5]
    if len(parts) != 5 or parts[0] != "storage" or type(parts[1]) is not Name:
        raise Refused("torch.storage", "", "a storage is called by what is no id of one")
    kind, key, location, count = parts[1].name, *parts[2:]
    item = STORAGES.get(kind)
    if known is None and kind == "torch.storage.UntypedStorage":
        raise Refused(
            "tensor.kind", "", "numbers of a type that torch itself cannot read from its old "
            "format, such as uint16, complex32 or float8", SAVE_AGAIN,
        )  # fmt: skip
    if item is None:
        raise Refused(
            "tensor.kind", "", f"a {kind}, which is not loaded",
            "save plain tensors: .dequantize() quantised ones",
        )  # fmt: skip
    texts = type(key) is str and KEY.fullmatch(key)
    if not texts or type(location) is not str or not LOCATION.fullmatch(location):
        raise Refused("torch.storage", "", "a storage's key or device is malformed")
    if type(count) is not int or not 0 <= count * item < MOST:
        raise Refused("torch.storage", "", f"storage {key} has no size that could be")
    size = count * item
    if known is not None and known.get(key) != size:
        there = f"{known[key]:,} bytes" if key in known else "nothing"
        raise Refused(
            "torch.storage", "", f"storage {key} should have {size:,} bytes, and there is {there}"
        )
    return Storage(key, size, item)


def _tensor(arguments: tuple[Any, ...], made: Made) -> Tensor:
    """`_rebuild_tensor_v2`: storage, offset, size, stride, requires_grad, hooks, metadata."""
    _rest(arguments, 6)
    return _view(arguments, made, arguments[0].item)


def _typed_tensor(arguments: tuple[Any, ...], made: Made) -> Tensor:
    """`_rebuild_tensor_v3`, which has the type of its elements after the hooks."""
    _rest(arguments, 7)
    return _view(arguments, made, DTYPES[arguments[6].name])


def _rest(arguments: tuple[Any, ...], least: int) -> None:
    """Hooks are empty, and the metadata is at most that of a lazily conjugated tensor."""
    requires_grad, hooks, metadata = arguments[4], arguments[5], arguments[least:]
    if type(requires_grad) is not bool or type(arguments[0]) is not Storage:
        raise TypeError
    _no_hooks(hooks)
    if len(metadata) > 1:
        raise ValueError
    for found in metadata:
        if type(found) is Box and found.kind == "dict" and found.count <= 2:
            found.fixed = True
            if all(name == "conj" or name == "neg" for name in found.names):
                continue
        elif found is None:
            continue
        raise ValueError


def _no_hooks(hooks: Any) -> None:
    """What would be called in backward: none, and none later."""
    if type(hooks) is not Box or hooks.kind != "OrderedDict" or hooks.count:
        raise ValueError
    hooks.fixed = True


def _view(arguments: tuple[Any, ...], made: Made, item: int) -> Tensor:
    held, offset, size, stride = arguments[:4]
    sizes = [offset, *size, *stride]
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        raise TypeError
    if len(size) > 64 or any(type(n) is not int or not 0 <= n < MOST for n in sizes):
        raise ValueError
    count = 1
    for n in size:
        count *= n
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if count and (last + 1) * item > held.size or offset * item > held.size:
        raise Refused(
            "torch.bounds", "", f"a tensor reaches beyond the {held.size:,} bytes of storage "
            f"{held.key}",
        )  # fmt: skip
    view = (held.key, offset, size, stride, item)
    if view not in made.views:
        made.views.add(view)
        made.bytes += count * item
    return Tensor(held)


def _parameter(arguments: tuple[Any, ...], made: Made) -> Tensor:
    tensor, requires_grad, hooks = arguments
    if type(tensor) is not Tensor or type(requires_grad) is not bool:
        raise TypeError
    _no_hooks(hooks)
    return tensor


def _sparse(arguments: tuple[Any, ...], made: Made) -> Tensor:
    """Of our own files: `torch.load` validates it, since the check of invariants is on."""
    layout, parts = arguments
    if type(layout) is not str or type(parts) is not tuple:
        raise TypeError
    return Tensor(None)


def _layout(arguments: tuple[Any, ...], made: Made) -> str:
    (layout,) = arguments
    if layout not in ("torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc",
                      "torch.sparse_bsr", "torch.sparse_bsc"):  # fmt: skip
        raise ValueError
    return str(layout)


def _ordered(arguments: tuple[Any, ...], made: Made) -> Box:
    if arguments:
        raise ValueError
    return Box("OrderedDict")


def _counter(arguments: tuple[Any, ...], made: Made) -> Box:
    (items,) = arguments or (Box("dict"),)
    if type(items) is not Box or items.kind != "dict":
        raise TypeError
    made.items += items.count
    return Box("Counter", items.count)


def _set(arguments: tuple[Any, ...], made: Made) -> Box:
    (items,) = arguments
    if type(items) is not Box or items.kind != "list":
        raise TypeError
    made.items += items.count
    made.odd += items.odd
    return Box("set", items.count)


def _bytes(arguments: tuple[Any, ...], made: Made) -> Bytes:
    """`_codecs.encode`, as bytes are pickled: no other codec, and not twice."""
    text, codec = arguments
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise TypeError
    made.text += len(text)
    if max(text, default="") > "\xff":
        raise ValueError
    return Bytes(len(text))


def _bytearray(arguments: tuple[Any, ...], made: Made) -> Bytes:
    """A copy of bytes, or empty, or of text as old Pythons have it; of a number, never."""
    if len(arguments) == 2:
        return _bytes(arguments, made)
    (copied,) = arguments or (Bytes(0),)
    if type(copied) is not Bytes:
        raise TypeError
    made.text += copied.size
    return copied


def _no_bytes(arguments: tuple[Any, ...], made: Made) -> Bytes:
    """An empty one, which is how protocol 2 has it; a number in its place would be a length."""
    if arguments:
        raise ValueError
    return Bytes(0)


def _complex(arguments: tuple[Any, ...], made: Made) -> complex:
    real, imaginary = arguments
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError
    return complex(real, imaginary)


def _size(arguments: tuple[Any, ...], made: Made) -> Box:
    (sizes,) = arguments
    if type(sizes) is not tuple or any(type(n) is not int for n in sizes):
        raise TypeError
    made.items += len(sizes)
    return Box("Size")


def _device(arguments: tuple[Any, ...], made: Made) -> Box:
    name, *index = arguments
    if type(name) is not str or not LOCATION.fullmatch(name):
        raise ValueError
    if len(index) > 1 or any(type(n) is not int for n in index):
        raise ValueError
    return Box("device")


_CALLS: dict[str, Callable[[tuple[Any, ...], Made], Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytes": _no_bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _bytes,
    "torch.Size": _size,
    "torch.device": _device,
}
NAMES = frozenset({*_CALLS, *STORAGES, *DTYPES, *OTHER_TENSORS})
