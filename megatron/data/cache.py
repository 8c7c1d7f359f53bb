"""Arrays that take long to compute, kept in files: found by what determines them, written whole, checked when read.

An entry is a description (`NAME-KEY.json`, where KEY is a hash of what determines the arrays) and a `.npy` file for
each array. The description comes last, so that arrays without one are no entry. Every file appears by a rename, and two
writers of one key write the same bytes: no lock is needed to be right, one only keeps processes from doing the same
work twice. Nothing here knows of ranks: some processes build, the others wait for what appears.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.base.files import temporary_name

_LOG = logging.getLogger(__name__)
_WHOLE_BYTES = 1 << 20  # a file up to this size is read at once, a larger one is mapped
_SPOTS, _SPOT_BYTES = 64, 1 << 16  # of a large file, what is summed when it is opened
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two looks

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Stored:
    """Named arrays and a few plain facts about them, from memory or from the files of a cache.

    What comes from files is read-only, and a worker process opens the files again instead of being sent their content.
    """

    arrays: dict[str, np.ndarray]
    facts: Facts
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., "Stored"], tuple[Any, ...]]:
        return (_reopened, (self.files, self.facts)) if self.files else (Stored, (self.arrays, self.facts))


def _reopened(files: dict[str, str], facts: Facts) -> Stored:
    return Stored({name: _read_array(file) for name, file in files.items()}, facts, files)


def _read_array(file: str | Path) -> np.ndarray:
    mapped = os.path.getsize(file) > _WHOLE_BYTES
    array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    array.flags.writeable = False
    return np.asarray(array)


class _Damaged(Exception):
    """An entry that is not as its description says; the argument tells why."""


@dataclasses.dataclass(frozen=True)
class ArrayCache:
    """Finds entries in `folders`, in order, and puts new ones into the first of them that takes them.

    Attributes:
        folders: where to look. Where none can be written each process builds for itself, unless `required`.
        builds: whether this process builds what is missing; one that does not waits for it.
        timeout: seconds to wait.
        required: whether a folder that cannot be written, or is full, is an error, since the user asked for it.
        thorough: read every byte of what is found, instead of a sample of the large files.
    """

    folders: Sequence[Path]
    builds: bool = True
    timeout: float = 1800.0
    required: bool = False
    thorough: bool = False

    def get(self, name: str, determined_by: Mapping[str, Any], build: Callable[[], Stored]) -> Stored:
        """The arrays that `build` makes, which depend on `determined_by` (plain values) and nothing else.

        An entry that is truncated, damaged or of something else is built anew. Raises ValueError where no entry
        appears in time, or the folder that the user asked for cannot be written.
        """
        description = json.loads(json.dumps(dict(determined_by)))
        stem = f"{name}-{_key(description)}"
        deadline, pause = time.monotonic() + self.timeout, _FIRST_PAUSE
        waited = False
        while (found := self._find(stem, description, look_again=waited)) is None:
            target = self._target()
            if target is None:
                return build()
            if self.builds:
                with _locked(target / f"{stem}.lock") as ours:
                    if ours:  # another process may have built it between the look and the lock
                        found = self._find(stem, description, look_again=waited, tell=True)
                        return found or self._keep(stem, description, build())
            if time.monotonic() > deadline:
                raise ValueError(self._too_late(target / f"{stem}.json"))
            time.sleep(pause)
            pause, waited = min(2 * pause, _LONGEST_PAUSE), True
        return found

    def _too_late(self, file: Path) -> str:
        return (
            f"{file} did not appear within {self.timeout:g} seconds: the process that builds it is still at work, "
            "could not keep it (then it has warned of that) or writes to another file system. Build the indices "
            "beforehand with tools/build_index.py, name a folder that all nodes see with --data-cache-path, or give a "
            "larger --data-cache-timeout-minutes"
        )

    def _find(self, stem: str, description: Facts, *, look_again: bool, tell: bool = False) -> Stored | None:
        for folder in self.folders:
            try:
                # Listing a folder makes a network file system look again for names that it believes absent. A folder
                # may hold thousands: only who waits lists it.
                absent = not (folder / f"{stem}.json").exists()
                if absent and not (look_again and f"{stem}.json" in os.listdir(folder)):
                    continue
                return self._read(folder, stem, description)
            except _Damaged as error:
                if tell:
                    _LOG.warning("%s: %s; it is built anew", folder / f"{stem}.json", error)
            except OSError:
                continue
        return None

    def _read(self, folder: Path, stem: str, description: Facts) -> Stored:
        try:
            content = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
            parts, facts = content["arrays"], content["facts"]
            if content["determined_by"] != description:
                raise _Damaged("it describes other arrays")
            if content["crc32"] != _description_sum(description, facts, parts):
                raise _Damaged("it has another checksum")
            arrays, files = {}, {}
            for name, expected in parts.items():
                file = folder / f"{stem}-{name}.npy"
                arrays[name], files[name] = self._checked(file, expected), str(file)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _Damaged(f"it cannot be read ({error})") from None
        except FileNotFoundError as error:
            raise _Damaged(f"{error.filename} is missing") from None
        return Stored(arrays, facts, files)

    def _checked(self, file: Path, expected: Mapping[str, Any]) -> np.ndarray:
        size = os.path.getsize(file)
        if size != expected["bytes"]:
            raise _Damaged(f"{file.name} has {size} bytes, expected {expected['bytes']}")
        array = _read_array(file)
        if [array.dtype.str, list(array.shape)] != [expected["dtype"], expected["shape"]]:
            raise _Damaged(f"{file.name} holds {array.dtype} {array.shape}")
        if _spot_sum(array) != expected["spots"] or (self.thorough and _whole_sum(array) != expected["crc32"]):
            raise _Damaged(f"{file.name} has another checksum")
        return array

    def _target(self) -> Path | None:
        """The folder to write to; None where each process must do without."""
        folder = next(self._writable(), None)
        if folder is None and self.required:
            raise ValueError(f"--data-cache-path {self.folders[0]}: it cannot be written, and lacks what the run needs")
        return folder

    def _writable(self) -> Iterator[Path]:
        """The folders that this process may write to, each made if need be when it is asked for."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                yield folder

    def _keep(self, stem: str, description: Facts, built: Stored) -> Stored:
        """What was built, from the files of the first folder that takes them, or as it is where none does.

        A folder may be full, or hold a damaged entry of another user that cannot be replaced.
        """
        for folder in self._writable():
            try:
                _write(folder, stem, description, built)
                return self._read(folder, stem, description)
            except (OSError, _Damaged) as error:
                told = f"{folder}: indices cannot be kept there ({error}); see --data-cache-path"
                if self.required:
                    raise ValueError(told) from error
                _LOG.warning("%s", told)
        return built


