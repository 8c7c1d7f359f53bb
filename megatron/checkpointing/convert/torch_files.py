"""Files of `torch.save`, in zip archives and in the older container, opened without running anything in them."""

import dataclasses
import io
import math
import mmap
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from megatron.checkpointing.convert.archive import MARK, Place, checksum_of, content_of, read_archive
from megatron.checkpointing.convert.restricted import LONGEST_PICKLE, Inert, StandIn, read_pickle
from megatron.checkpointing.untrusted import shape_of, whole_numbers

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_OTHER_BYTES = "it was written on a machine whose numbers begin with the highest byte"
_LEAST_OLD = 2  # bytes
_OLD_MAGIC, _OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


@dataclasses.dataclass(frozen=True)
class _File:
    """A file, and the places of its storages by key; in the older container they are found behind the tensors."""

    path: Path
    places: dict[str, Place] = dataclasses.field(default_factory=dict)

    def read(self, key: str, begin: int, size: int, whole: int) -> bytearray:
        """`size` bytes from `begin` on of a storage of `whole` bytes, which is verified when it is first read."""
        place = self.places.get(key)
        if place is None or place.size != whole:
            raise ValueError(f"{self.path}: the storage {key} is missing, or has not {whole} bytes")
        with open(self.path, "rb") as stream:
            if place.checksum is not None:
                if checksum_of(stream, place) != place.checksum:
                    raise ValueError(f"{self.path}: the storage {key} does not match its checksum")
                self.places[key] = dataclasses.replace(place, checksum=None)
            content = bytearray(size)
            stream.seek(place.begin + begin)
            if stream.readinto(content) < size:
                raise ValueError(f"{self.path}: it is cut")
        return content


