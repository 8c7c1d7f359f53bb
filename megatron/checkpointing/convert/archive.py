"""Zip archives as torch.save writes them: nothing compressed, so that an entry is a place in the file."""

import dataclasses
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from megatron.checkpointing.checksum import CHUNK_BYTES, crc32
from megatron.checkpointing.untrusted import shown

# What stands before the bytes of an entry: mark, 22 bytes that the list at the end repeats, lengths of name and extra.
_LOCAL = struct.Struct("<4s22xHH")
MARK = b"PK\x03\x04"
_ENCRYPTED = 1


@dataclasses.dataclass(frozen=True)
class Place:
    """Where bytes lie in a file: `size` from `begin` on, and their CRC-32 where that is known."""

    begin: int
    size: int
    checksum: int | None = None


def read_archive(path: Path) -> dict[str, Place]:
    """The place of each entry by name.

    Raises ValueError where the archive is damaged, or an entry is compressed, encrypted, there twice or inside another:
    so all of them together are no larger than the file.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            entries = archive.infolist()
            places = {entry.filename: _place(stream, entry) for entry in entries}
            if len(places) < len(entries):
                raise ValueError("two of its entries have one name")
            _check_apart(places, archive.start_dir)
            return places
    except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError, OSError, OverflowError) as error:
        raise ValueError(f"the archive is damaged ({error})") from error


def _place(stream: IO[bytes], entry: zipfile.ZipInfo) -> Place:
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        raise ValueError(f"{shown(entry.filename)} is compressed")
    if entry.flag_bits & _ENCRYPTED:
        raise ValueError(f"{shown(entry.filename)} is encrypted")
    stream.seek(entry.header_offset)
    mark, name, extra = _LOCAL.unpack(stream.read(_LOCAL.size))
    if mark != MARK:
        raise ValueError(f"{shown(entry.filename)} does not begin where the archive says")
    return Place(entry.header_offset + _LOCAL.size + name + extra, entry.file_size, entry.CRC)


def _check_apart(places: Mapping[str, Place], end: int) -> None:
    """Raise ValueError where two places overlap, or one reaches beyond `end`."""
    ordered = sorted(places.items(), key=lambda item: item[1].begin)
    behind = [place.begin for _, place in ordered[1:]] + [end]
    for (name, place), following in zip(ordered, behind, strict=True):
        if place.begin + place.size > following:
            raise ValueError(f"{shown(name)} reaches into what follows it")


def content_of(path: Path, place: Place) -> bytes:
    """The bytes at a place. Raises ValueError where they are not those that were written."""
    with open(path, "rb") as stream:
        stream.seek(place.begin)
        content = stream.read(place.size)
    if len(content) < place.size or crc32(content) != place.checksum:
        raise ValueError("a part of it does not match its checksum")
    return content


def checksum_of(stream: IO[bytes], place: Place) -> int:
    """The CRC-32 of the bytes at a place, of an open file, as far as they are there."""
    checksum = 0
    stream.seek(place.begin)
    for begin in range(0, place.size, CHUNK_BYTES):
        checksum = crc32(stream.read(min(CHUNK_BYTES, place.size - begin)), checksum)
    return checksum