def _write(folder: Path, stem: str, description: Facts, built: Stored) -> None:
    parts = {}
    for name, array in built.arrays.items():
        file = folder / f"{stem}-{name}.npy"
        with _published(file) as temporary, open(temporary, "wb") as stream:
            np.save(stream, array, allow_pickle=False)
            _to_disk(stream)
        parts[name] = _part(array, os.path.getsize(file))
    content = {
        "determined_by": description,
        "facts": built.facts,
        "arrays": parts,
        "crc32": _description_sum(description, built.facts, parts),
    }
    with _published(folder / f"{stem}.json") as temporary, open(temporary, "w", encoding="utf-8") as text:
        json.dump(content, text, indent=1)


def _key(description: Facts) -> str:
    return hashlib.sha256(_canonical(description)).hexdigest()[:24]


def _description_sum(description: Facts, facts: Facts, parts: Facts) -> int:
    return zlib.crc32(_canonical([description, facts, parts]))


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _part(array: np.ndarray, file_bytes: int) -> Facts:
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": file_bytes,
        "spots": _spot_sum(array),
        "crc32": _whole_sum(array),
    }


def _whole_sum(array: np.ndarray) -> int:
    return zlib.crc32(_bytes_of(array))


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _spot_sum(array: np.ndarray) -> int:
    """The sum of 64 pieces from the first to the last, which are all of it where it is small."""
    content = _bytes_of(array)
    if len(content) <= _SPOTS * _SPOT_BYTES:
        return zlib.crc32(content)
    total = 0
    for spot in range(_SPOTS):
        start = (len(content) - _SPOT_BYTES) * spot // (_SPOTS - 1)
        total = zlib.crc32(content[start : start + _SPOT_BYTES], total)
    return total


def _to_disk(stream: Any) -> None:
    """Flush a file to disk where a power cut could damage it unseen: a small one is summed whole when it is opened."""
    stream.flush()
    if os.fstat(stream.fileno()).st_size > _SPOTS * _SPOT_BYTES:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _published(file: Path) -> Iterator[Path]:
    """A hidden name that becomes `file` when the block ends, and vanishes where it fails."""
    temporary = temporary_name(file)
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Whether this process has the lock of name `file`; it is free again when the block ends or the process does.

    Where nothing can be locked everybody is let in: work may then be done twice, with one result.
    """
    descriptor = _open_lock(file)
    if descriptor is None:
        yield True
        return
    try:
        ours = _try_lock(descriptor)
        yield ours
        if ours:
            # While it is still ours. Whoever waits with the old file finds the entry when it gets the lock. In some
            # folders the file of another user cannot be removed: it stays, and locks as well.
            with contextlib.suppress(OSError):
                file.unlink()
    finally:
        os.close(descriptor)


def _open_lock(file: Path) -> int | None:
    """A descriptor of the file, made if need be; a file of another user is only read, which is enough to lock it."""
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(file, flags, 0o666)
    return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
