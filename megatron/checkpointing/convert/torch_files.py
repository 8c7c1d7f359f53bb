"""Files of `torch.save`, in zip archives and in the older container, opened without running anything in them."""

import dataclasses
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron.checkpointing.convert.restricted import StandIn, read_pickle

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
_OLD_MAGIC, _OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a storage lies in a file: its bytes from `begin` on, and their CRC-32 where that is known."""

    begin: int
    size: int
    checksum: int | None = None


@dataclasses.dataclass(frozen=True)
class _File:
    """A file, and the places of its storages by key, which are found while it is opened."""

    path: Path
    places: dict[str, _Place] = dataclasses.field(default_factory=dict)

    def read(self, key: str, begin: int, size: int, whole: int) -> bytearray:
        """`size` bytes from `begin` on of a storage of `whole` bytes."""
        place = self.places.get(key)
        if place is None or place.size != whole:
            raise ValueError(f"{self.path}: the storage {key} is missing, or has not {whole} bytes")
        content = bytearray(size)
        with open(self.path, "rb") as stream:
            stream.seek(place.begin + begin)
            if stream.readinto(content) < size:
                raise ValueError(f"{self.path}: it is cut")
        if size == whole and place.checksum not in (None, zlib.crc32(content)):
            raise ValueError(f"{self.path}: the storage {key} does not match its checksum")
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

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it tries to change a storage")


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: a view of a storage, of which only the part that it needs is read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it tries to change a tensor after it is made")

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
    try:
        if zipfile.is_zipfile(path):
            return _read_zip(path)
        return _read_old(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: the archive is damaged ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# --- zip archives -----------------------------------------------------------------------------------------------------


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError("it is a zip archive, but not one of torch.save: there is no data.pkl in it")
        folder = found[0].partition("/")[0]
        if f"{folder}/byteorder" in archive.namelist() and archive.read(f"{folder}/byteorder") != b"little":
            raise ValueError(_OTHER_BYTES)
        file = _File(path, dict(_zip_places(archive, path, f"{folder}/data/")))
        with archive.open(found[0]) as stream:
            return _read_tensors(stream, file)


def _zip_places(archive: zipfile.ZipFile, path: Path, folder: str) -> Iterator[tuple[str, _Place]]:
    """The place of each entry in `folder`, by the rest of its name. None of them may be compressed."""
    with open(path, "rb") as stream:
        for entry in archive.infolist():
            if not entry.filename.startswith(folder):
                continue
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            stream.seek(entry.header_offset + 26)  # of the lengths of name and extra field, behind which data begins
            lengths = stream.read(4)
            name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            begin = entry.header_offset + 30 + name + extra
            yield entry.filename.removeprefix(folder), _Place(begin, entry.file_size, entry.CRC)


# --- the container before PyTorch 1.6 ---------------------------------------------------------------------------------


def _read_old(path: Path) -> Any:
    """Of pickles, the last of which lists the storages, and then of each storage its length as int64 and its bytes."""
    source = _File(path)
    storages: dict[str, _Storage] = {}
    with open(path, "rb") as stream:
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
        for key in map(str, keys):
            count = int.from_bytes(stream.read(8), "little")
            if count != storages[key].whole:
                raise ValueError(f"the storage {key} has {count} elements, and {storages[key].whole} are wanted")
            size = count * storages[key].dtype.itemsize
            source.places[key] = _Place(stream.tell(), size)
            stream.seek(size, os.SEEK_CUR)
        if stream.tell() > os.fstat(stream.fileno()).st_size:
            raise ValueError("it is cut: its last storages are missing")
    return value


# --- both -------------------------------------------------------------------------------------------------------------


def _read_tensors(stream: IO[bytes], source: _File, storages: dict[str, _Storage] | None = None) -> Any:
    """The pickle at the stream's position; the storages that it refers to are noted in `storages`."""

    def storage(identity: Any) -> _Storage | None:
        if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
            return None  # such as the source text of a module
        _, kind, key, _, count, *view = identity
        if kind not in _STORAGES or not _is_size(count) or not str(key).isalnum():
            raise ValueError(f"the storage {key!r} of kind {kind!r} is not one that is read here")
        whole = _Storage(source, str(key), _STORAGES[kind], count, count)
        if storages is not None:
            storages[whole.key] = whole
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
    plain = all(map(_is_size, (offset, *shape, *stride))) and len(shape) == len(stride)
    if not isinstance(storage, _Storage) or not plain:
        raise ValueError("a tensor is not a view of a storage")
    tensor = FileTensor(storage, offset, tuple(shape), tuple(stride))
    if offset + tensor.extent > storage.count or math.prod(shape) > storage.count:
        raise ValueError(f"a tensor of {tensor.shape} reaches beyond its storage of {storage.count} elements")
    return tensor


def _tensor_of_bytes(storage: Any, offset: Any, shape: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any) -> Any:
    """A tensor whose storage is bytes, of a dtype that is told beside it; None for one that is not read here."""
    known = {str(dtype): dtype for dtype in _STORAGES.values()}
    if not isinstance(storage, _Storage) or dtype not in known:
        return None
    size = known[dtype].itemsize
    typed = dataclasses.replace(storage, dtype=known[dtype], count=storage.count // size, whole=storage.whole // size)
    return _tensor(typed, offset, shape, stride)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _with_attributes(function: Any, _: Any, args: Any, *__: Any) -> Any:
    """A tensor without the attributes that were set on it."""
    return function(*args) if isinstance(function, StandIn) else None
