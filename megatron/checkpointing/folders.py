"""Folders on disk: names, the tracker, publishing a finished checkpoint, what an interrupted save left behind."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from megatron.base.files import atomic_write, fsync_directory
from megatron.checkpointing.errors import DamageError, unreadable_is_damage

TRACKER = "latest_checkpointed_iteration.txt"
INDEX = "index.json"
STATE = "state.json"
# More than a checkpoint of thousands of ranks has in its JSON files.
_LARGEST_FILE = 2**28
# Bytes: more than any number of an iteration takes, with white space around it.
LONGEST_TRACKER = 100

_logger = logging.getLogger(__name__)
_FOLDER = re.compile(r"iter_([0-9]{7,})")
_OLD = re.compile(r"\.iter_([0-9]{7,})\.old")
_CLASSIC = "is one of Megatron-LM's: tools/convert_checkpoint.py --from megatron makes one of ours of it"
_LEFTOVER = re.compile(rf"\.iter_[0-9]{{7,}}\.(tmp|old|del)|\.{re.escape(TRACKER)}\.[0-9a-f]+\.tmp")


def iteration_folder(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies: `iter_0000010`."""
    return directory / f"iter_{iteration:07d}"


def temporary_folder(directory: Path, iteration: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return directory / f".iter_{iteration:07d}.tmp"


def _old_folder(directory: Path, iteration: int) -> Path:
    """Where an earlier checkpoint of the same iteration stands for the moment in which it is replaced."""
    return directory / f".iter_{iteration:07d}.old"


def tracked_iteration(directory: Path) -> int | None:
    """The iteration that the tracker names, None where there is no tracker; `DamageError` where it names none."""
    path = directory / TRACKER
    if not path.exists():
        return None
    text = read_whole(path, LONGEST_TRACKER).strip()
    if text == b"release":
        raise DamageError(f"{path}: it names no iteration but {text.decode()}, and so {_CLASSIC}")
    if not text.isdigit() or len(text) > 18:
        raise DamageError(f"{path}: it must hold the number of an iteration, and holds {text[:40]!r}")
    return int(text)


def none_there(directory: Path) -> str:
    """Half a sentence on why there is no checkpoint in a folder without a tracker, if it is one."""
    if not directory.is_dir():
        return "there is no such folder"
    if _FOLDER.fullmatch(directory.absolute().name):
        return f"it is the folder of one checkpoint, and {directory.absolute().parent}, around it, is to be given"
    if (directory / "config.json").is_file():
        return "it is a folder of Hugging Face's: tools/convert_checkpoint.py --from hf makes one of ours of it"
    return f"there is no checkpoint in it, for there is no {TRACKER}"


def read_whole(path: Path, most: int = _LARGEST_FILE) -> bytes:
    """The content of the tracker or a JSON file. Raises `DamageError` where it is absent, no file, or above `most`."""
    if not path.is_file():
        raise DamageError(f"{path}: the file is missing")
    with unreadable_is_damage(path):
        size = path.stat().st_size
        if size > most:
            raise DamageError(f"{path}: it has {size} bytes, and at most {most} are read")
        return path.read_bytes()


def saved_iterations(directory: Path) -> list[int]:
    """The iterations whose folders stand in `directory`, ascending."""
    if not directory.is_dir():
        return []
    matches = (_FOLDER.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def iterations_beyond(directory: Path, iteration: int | None) -> list[int]:
    """Those of `saved_iterations` that a run does not go on from which begins with `iteration`, if with any there."""
    return [number for number in saved_iterations(directory) if iteration is None or number > iteration]


def complete_iterations(directory: Path) -> list[int]:
    """The iterations of which `directory` has a checkpoint that was published and has its index, ascending.

    Whether its tensors are undamaged is not looked at.
    """
    found = {n for n in saved_iterations(directory) if (iteration_folder(directory, n) / INDEX).is_file()}
    old = (_OLD.fullmatch(entry.name) for entry in leftovers(directory) if (entry / INDEX).is_file())
    return sorted(found | {int(match[1]) for match in old if match})


def whole_folder(directory: Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint. Raises `DamageError` where there is none.

    A save that was killed in the moment of replacing a checkpoint has left the earlier one under another name: then
    that is it.
    """
    for folder in (iteration_folder(directory, iteration), _old_folder(directory, iteration)):
        if (folder / INDEX).is_file():
            return folder
    folder = iteration_folder(directory, iteration)
    what = f"there is no {INDEX} in it" if folder.is_dir() else "there is no such folder"
    if any(folder.glob("mp_rank_*")):
        raise DamageError(f"{folder}: the checkpoint {_CLASSIC}")
    found = ", ".join(map(str, saved_iterations(directory))) or "none"
    raise DamageError(f"{folder}: {what}; iterations saved in {directory}: {found}")


def leftovers(directory: Path) -> list[Path]:
    """What interrupted saves have left in `directory`."""
    if not directory.is_dir():
        return []
    return sorted(entry for entry in directory.iterdir() if _LEFTOVER.fullmatch(entry.name))


def clean_leftovers(directory: Path) -> None:
    """Remove what interrupted saves have left, and say so; an earlier checkpoint caught in the middle is put back.

    What cannot be is told and left: it is in nobody's way but that of a save of the same iteration.
    """
    for entry in leftovers(directory):
        try:
            _clean(directory, entry)
        except OSError as error:
            _logger.warning("%s: the leftover of an interrupted save cannot be removed: %s", entry, error)


def _clean(directory: Path, entry: Path) -> None:
    number = entry.name.removeprefix(".iter_").removesuffix(".old")
    if number.isdigit() and not iteration_folder(directory, int(number)).exists():
        os.rename(entry, iteration_folder(directory, int(number)))
        _logger.warning("%s: put back from %s, where an interrupted save had left it", directory, entry.name)
        return
    _remove(entry)
    _logger.warning("%s: removed %s, the leftover of an interrupted save", directory, entry.name)


def _remove(entry: Path) -> None:
    """Remove a folder or a file; of a link, by which a checkpoint was moved to another disk, the link alone."""
    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def publish(directory: Path, iteration: int) -> None:
    """Give the complete temporary folder its name, then point the tracker at it.

    At every instant the iteration that the tracker names is whole, under its own name or (for a moment, where a
    checkpoint of the same iteration is replaced) under the old one, which `whole_folder` knows. After an error all is
    as it was before.
    """
    new, final, old = (f(directory, iteration) for f in (temporary_folder, iteration_folder, _old_folder))
    before, ours = _tracker_text(directory), b"%d\n" % iteration
    try:
        if final.exists():
            os.rename(final, old)
        os.rename(new, final)
        fsync_directory(directory)
        with atomic_write(directory / TRACKER) as stream:
            stream.write(ours.decode())
    except Exception as error:
        # Where the tracker named this iteration before, its text does not tell whether it was replaced.
        if new.exists() or before == ours or _tracker_text(directory) != ours:
            _take_back(new, final, old)
            raise
        # After a power cut the tracker may name the checkpoint before: also a whole one.
        _logger.warning("%s: saved, but the tracker's name may not have reached the disk (%s)", final, error)
    # Published: what cannot be removed now is removed before the next save.
    with contextlib.suppress(OSError):
        _remove(old)


def remove_older(directory: Path, published: int, keep: int, left_alone: Collection[int] = ()) -> None:
    """Remove checkpoints before iteration `published`, all but those that make `keep` with it.

    Those of later iterations are of a run that was turned back; they are left, as are folders without an index of ours,
    and `left_alone`, which do not count.
    What cannot be removed is told and left. A checkpoint loses its name before any of its files: never is half of one
    there.
    """
    earlier = [n for n in complete_iterations(directory) if n < published and n not in left_alone]
    for number in earlier[: max(len(earlier) - keep + 1, 0)]:
        folder, doomed = iteration_folder(directory, number), directory / f".iter_{number:07d}.del"
        try:
            os.rename(folder, doomed)
            _remove(doomed)
        except OSError as error:
            _logger.warning("%s: it is to be removed, and cannot be: %s", folder, error)


def _tracker_text(directory: Path) -> bytes | None:
    """What the tracker holds, None where it cannot be read."""
    try:
        return (directory / TRACKER).read_bytes()
    except OSError:
        return None


def _take_back(new: Path, final: Path, old: Path) -> None:
    """Undo the renames of `publish` as far as they were done."""
    if not new.exists():
        os.rename(final, new)
    if old.exists():
        os.rename(old, final)
