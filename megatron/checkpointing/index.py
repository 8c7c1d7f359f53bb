"""The index of a checkpoint as JSON: where each piece of each tensor is stored, with checksums."""

import dataclasses
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from megatron.base.rectangles import Rectangle, cover_problem
from megatron.checkpointing.checksum import crc32
from megatron.checkpointing.errors import DamageError
from megatron.checkpointing.untrusted import shape_of, unique_keys, whole_numbers

FORMAT = "megatron-checkpoint"
VERSION = 1

# PyTorch's name of a dtype -> the name in a safetensors file.
SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

# A file lies in the checkpoint's own folder: no other name is ever opened.
_FILE_NAME = re.compile(r"rank_[0-9]{5,}\.safetensors")


def file_name(rank: int) -> str:
    """The file that holds the pieces of one rank."""
    return f"rank_{rank:05d}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32". Raises ValueError for a dtype that is not stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_NAMES:
        raise ValueError(f"tensors of {dtype} are not stored; accepted are {', '.join(SAFETENSORS_NAMES)}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """ "float32" -> `torch.float32`."""
    return getattr(torch, name)


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a tensor in a file, and the CRC-32 of each block of its bytes."""

    file: str
    rectangle: Rectangle
    checksums: tuple[int, ...]

    def key(self, name: str) -> str:
        """The key of this piece of tensor `name` in its file: `name@offset`."""
        return f"{name}@{','.join(map(str, self.rectangle.offset))}"

    def as_json(self) -> dict[str, Any]:
        """The entry of the index."""
        offset, shape = self.rectangle
        return {"file": self.file, "offset": list(offset), "shape": list(shape), "crc32": list(self.checksums)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry; raises ValueError where a number is negative or the file is not in the folder."""
        rectangle = Rectangle(whole_numbers(entry["offset"]), shape_of(entry["shape"]))
        return cls(_safe_file(entry["file"]), rectangle, whole_numbers(entry["crc32"]))


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A whole tensor and the pieces that it is stored in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def cover_problem(self) -> str | None:
        """What is wrong where the pieces do not cover the tensor exactly once."""
        return cover_problem(self.shape, [piece.rectangle for piece in self.pieces])

    def as_json(self) -> dict[str, Any]:
        """The entry of the index."""
        return {"dtype": self.dtype, "shape": list(self.shape), "pieces": [piece.as_json() for piece in self.pieces]}

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> Self:
        """Read an entry; raises ValueError for a dtype that is not stored and for pieces as `StoredPiece`."""
        if not name.isprintable():
            raise ValueError(f"{reprlib.repr(name)} is no name of a tensor")
        if entry["dtype"] not in SAFETENSORS_NAMES:
            raise ValueError(f"{name} has the unknown dtype {reprlib.repr(entry['dtype'])}")
        pieces = tuple(StoredPiece.from_json(piece) for piece in entry["pieces"])
        return cls(name, entry["dtype"], shape_of(entry["shape"]), pieces)


@dataclasses.dataclass(frozen=True)
class Contents:
    """What some files hold: tensors by global name, each rank's own tensors by rank and name, bytes by file name."""

    tensors: Mapping[str, StoredTensor]
    rank_tensors: Mapping[int, Mapping[str, StoredTensor]]
    files: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The entries of the index."""
        return {
            "tensors": {name: tensor.as_json() for name, tensor in self.tensors.items()},
            "rank_tensors": {
                str(rank): {name: tensor.as_json() for name, tensor in own.items()}
                for rank, own in self.rank_tensors.items()
            },
            "files": dict(self.files),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Read the entries of the index."""
        tensors = {name: StoredTensor.from_json(name, tensor) for name, tensor in entry["tensors"].items()}
        rank_tensors = {
            _rank(rank): {name: StoredTensor.from_json(rank_name(_rank(rank), name), t) for name, t in own.items()}
            for rank, own in entry["rank_tensors"].items()
        }
        files = {_safe_file(name): whole_numbers([size])[0] for name, size in entry["files"].items()}
        return cls(tensors, rank_tensors, files)

    def all_tensors(self) -> Iterator[StoredTensor]:
        """Every stored tensor, those of the ranks included."""
        yield from self.tensors.values()
        for own in self.rank_tensors.values():
            yield from own.values()

    def check_cover(self) -> None:
        """Raise `DamageError` naming the first tensor that its pieces do not cover exactly once.

        Or the first file that would have to hold more than it does: so no tensor is larger than the files.
        """
        room = dict(self.files)
        for tensor in self.all_tensors():
            problem = tensor.cover_problem()
            if problem is not None:
                raise DamageError(f"tensor {tensor.name}: {problem}")
            for piece in tensor.pieces:
                room[piece.file] = room.get(piece.file, 0) - piece.rectangle.size * dtype_of(tensor.dtype).itemsize
                if room[piece.file] < 0:
                    raise DamageError(f"tensor {tensor.name}: {piece.file} is too small to hold it, or is not listed")


def rank_name(rank: int, name: str) -> str:
    """The name under which rank `rank` stores its own tensor `name`."""
    return f"rank{rank}:{name}"


def merged(parts: Iterable[Contents]) -> Contents:
    """The contents of several ranks together; raises ValueError where two give one tensor other shapes or dtypes."""
    tensors: dict[str, StoredTensor] = {}
    rank_tensors: dict[int, Mapping[str, StoredTensor]] = {}
    files: dict[str, int] = {}
    for part in parts:
        for name, new in part.tensors.items():
            old = tensors.get(name, dataclasses.replace(new, pieces=()))
            if (old.dtype, old.shape) != (new.dtype, new.shape):
                raise ValueError(
                    f"tensor {name}: one rank has {old.dtype} {list(old.shape)}, another {new.dtype} {list(new.shape)}"
                )
            tensors[name] = dataclasses.replace(old, pieces=old.pieces + new.pieces)
        rank_tensors.update(part.rank_tensors)
        files.update(part.files)
    return Contents(tensors, rank_tensors, files)


@dataclasses.dataclass(frozen=True)
class Index:
    """All that is known of a checkpoint without reading its tensors.

    Attributes:
        iteration: when it was saved.
        layout: the parallel layout that it was saved at.
        block_bytes: a piece's bytes are checksummed in blocks of this size, the last one shorter.
        state_checksum: CRC-32 of the bytes of `state.json`.
        contents: tensors and files.
    """

    iteration: int
    layout: Mapping[str, Any]
    block_bytes: int
    state_checksum: int
    contents: Contents

    def to_json(self) -> str:
        """The text of `index.json`, which holds the CRC-32 of all else in it."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "layout": dict(self.layout),
            "block_bytes": self.block_bytes,
            "state_crc32": self.state_checksum,
            **self.contents.as_json(),
        }
        return _text({"index_crc32": _checksum(body), **body}, expand=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `index.json`; raises ValueError where it is not whole or not of this format and version."""
        try:
            body = json.loads(text, object_pairs_hook=unique_keys)
            if body["format"] != FORMAT or body["version"] != VERSION:
                found = f"format {reprlib.repr(body['format'])} version {reprlib.repr(body['version'])}"
                raise ValueError(f"{found}; {FORMAT} {VERSION} is read here")
            if body.pop("index_crc32") != _checksum(body):
                raise ValueError("its content does not match its own checksum")
            contents = Contents.from_json(body)
            block_bytes, iteration = whole_numbers([body["block_bytes"], body["iteration"]])
            if not block_bytes or block_bytes % 8:
                raise ValueError(f"blocks of {block_bytes} bytes; a multiple of 8 is needed")
            return cls(iteration, dict(body["layout"]), block_bytes, body["state_crc32"], contents)
        except KeyError as error:
            raise ValueError(f"there is no entry {error}") from error
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"an entry is of the wrong kind ({error})") from error


def _checksum(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _text(value: Any, expand: int) -> str:
    """JSON with the entries of the outer `expand` levels of dicts on lines of their own: a line for each tensor."""
    if not expand or not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_text(entry, expand - 1)}" for key, entry in value.items()) + "\n}"


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or text != str(int(text)):
        raise ValueError(f"{reprlib.repr(text)} is no number of a rank")
    return int(text)


def _safe_file(name: Any) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{reprlib.repr(name)} is no name of a file of a checkpoint, such as {file_name(0)}")
    return name
