"""CRC-32, as zlib has it: from `zlib-ng` where that is installed, which is several times as fast."""

import zlib

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # there are no wheels for some processors
    crc32 = zlib.crc32

__all__ = ["CHUNK_BYTES", "crc32"]

# Bytes that are copied and checksummed at a time, so that they are still in the processor's cache for the second;
# a multiple of the size of every element. Measured: less takes longer, more is no faster.
CHUNK_BYTES = 2**21
