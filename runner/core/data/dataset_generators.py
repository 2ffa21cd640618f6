"""Random generators that a user's data set keeps, seeded for each sample."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch

from runner.core.data.order import mix

MAX_GENERATORS = 64
MAX_LEVELS = 8  # four objects, each in a list, tuple or dict
MAX_ITEMS = 1000  # of a list, tuple or dict
MAX_OBJECTS = 20_000
KINDS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, torch.Tensor, type, ModuleType)
"""Types of values that keep no generator: most of what a data set has."""


def find_generators(dataset: object) -> list[Any]:
    """Return the generators among the attributes of a data set, of the data sets it wraps, and of
    objects in its lists, tuples and dicts; those nearest to it first.

    Global generators and those of the system or of a device are left out. Reads no property.
    """
    seen, generators = set[int](), list[Any]()
    level: list[Any] = [dataset]
    for _ in range(MAX_LEVELS + 1):
        inner = list[Any]()
        for value in level:
            if id(value) in seen or len(seen) > MAX_OBJECTS:
                continue
            seen.add(id(value))
            if not isinstance(value, KINDS):
                inner += _inner_values(value)
            elif _can_be_seeded(value):
                generators.append(value)
        level = inner
    return generators[:MAX_GENERATORS]


def _inner_values(value: Any) -> list[Any]:
    """Return the values in a container, function or object that may keep a generator."""
    values: Iterable[Any]
    if isinstance(value, dict):  # a subclass may compute what it returns
        values = dict.values(value)
    elif isinstance(value, list):
        values = list.__iter__(value)
    elif isinstance(value, tuple):
        values = tuple.__iter__(value)
    elif isinstance(value, partial):
        values = (value.func, *value.args, *value.keywords.values())
    elif hasattr(type(value), "__self__"):  # a method, also of a class in C
        values = (value.__self__,)
    elif isinstance(value, FunctionType):
        values = _closure(value)
    else:
        values = [*getattr(value, "__dict__", {}).values()]
        for attribute in (each for cls in type(value).__mro__ for each in vars(cls).values()):
            if isinstance(attribute, MemberDescriptorType):  # of __slots__
                with suppress(AttributeError):  # not set
                    values.append(attribute.__get__(value))
            elif isinstance(attribute, KINDS):
                values.append(attribute)
    return [each for each in islice(values, MAX_ITEMS) if not isinstance(each, PLAIN)]


def _closure(function: FunctionType) -> list[Any]:
    values = list[Any]()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            values.append(cell.cell_contents)
    return values


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        return generator is not torch.default_generator and generator.device.type == "cpu"
    if isinstance(generator, random.Random):
        is_global = generator is getattr(random.random, "__self__", None)
        return not is_global and not isinstance(generator, random.SystemRandom)
    if generator is getattr(np.random.random_sample, "__self__", None):  # the global one
        return False
    name = _bit_generator_name(generator)
    return isinstance(getattr(np.random, name, None), type)  # not of a class of the user's


def _bit_generator_name(generator: Any) -> str:
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state(legacy=False)["bit_generator"])
    return type(generator.bit_generator).__name__


def seed_generators(generators: Sequence[Any], seed: int) -> None:
    """Seed each generator from `seed`, with a stream of its own."""
    for number, generator in enumerate(generators):
        stream = mix(seed, number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(stream)
        elif isinstance(generator, random.Random):
            generator.seed(stream)
        else:
            seeded = getattr(np.random, _bit_generator_name(generator))(stream)
            is_legacy = isinstance(generator, np.random.RandomState)
            kind: Any = np.random.RandomState if is_legacy else np.random.Generator
            set_states([generator], get_states([kind(seeded)]))


def get_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of the generators."""
    states = list[Any]()
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(generator.get_state())
        elif isinstance(generator, random.Random):
            states.append(generator.getstate())
        elif isinstance(generator, np.random.RandomState):
            states.append(generator.get_state(legacy=False))
        else:
            states.append(generator.bit_generator.state)
    return states


def set_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Set the states of the generators, as `get_states` returned them."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def comparable(state: Any) -> Any:
    """Return states in a form that `==` compares, arrays and tensors as bytes."""
    if isinstance(state, list | dict):
        values = state.values() if isinstance(state, dict) else state
        return [comparable(value) for value in values]
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state
