"""The cache of arrays: found by what determines them, never trusted when damaged, built by one, awaited by others."""

import fcntl
import json
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import DataConfig, GPTDataset, build_gpt_datasets
from megatron.data import cache as cache_module
from megatron.data.cache import ArrayCache, Stored
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_format import HEADER_BYTES
from tests.harness.token_files import write_token_files

KEY = {"what": "squares", "n": 1000}


class Builder:
    """Counts how often it builds."""

    def __init__(self, n: int = 1000) -> None:
        self.n, self.calls = n, 0

    def __call__(self) -> Stored:
        self.calls += 1
        return Stored({"squares": np.arange(self.n) ** 2, "pairs": np.zeros((3, 2), np.int32)}, {"n": self.n})


def entry(folder: Path, ending: str) -> Path:
    (found,) = folder.glob(f"*{ending}")
    return found


def test_what_is_built_once_is_found_again(tmp_path: Path) -> None:
    build = Builder()
    first = ArrayCache([tmp_path / "new" / "folder"]).get("x", KEY, build)
    second = ArrayCache([tmp_path / "new" / "folder"], builds=False, timeout=0).get("x", KEY, build)
    assert build.calls == 1
    for stored in (first, second):
        np.testing.assert_array_equal(stored.arrays["squares"], np.arange(1000) ** 2)
        assert stored.arrays["pairs"].shape == (3, 2)
        assert stored.facts == {"n": 1000}
        assert not stored.arrays["squares"].flags.writeable
    assert sorted(p.suffix for p in (tmp_path / "new" / "folder").iterdir()) == [".json", ".npy", ".npy"]


def test_whatever_determines_the_arrays_is_in_the_key(tmp_path: Path) -> None:
    build = Builder()
    for changed in ({}, {"n": 1001}, {"what": "cubes"}, {"seed": 1}):
        ArrayCache([tmp_path]).get("x", KEY | changed, build)
    assert build.calls == 4


def truncate(folder: Path) -> None:
    file = entry(folder, "squares.npy")
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = entry(folder, "squares.npy")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def other_type(folder: Path) -> None:
    file = entry(folder, "squares.npy")
    np.save(file, np.load(file).astype(np.float64))


def remove(folder: Path) -> None:
    entry(folder, "pairs.npy").unlink()


def cut_description(folder: Path) -> None:
    file = entry(folder, ".json")
    file.write_text(file.read_text()[:50])


def other_description(folder: Path) -> None:
    file = entry(folder, ".json")
    content = json.loads(file.read_text())
    content["determined_by"]["n"] = 7
    file.write_text(json.dumps(content))


def other_facts(folder: Path) -> None:
    file = entry(folder, ".json")
    content = json.loads(file.read_text())
    content["facts"]["n"] = 999
    file.write_text(json.dumps(content))


def empty_description(folder: Path) -> None:
    entry(folder, ".json").write_text("[]")


def nested_description(folder: Path) -> None:
    entry(folder, ".json").write_text("[" * 100_000)


DAMAGE = [truncate, flip, other_type, remove, cut_description, other_description, other_facts, empty_description]


@pytest.mark.parametrize("damage", [*DAMAGE, nested_description])
def test_a_damaged_entry_is_built_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    build = Builder()
    ArrayCache([tmp_path]).get("x", KEY, build)
    damage(tmp_path)
    with pytest.raises(ValueError, match="did not appear within 0 seconds"):
        ArrayCache([tmp_path], builds=False, timeout=0).get("x", KEY, build)
    with caplog.at_level(logging.WARNING):
        again = ArrayCache([tmp_path]).get("x", KEY, build)
    assert "it is built anew" in caplog.text
    assert build.calls == 2
    np.testing.assert_array_equal(again.arrays["squares"], np.arange(1000) ** 2)
    assert again.facts == {"n": 1000}
    ArrayCache([tmp_path], builds=False, timeout=0).get("x", KEY, build)


