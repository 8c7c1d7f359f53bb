"""An independent writer of token files: byte by byte from the table of the format, knowing nothing of megatron.data."""

import struct
from collections.abc import Sequence
from pathlib import Path

# dtype code -> struct letter, for the sizes that the table fixes
LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "d", 8: "H"}


def write_token_files(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    code: int = 8,
    *,
    letter: str | None = None,
    modes: bool = False,
) -> str:
    """Write `documents` (each a list of sequences of ids) as `PREFIX.bin/.idx` and return the prefix.

    `letter` overrides the struct letter of `code`; `modes` appends the byte a sequence that newer writers do.
    """
    letter = letter or LETTERS[code]
    sequences = [sequence for document in documents for sequence in document]
    data, index = bytearray(), bytearray()
    index += b"MMIDIDX\x00\x00"
    index += struct.pack("<Q", 1)
    index += struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences))
    index += struct.pack("<Q", len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    for sequence in sequences:
        index += struct.pack("<q", len(data))
        for token in sequence:
            data += struct.pack("<" + letter, token)
    first = 0
    for document in documents:
        index += struct.pack("<q", first)
        first += len(document)
    index += struct.pack("<q", first)
    if modes:
        index += b"\x00" * len(sequences)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return str(prefix)
