"""Fingerprints of objects that a program hands over: what can be compared between two runs of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, Protocol, runtime_checkable

import torch

from sage_grpo.models.base import VelocityModel
from sage_grpo.rewards.functions import FunctionReward

SAMPLE = 1024
"""Numbers of a frozen tensor that go into its fingerprint."""
LIBRARIES = ("builtins", "abc", "typing", "torch", "sage_grpo")
"""Classes from here are not a user's code; versions of the package have a fingerprint of their own."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward or a model that knows what makes it the same: weights, settings, versions."""

    def fingerprint(self) -> str:
        """Equal for equal objects, in any process."""
        ...


def of_object(thing: object) -> str:
    """An object's own fingerprint, or that of its code: what it does, not where it stands.

    The code's does not reach what it refers to: globals, closures, attributes.
    """
    if isinstance(thing, Fingerprinted):
        return thing.fingerprint()
    target = thing.function if isinstance(thing, FunctionReward) else thing
    sha = hashlib.sha256()
    for text in _code(target):
        sha.update(text.encode())
    return sha.hexdigest()


def of_weights(model: VelocityModel) -> str:
    """Fingerprint of a model's weights: all names and shapes, and numbers of what is not trained.

    What is trained is in the checkpoint, which replaces it.
    """
    sha = hashlib.sha256()
    trained = {id(parameter) for parameter in model.trainable().values()}
    for module in (model.network, *model.others):
        for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda pair: pair[0]):
            sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if id(tensor) not in trained and tensor.numel():
                flat = tensor.detach().flatten()
                some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to("cpu", torch.float64)
                sha.update(some.contiguous().numpy().tobytes())
    return sha.hexdigest()


def stable(value: Any) -> str:
    """A text that is the same in every process; of objects that are not plain data only the type."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{stable(key)}: {stable(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(stable, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(stable, value))) + "}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"<{type(value).__qualname__}>"


def _code(target: Any) -> Iterator[str]:
    if isinstance(target, CodeType):
        yield f"{target.co_code.hex()} {target.co_names} {target.co_varnames}"
        for constant in target.co_consts:
            yield from _code(constant) if isinstance(constant, CodeType) else (stable(constant),)
    elif inspect.isfunction(target) or inspect.ismethod(target):
        yield from _code(inspect.unwrap(target).__code__)
        function = target.__func__ if inspect.ismethod(target) else target
        yield stable([function.__defaults__, function.__kwdefaults__])
    elif inspect.isclass(target):
        for kind in target.__mro__:
            if kind.__module__.partition(".")[0] not in LIBRARIES:
                yield from _members(kind)
    elif isinstance(target, functools.partial):
        yield from _code(target.func)
        yield stable([target.args, target.keywords])
    elif not inspect.isroutine(target):
        yield from _code(type(target))


def _members(kind: type) -> Iterator[str]:
    """Methods, and constants of the class; its docstring and line number change without any change of meaning."""
    for name, member in sorted(vars(kind).items()):
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        functions = [member.fget, member.fset] if isinstance(member, property) else [member]
        for function in functions:
            if inspect.isfunction(function):
                yield name
                yield from _code(function)
        if not name.startswith("__") and isinstance(member, (int, float, str, bytes, tuple, list, dict)):
            yield f"{name} {stable(member)}"