def test_large_arrays_are_mapped_and_looked_at_in_spots_or_whole(tmp_path: Path) -> None:
    build = Builder(1 << 20)  # 8 MiB
    stored = ArrayCache([tmp_path]).get("x", KEY, build)
    assert len(pickle.dumps(stored)) < 2000  # a worker process opens the files
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(stored)).arrays["squares"], np.arange(1 << 20) ** 2)
    file = entry(tmp_path, "squares.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ArrayCache([tmp_path]).get("x", KEY, build)
    assert build.calls == 2  # the end is among the spots
    content[-1] ^= 1
    content[128 + (1 << 16) + 10] ^= 1  # between two of them
    file.write_bytes(content)
    ArrayCache([tmp_path]).get("x", KEY, build)
    assert build.calls == 2
    ArrayCache([tmp_path], thorough=True).get("x", KEY, build)
    assert build.calls == 3


def test_who_does_not_build_waits_for_what_appears_late(tmp_path: Path) -> None:
    build = Builder()

    def later() -> None:
        time.sleep(0.3)
        ArrayCache([tmp_path]).get("x", KEY, build)

    thread = threading.Thread(target=later)
    thread.start()
    stored = ArrayCache([tmp_path], builds=False, timeout=30).get("x", KEY, lambda: pytest.fail("it builds"))
    thread.join()
    assert stored.facts == {"n": 1000}


def test_a_wait_ends_with_a_sentence(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"x-[0-9a-f]{24}.json did not appear within 0.2 seconds: .*build_index.py"):
        ArrayCache([tmp_path], builds=False, timeout=0.2).get("x", KEY, Builder())
    assert time.monotonic() - began < 60


def slow_get(folder: str, log: str) -> int:
    def build() -> Stored:
        with open(log, "a") as stream:
            stream.write("built\n")
        time.sleep(0.3)
        return Builder()()

    return int(ArrayCache([Path(folder)]).get("x", KEY, build).arrays["squares"][-1])


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(slow_get, [(str(tmp_path / "c"), str(log))] * 4, chunksize=1)
    assert results == [999**2] * 4
    assert log.read_text() == "built\n"
    assert not list((tmp_path / "c").glob("*.lock"))


def test_where_nothing_can_be_locked_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    build = Builder()
    assert ArrayCache([tmp_path]).get("x", KEY, build).facts == {"n": 1000}
    assert build.calls == 1


def refuse_for(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, refused: Callable[..., bool]) -> None:
    """Let function `name` of `owner` fail as it does for files of another user, where `refused` says so."""
    original = getattr(owner, name)

    def guarded(*arguments: Any, **options: Any) -> Any:
        if refused(*arguments):
            raise PermissionError(13, "Permission denied")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, guarded)


def is_lock(path: object, *_: object) -> bool:
    return str(path).endswith(".lock")


def test_the_lock_of_another_user_locks_and_may_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_for(monkeypatch, cache_module.os, "open", lambda path, flags, *_: is_lock(path) and flags & os.O_RDWR)
    refuse_for(monkeypatch, Path, "unlink", is_lock)
    build = Builder()
    lock = tmp_path / f"x-{cache_module._key(KEY)}.lock"
    lock.touch(0o644)
    with open(lock) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="did not appear"):
            ArrayCache([tmp_path], timeout=0).get("x", KEY, build)
    assert ArrayCache([tmp_path]).get("x", KEY, build).files
    assert build.calls == 1
    assert lock.exists()


def test_without_any_lock_the_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_for(monkeypatch, cache_module.os, "open", is_lock)
    assert ArrayCache([tmp_path], timeout=0).get("x", KEY, Builder()).files
    ArrayCache([tmp_path], builds=False, timeout=0).get("x", KEY, Builder())


@pytest.mark.parametrize(("suffix", "damage"), [(".npy", flip), (".json", other_facts)])
def test_a_folder_that_takes_no_files_is_passed_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    suffix: str,
    damage: Callable[[Path], None],
) -> None:
    """As a sticky folder with a damaged entry of another user: files can be made, but not put in its place."""
    folders = [tmp_path / "data", tmp_path / "home"]
    build = Builder()
    ArrayCache(folders[:1]).get("x", KEY, build)
    damage(folders[0])
    names = ("data", "home")
    refuse_for(
        monkeypatch,
        cache_module.os,
        "replace",
        lambda _, target: Path(target).parent.name in names and Path(target).suffix == suffix,
    )
    with pytest.raises(ValueError, match="indices cannot be kept there .*Permission denied.*--data-cache-path"):
        ArrayCache(folders[:1], required=True).get("x", KEY, build)
    with caplog.at_level(logging.WARNING):
        assert ArrayCache(folders).get("x", KEY, build).files == {}
    assert caplog.text.count("indices cannot be kept there") == 2
    names = ("data",)
    kept = ArrayCache(folders).get("x", KEY, build)
    assert {Path(file).parent for file in kept.files.values()} == {folders[1]}
    assert build.calls == 4
    np.testing.assert_array_equal(kept.arrays["squares"], np.arange(1000) ** 2)
    assert ArrayCache(folders, builds=False, timeout=0).get("x", KEY, build).files == kept.files
    assert not [path for folder in folders for path in folder.iterdir() if path.suffix in (".lock", ".tmp")]


def test_only_who_waits_lists_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Path] = []

    def counted(path: Path) -> list[str]:
        listed.append(path)
        return [found.name for found in os.scandir(path)]

    monkeypatch.setattr(cache_module.os, "listdir", counted)
    for n in range(3):
        ArrayCache([tmp_path]).get("x", {"n": n}, Builder())
    assert listed == []
    with pytest.raises(ValueError, match="did not appear"):
        ArrayCache([tmp_path], builds=False, timeout=0.1).get("x", KEY, Builder())
    assert listed


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> Stored:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ArrayCache([tmp_path]).get("x", KEY, build)
    assert not list(tmp_path.glob("*.npy")) + list(tmp_path.glob("*.json"))
    assert ArrayCache([tmp_path]).get("x", KEY, Builder()).facts == {"n": 1000}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # no folder can be made below it
    broken = tmp_path / "file" / "x"
    build = Builder()
    ArrayCache([broken, tmp_path / "home"]).get("x", KEY, build)
    assert entry(tmp_path / "home", ".json")
    ArrayCache([broken, tmp_path / "home"], builds=False, timeout=0).get("x", KEY, build)
    assert build.calls == 1
    assert ArrayCache([broken], builds=False).get("x", KEY, build).files == {}  # everybody for himself
    with pytest.raises(ValueError, match="--data-cache-path .*x: it cannot be written"):
        ArrayCache([broken], required=True).get("x", KEY, build)


