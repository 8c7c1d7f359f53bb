"""Reads pickles that others wrote without running anything in them: plain values are rebuilt, all else stands still.

A pickle names functions and classes and has them called. Here a name is never looked up: the few that make plain
things have a stand-in of ours in `_STAND_INS`, and every other becomes an `Inert`, which does nothing. So whatever a
file asks for, nothing is imported and nothing of the file's choice is called; Python's own `pickle` has no part in it.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron.checkpointing.convert.machine import LONGEST_PICKLE, Inert, Machine, StandIn, plain_dict

__all__ = ["LONGEST_PICKLE", "Inert", "Namespace", "StandIn", "read_pickle"]

_LONGEST = 200  # characters of a message that are told
_NUMBERS = re.compile(r"[biuf][0-9]+")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class Namespace(Inert):
    """An `argparse.Namespace`, whose attributes are the entries of `values`."""

    __slots__ = ()

    def __init__(self, *_: Any) -> None:
        super().__init__("argparse.Namespace")

    def build(self, state: Any) -> None:
        """Keep the attributes."""
        if isinstance(state, dict):
            self.values = {key: value for key, value in state.items() if isinstance(key, str)}


class _Dtype(Inert):
    """A NumPy dtype of numbers; `text` is empty for any other."""

    __slots__ = ("text",)

    def __init__(self, text: Any = "", *_: Any) -> None:
        super().__init__("numpy.dtype")
        self.text = text if isinstance(text, str) and _NUMBERS.fullmatch(text) else ""

    def build(self, state: Any) -> None:
        """Keep the order of bytes."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") and self.text:
            self.text = state[1] + self.text.lstrip("<>")


class _Array(np.ndarray[Any, Any]):
    """A NumPy array of numbers; one of anything else stays empty."""

    def build(self, state: Any) -> None:
        """Fill it."""
        _, shape, dtype, by_columns, data = state
        if isinstance(dtype, _Dtype) and dtype.text:
            self.__setstate__((1, shape, np.dtype(dtype.text), bool(by_columns), _bytes(data)))  # type: ignore[arg-type]


def _bytes(data: Any) -> bytes:
    """Bytes, or the text as which old pickles keep them."""
    if isinstance(data, str):
        return data.encode("latin1")
    if not isinstance(data, bytes):
        raise ValueError(f"there is a {type(data).__name__} where bytes are expected")
    return data


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are kept as {reprlib.repr(encoding)}, where latin1 is expected")
    return _bytes(text)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    return plain_dict([entry for key, value in pairs for entry in (key, value)])


def _empty_array(*_: Any) -> NDArray[Any]:
    return np.ndarray.__new__(_Array, (0,), "b")


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, _Dtype) or not dtype.text:
        return None
    return np.frombuffer(_bytes(data), dtype.text, count=1)[0].item()


_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_STAND_INS: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): StandIn(Namespace),
    ("collections", "OrderedDict"): StandIn(_ordered),
    ("_codecs", "encode"): StandIn(_encode),
    # Empty bytes in the oldest protocols.
    **{(module, "bytes"): StandIn(lambda *_: b"") for module in ("builtins", "__builtin__")},
    ("torch", "Size"): StandIn(tuple),
    ("numpy", "dtype"): StandIn(_Dtype),
    **{(module, "_reconstruct"): StandIn(_empty_array) for module in _ARRAYS},
    **{(module, "scalar"): StandIn(_scalar) for module in _ARRAYS},
    # A dtype of PyTorch is its name.
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}


def _no_storage(identity: Any) -> Any:
    raise ValueError(f"it refers to something outside of it, {reprlib.repr(identity)}")


def read_pickle(
    stream: IO[bytes],
    stand_ins: Mapping[tuple[str, str], Any] | None = None,
    storage: Callable[[Any], Any] = _no_storage,
) -> Any:
    """The value of the pickle at the stream's position, which moves behind it.

    Args:
        stream: a file, or bytes in memory.
        stand_ins: what more names stand for, by module and name. A `StandIn` is called with whatever the file gives
            it.
        storage: gives the object for what the pickle refers to outside of itself.

    Dicts, lists, tuples, text and numbers are themselves; `OrderedDict` a dict; NumPy's arrays and scalars of numbers
    are rebuilt; a `Namespace` keeps its values; dtypes of PyTorch are text ("torch.float32"). Everything else is
    `Inert`. Raises ValueError where it cannot be read so, would take memory or time beyond what it is long, or is
    longer than `LONGEST_PICKLE` bytes.
    """
    known = {**_STAND_INS, **(stand_ins or {})}

    def find(module: str, name: str) -> Any:
        if name.endswith("Storage") and module.partition(".")[0] == "torch":
            return name  # of whatever device
        return known.get((module, name)) or Inert(f"{module}.{name}")

    try:
        return Machine(find, storage).run(stream)
    except Exception as error:  # a damaged or hostile pickle can fail in any way
        raise ValueError(
            f"its pickled part cannot be read ({type(error).__name__}: {str(error)[:_LONGEST]})"
        ) from error
