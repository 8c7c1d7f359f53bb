"""The layout of `PREFIX.idx` (MMIDIDX version 1): header, element types, names of the pair of files.

All numbers are little-endian and nothing is padded. After the header follow: tokens of each sequence (int32 [N]), byte
offset of each sequence in `.bin` (int64 [N]), document index (int64 [D]: the first sequence of each document, then N).
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
_LAYOUT = struct.Struct("<9sQBQQ")
HEADER_BYTES = _LAYOUT.size

# 6 and 7 have meant both float sizes, by the age of the writer: the length of `.bin` decides.
DTYPES: dict[int, tuple[str, ...]] = {
    1: ("<u1",),
    2: ("<i1",),
    3: ("<i2",),
    4: ("<i4",),
    5: ("<i8",),
    6: ("<f8", "<f4"),
    7: ("<f8", "<f4"),
    8: ("<u2",),
}
_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


class Header(NamedTuple):
    """The first 34 bytes of an index file."""

    magic: bytes
    version: int
    code: int
    sequences: int
    documents: int  # entries of the document index: one more than there are documents

    def pack(self) -> bytes:
        """The header as it stands in the file."""
        return _LAYOUT.pack(*self)

    @property
    def file_bytes(self) -> int:
        """Length of the whole index file, without the byte a sequence that newer writers may append."""
        return HEADER_BYTES + 12 * self.sequences + 8 * self.documents


def unpack_header(data: bytes) -> Header:
    """The `Header` in the first bytes of `data`, unchecked."""
    return Header._make(_LAYOUT.unpack_from(data))


def dtype_code(dtype: np.dtype) -> int:
    """The code that stands for `dtype` in the header; ValueError for a type that the format lacks."""
    try:
        return _CODES[f"{dtype.kind}{dtype.itemsize}"]
    except KeyError:
        raise ValueError(f"token files cannot hold {dtype}: accepted are {', '.join(_CODES)}") from None


def index_path(prefix: str | Path) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def data_path(prefix: str | Path) -> Path:
    """`PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def best_dtype(vocab_size: int) -> np.dtype:
    """The element type that Megatron-LM 2.5 chooses for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")