# --- indices of GPT datasets ------------------------------------------------------------------------------------------


def gpt(
    folder: Path, prefix: str, builds: bool = False, seed: int = 1, samples: int = 30, **changes: object
) -> GPTDataset:
    config = DataConfig(
        **{"data_path": (prefix,), "seq_length": 4, "split": "1,0,0", "data_cache_path": str(folder)} | changes,
        data_cache_timeout_minutes=0,
    )
    train = build_gpt_datasets(config, num_samples=(samples, 0, 0), seed=seed, eod_id=None, builds_indices=builds)[0]
    assert isinstance(train, GPTDataset)
    return train


def test_indices_depend_on_all_that_their_key_holds(tmp_path: Path) -> None:
    documents = [[[1] * (3 + k % 5)] for k in range(20)]
    prefix = write_token_files(tmp_path / "x", documents)
    kept = gpt(tmp_path / "c", prefix, builds=True)
    again = gpt(tmp_path / "c", prefix)
    for name in ("documents", "samples", "shuffle"):
        np.testing.assert_array_equal(getattr(again.indices, name), getattr(kept.indices, name))
    assert [again[i]["tokens"].tolist() for i in range(30)] == [kept[i]["tokens"].tolist() for i in range(30)]
    copied = pickle.loads(pickle.dumps(again))
    np.testing.assert_array_equal(copied[7]["tokens"], again[7]["tokens"])
    for changes in ({"seed": 2}, {"samples": 60}, {"seq_length": 5}, {"split": "9,1,0"}):
        with pytest.raises(ValueError, match="did not appear"):
            gpt(tmp_path / "c", prefix, **changes)
    # the same number of documents and tokens, cut elsewhere: stale
    write_token_files(tmp_path / "x", documents[::-1])
    with pytest.raises(ValueError, match="did not appear"):
        gpt(tmp_path / "c", prefix)
    # what the indices do not depend on
    write_token_files(tmp_path / "y", [[[2] * len(d[0])] for d in documents])
    (tmp_path / "c" / "moved").mkdir()
    for extension in (".bin", ".idx"):
        Path(f"{tmp_path / 'y'}{extension}").rename(f"{tmp_path / 'x'}{extension}")
    gpt(tmp_path / "c", prefix, reset_position_ids=True)


def test_a_share_that_begins_elsewhere_is_another(tmp_path: Path) -> None:
    """With the same end, and the same number of samples asked of it."""
    prefix = write_token_files(tmp_path / "x", [[[k] * 6] for k in range(20)])
    valid: list[set[int]] = []
    for split, begin in (("5,4,1", 10), ("6,3,1", 12)):
        config = DataConfig(data_path=(prefix,), seq_length=4, split=split, data_cache_path=str(tmp_path / "c"))
        part = build_gpt_datasets(config, num_samples=(0, 100, 0), seed=1, eod_id=None)[1]
        assert part is not None
        valid.append({int(token) for i in range(100) for token in part[i]["tokens"]})
        assert valid[-1] == set(range(begin, 18))


def test_a_damaged_set_is_told_before_indices_are_made_of_it(tmp_path: Path) -> None:
    """Its last sequence ends where the file ends, so that opening it finds nothing."""
    prefix = write_token_files(tmp_path / "x", [[[1] * 9]] * 9)
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[HEADER_BYTES + 4 * 9 + 8] = 250  # the offset of the second sequence: its end is beyond the file
    Path(prefix + ".idx").write_bytes(index)
    assert len(IndexedDataset(prefix, verify=False)) == 9
    with pytest.raises(ValueError, match=r"x.bin has 162 bytes, its index describes 268"):
        gpt(tmp_path / "c", prefix, builds=True)
    assert not list((tmp_path / "c").glob("*.json"))


def test_indices_lie_beside_the_set_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1] * 9]] * 9)
    gpt(tmp_path, prefix, builds=True, data_cache_path=None)
    assert len(list((tmp_path / "index_cache").glob("x-train-*"))) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache_module.os, "access", lambda path, mode: str(path).startswith(str(tmp_path / "home")))
    gpt(tmp_path, prefix, builds=True, seed=9, data_cache_path=None)
    assert len(list((tmp_path / "home" / "megatron" / "index_cache").glob("x-train-*"))) == 4