@dataclasses.dataclass(frozen=True)
class _Storage:
    """A flat array in a file: elements `first` to `first + count` of what the file calls `key`."""

    source: _File
    key: str
    dtype: torch.dtype
    count: int
    whole: int
    first: int = 0


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: a view of a storage, of which only the part that it needs is read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.storage.dtype

    @property
    def extent(self) -> int:
        """Elements of the storage from its first one to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def read(self) -> Tensor:
        """Its values."""
        storage, size = self.storage, self.dtype.itemsize
        if not self.extent:
            return torch.empty(self.shape, dtype=self.dtype)
        begin = (storage.first + self.offset) * size
        content = storage.source.read(storage.key, begin, self.extent * size, storage.whole * size)
        return torch.frombuffer(content, dtype=self.dtype).as_strided(self.shape, self.stride)


def read_torch_file(path: Path) -> Any:
    """What `torch.save` wrote to `path`: plain values as `read_pickle` gives them, tensors as `FileTensor`.

    The values of tensors are read from the file later, when they are asked for. Raises ValueError naming the file
    where it is none of these files, damaged, or not to be read without running something in it.
    """
    with open(path, "rb") as stream:
        is_archive = stream.read(len(MARK)) == MARK
    try:
        return _read_zip(path) if is_archive else _read_old(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_zip(path: Path) -> Any:
    entries = read_archive(path)
    found = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise ValueError("it is a zip archive, but not one of torch.save: there is no data.pkl in it")
    folder = found[0].partition("/")[0]
    if f"{folder}/byteorder" in entries and _content(path, entries[f"{folder}/byteorder"]) != b"little":
        raise ValueError(_OTHER_BYTES)
    data = f"{folder}/data/"
    places = {name.removeprefix(data): place for name, place in entries.items() if name.startswith(data)}
    return _read_tensors(io.BytesIO(_content(path, entries[found[0]])), _File(path, places))


def _content(path: Path, place: Place) -> bytes:
    if place.size > LONGEST_PICKLE:
        raise ValueError(f"its part beside the tensors has {place.size} bytes, and at most {LONGEST_PICKLE} are read")
    return content_of(path, place)


def _read_old(path: Path) -> Any:
    """The container before PyTorch 1.6: pickles, the last of which lists the storages, then the storages."""
    if path.stat().st_size < _LEAST_OLD:
        raise ValueError("it is no file of torch.save")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        # A mapping, for it gives no more bytes than there are.
        return _read_old_stream(cast(IO[bytes], stream), path)


def _read_old_stream(stream: IO[bytes], path: Path) -> Any:
    source, storages = _File(path), dict[str, _Storage]()
    if stream.read(2) != b"\x80\x02":
        raise ValueError("it is no file of torch.save")
    stream.seek(0)
    if read_pickle(stream) != _OLD_MAGIC or read_pickle(stream) != _OLD_PROTOCOL:
        raise ValueError("it is no file of torch.save")
    system = read_pickle(stream)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError(_OTHER_BYTES)
    value = _read_tensors(stream, source, storages)
    keys = read_pickle(stream)
    if not isinstance(keys, list) or set(map(str, keys)) != storages.keys() or len(keys) != len(storages):
        raise ValueError("its list of storages is not that of its tensors")
    position, end = stream.tell(), path.stat().st_size
    for key in map(str, keys):
        position = _find_old_storage(stream, position, end, storages[key])
    return value


def _find_old_storage(stream: IO[bytes], position: int, end: int, storage: _Storage) -> int:
    """Note the place of a storage that begins at `position`: its length as int64, then its bytes. Returns its end."""
    stream.seek(position)
    count, size = int.from_bytes(stream.read(8), "little"), storage.whole * storage.dtype.itemsize
    if count != storage.whole:
        raise ValueError(f"the storage {storage.key} has {count} elements, and {storage.whole} are wanted")
    if position + 8 + size > end:
        raise ValueError("it is cut: its last storages are missing")
    storage.source.places[storage.key] = Place(position + 8, size)
    return position + 8 + size


def _read_tensors(stream: IO[bytes], source: _File, storages: dict[str, _Storage] | None = None) -> Any:
    """The pickle at the stream's position; the storages that it refers to are noted in `storages`."""

    def storage(identity: Any) -> _Storage | Inert:
        if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
            return Inert("something outside")  # such as the source text of a module
        _, kind, key, _, count, *view = identity
        named = isinstance(key, str | int) and str(key).isalnum()
        if not isinstance(kind, str) or kind not in _STORAGES or not _is_size(count) or not named:
            words = f"{reprlib.repr(key)} of kind {reprlib.repr(kind)} and {reprlib.repr(count)} elements"
            raise ValueError(f"the storage {words} is not one that is read here")
        whole = _Storage(source, str(key), _STORAGES[kind], count, count)
        if storages is not None and storages.setdefault(whole.key, whole) != whole:
            raise ValueError(f"the storage {key} is of two kinds")
        if not view or view[0] is None:
            return whole
        _, first, length = view[0]
        if not _is_size(first) or not _is_size(length) or first + length > count:
            raise ValueError(f"a view of the storage {key} is larger than it")
        return dataclasses.replace(whole, first=first, count=length)

    return read_pickle(stream, dict(_stand_ins()), storage)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _stand_ins() -> Iterator[tuple[tuple[str, str], Any]]:
    yield ("torch._utils", "_rebuild_tensor"), StandIn(_tensor)
    yield ("torch._utils", "_rebuild_tensor_v2"), StandIn(_tensor)
    yield ("torch._utils", "_rebuild_tensor_v3"), StandIn(_tensor_of_bytes)
    yield ("torch._utils", "_rebuild_parameter"), StandIn(_parameter)
    yield ("torch._utils", "_rebuild_parameter_with_state"), StandIn(_parameter)
    yield ("torch._tensor", "_rebuild_from_type"), StandIn(_with_attributes)
    yield ("torch._tensor", "_rebuild_from_type_v2"), StandIn(_with_attributes)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> FileTensor:
    """A tensor by its view of a storage; ValueError where it would reach beyond it."""
    if not isinstance(storage, _Storage) or not isinstance(shape, list | tuple) or not isinstance(stride, list | tuple):
        raise ValueError("a tensor is not a view of a storage")
    (start,) = whole_numbers([offset])
    tensor = FileTensor(storage, start, shape_of(list(shape)), whole_numbers(list(stride)))
    if len(shape) != len(stride):
        raise ValueError("a tensor has not a stride for each dimension")
    if start + tensor.extent > storage.count or math.prod(shape) > storage.count:
        raise ValueError(f"a tensor of {tensor.shape} reaches beyond its storage of {storage.count} elements")
    return tensor


def _tensor_of_bytes(storage: Any, offset: Any, shape: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Any:
    """A tensor whose storage is bytes, of a dtype that is told beside it; None for one that is not read here."""
    known = {str(dtype): dtype for dtype in _STORAGES.values()}
    if not isinstance(storage, _Storage) or not isinstance(dtype, str) or dtype not in known:
        return Inert("torch.Tensor")
    size = known[dtype].itemsize
    typed = dataclasses.replace(storage, dtype=known[dtype], count=storage.count // size, whole=storage.whole // size)
    return _tensor(typed, offset, shape, stride)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _with_attributes(function: Any, _: Any, args: Any, *__: Any) -> Any:
    """A tensor without the attributes that were set on it."""
    return function(*args) if isinstance(function, StandIn) else Inert("torch.Tensor")
