"""Reads pickles that others wrote without running anything in them: plain values are rebuilt, all else stands still.

A pickle names functions and classes and has them called. Here a name is never looked up: the few that make plain
things have a stand-in of ours in `_STAND_INS`, and every other becomes a class of its own that does nothing
(`Inert`). So whatever a file asks for, nothing is imported and nothing of the file's choice is called.
"""

import pickle
import re
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = re.compile(r"[biufc][0-9]+")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class Inert:
    """Stands for an object that is not rebuilt. `name` is what the pickle calls its class or function."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> "Inert":
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Nothing is kept."""

    def extend(self, values: Any) -> None:
        """Nothing is kept."""

    def __repr__(self) -> str:
        return f"<{self.name}, not rebuilt>"


class Namespace(Inert):
    """An `argparse.Namespace`, whose attributes are the entries of `values`."""

    name = "argparse.Namespace"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.values: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.values = {key: value for key, value in state.items() if isinstance(key, str)}


class Dictionary(dict[Any, Any]):
    """An `OrderedDict`; the attributes that a state dict has beside its entries are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


class StandIn:
    """A function of ours that a pickle may call, and can change in no way."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it tries to change what stands for a function")


class _Dtype(Inert):
    """A NumPy dtype of numbers; `text` is empty for any other."""

    def __init__(self, text: Any = "", *_: Any, **__: Any) -> None:
        self.text = text if isinstance(text, str) and _NUMBERS.fullmatch(text) else ""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") and self.text:
            self.text = state[1] + self.text.lstrip("<>")


class _Array(np.ndarray[Any, Any]):
    """A NumPy array of numbers; one of anything else stays empty."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, data = state
        if isinstance(dtype, _Dtype) and dtype.text:
            state = (1, shape, np.dtype(dtype.text), bool(by_columns), _bytes(data))
            super().__setstate__(state)


def _bytes(data: Any) -> bytes:
    """Bytes, or the text as which old pickles keep them."""
    return data if isinstance(data, bytes) else str(data).encode("latin1")


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are kept as {encoding!r}, where latin1 is expected")
    return str(text).encode("latin1")


def _empty_array(*_: Any) -> NDArray[Any]:
    return np.ndarray.__new__(_Array, (0,), "b")


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, _Dtype) or not dtype.text:
        return None
    return np.frombuffer(_bytes(data), dtype.text, count=1)[0].item()


_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_STAND_INS: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): Dictionary,
    ("_codecs", "encode"): StandIn(_encode),
    ("torch", "Size"): tuple,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "numpy.ndarray",
    **{(module, "_reconstruct"): StandIn(_empty_array) for module in _ARRAYS},
    **{(module, "scalar"): StandIn(_scalar) for module in _ARRAYS},
    # A dtype of PyTorch is its name.
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
}


class _Reader(pickle.Unpickler):
    def __init__(
        self, stream: IO[bytes], stand_ins: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any]
    ) -> None:
        super().__init__(stream, encoding="latin1")
        self._stand_ins = {**_STAND_INS, **stand_ins}
        self._storage = storage

    def find_class(self, module: str, name: str, /) -> Any:
        if name.endswith("Storage") and module.partition(".")[0] == "torch":
            return name  # of whatever device
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = type("Inert", (Inert,), {"name": f"{module}.{name}"})
        return self._stand_ins[module, name]

    def persistent_load(self, identity: Any, /) -> Any:
        return self._storage(identity)


def _no_storage(identity: Any) -> Any:
    raise ValueError(f"it refers to something outside of it, {identity!r}")


def read_pickle(
    stream: IO[bytes],
    stand_ins: Mapping[tuple[str, str], Any] | None = None,
    storage: Callable[[Any], Any] = _no_storage,
) -> Any:
    """The value of the pickle at the stream's position, which moves behind it.

    Args:
        stream: a file, or bytes in memory.
        stand_ins: what more names stand for, by module and name. A `StandIn` is called with whatever the file gives
            it; objects that it makes refuse `__setstate__`.
        storage: gives the object for what the pickle refers to outside of itself.

    Dicts, lists, tuples, text and numbers are themselves; `OrderedDict` a dict; NumPy's arrays and scalars of numbers
    are rebuilt; a `Namespace` keeps its values; dtypes of PyTorch are text ("torch.float32"). Everything else is
    `Inert`. Raises ValueError where it cannot be read so.
    """
    try:
        return _Reader(stream, stand_ins or {}, storage).load()
    except Exception as error:  # a damaged or hostile pickle can fail in any way
        raise ValueError(f"its pickled part cannot be read ({type(error).__name__}: {error})") from error
