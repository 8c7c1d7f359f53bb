"""Checkpoints that are absent, damaged, hostile or of another model: each is refused by name, nothing in them runs."""

import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import read_state
from tests.harness.saved_folders import FILE, TRACKER, change_index, entry, flip, load, model, two_checkpoints


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return two_checkpoints(tmp_path)


# What is done to the folder, and words that the complaint has.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "no tracker": (lambda d: (d / TRACKER).unlink(), f"there is no {TRACKER}"),
    "garbage in the tracker": (lambda d: (d / TRACKER).write_text("ten"), f"{TRACKER}: it must hold the number"),
    "empty tracker": (lambda d: (d / TRACKER).write_text(""), f"{TRACKER}: it must hold the number"),
    "path in the tracker": (lambda d: (d / TRACKER).write_text("../10"), f"{TRACKER}: it must hold the number"),
    "classic release": (
        lambda d: (d / TRACKER).write_text("release"),
        "it names no iteration but release",
    ),
    "no iteration folder": (lambda d: shutil.rmtree(d / "iter_0000010"), "iter_0000010: there is no such folder"),
    "no index": (lambda d: (d / "iter_0000010/index.json").unlink(), "iter_0000010: there is no index.json"),
    "cut index": (lambda d: os.truncate(d / "iter_0000010/index.json", 200), "index.json: the index is broken"),
    "flipped index": (lambda d: flip(d / "iter_0000010/index.json", 250), "index.json: the index is broken"),
    "no state": (lambda d: (d / "iter_0000010/state.json").unlink(), "state.json: the file is missing"),
    "flipped state": (lambda d: flip(d / "iter_0000010/state.json", 3), "state.json: it does not match its checksum"),
    "no pieces": (lambda d: (d / "iter_0000010" / FILE).unlink(), f"{FILE}: the file is missing"),
    "cut pieces": (lambda d: os.truncate(d / "iter_0000010" / FILE, 400), f"{FILE}: it has 400 bytes"),
    "flipped header": (lambda d: flip(d / "iter_0000010" / FILE, 60), f"{FILE}: its header"),
    "flipped header length": (lambda d: flip(d / "iter_0000010" / FILE, 3), f"{FILE}: it is cut"),
    "flipped values": (lambda d: flip(d / "iter_0000010" / FILE, -12), f"{FILE}: tensor b does not match its checksum"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(directory: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    damage(directory)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(directory)


def test_every_flipped_byte_is_found(directory: Path) -> None:
    """Of the pieces each byte, of the JSON files each too: none may load as if nothing were."""
    folder = directory / "iter_0000010"
    for path in (folder / FILE, folder / "index.json", folder / "state.json"):
        good = path.read_bytes()
        harmless = set()
        for position in range(len(good)):
            flip(path, position)
            tensors = {name: torch.zeros_like(t) for name, t in model().items()}
            try:
                load(directory, tensors)
            except ValueError:
                pass
            else:
                harmless.add(position)
                assert all(torch.equal(tensors[name], t) for name, t in model().items())
            path.write_bytes(good)
        # The header begins with {"__metadata__":{"format":"pt"}, which nobody reads.
        allowed = range(10, 38) if path.name == FILE else ()
        assert harmless <= set(allowed), f"{path.name}: bytes {sorted(harmless)} of {len(good)}"


def deep(levels: int) -> list[Any]:
    """A list in a list in a list..."""
    return [deep(levels - 1)] if levels else []


def split_without(index: dict[str, Any], rows: slice) -> None:
    piece = entry(index)["pieces"][0]
    entry(index)["pieces"] = [
        {**piece, "offset": [row, 0], "shape": [1, 3]} for row in range(4) if row not in range(4)[rows]
    ]


INDEX_CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "piece listed twice": (lambda i: entry(i)["pieces"].append(entry(i)["pieces"][0]), "tensor a: the pieces at"),
    "hole": (lambda i: split_without(i, slice(1, 2)), "tensor a: 3 of its 12 elements are in no piece"),
    "no piece": (lambda i: entry(i).update(pieces=[]), "tensor a: 12 of its 12 elements"),
    "piece outside": (lambda i: entry(i)["pieces"][0].update(offset=[1, 0]), "is not inside [4, 3]"),
    "file elsewhere": (lambda i: entry(i)["pieces"][0].update(file="../x.safetensors"), "is no name of a file"),
    "absolute file": (lambda i: i["files"].update({"/etc/passwd": 1}), "is no name of a file"),
    "unknown file": (lambda i: entry(i)["pieces"][0].update(file="rank_00009.safetensors"), "rank_00009.safetensors"),
    "negative offset": (lambda i: entry(i)["pieces"][0].update(offset=[-1, 0]), "whole numbers from 0"),
    "fractional shape": (lambda i: entry(i).update(shape=[4.0, 3]), "whole numbers from 0"),
    "unknown dtype": (lambda i: entry(i).update(dtype="object"), "unknown dtype 'object'"),
    "other format": (lambda i: i.update(format="zip"), "format 'zip'"),
    "later version": (lambda i: i.update(version=2), "version 2"),
    "no tensors": (lambda i: i.pop("tensors"), "no entry 'tensors'"),
    "tensors as a list": (lambda i: i.update(tensors=[]), "wrong kind"),
    "zero block size": (lambda i: i.update(block_bytes=0), "blocks of 0 bytes"),
    "odd block size": (lambda i: i.update(block_bytes=12), "blocks of 12 bytes"),
    "missing checksum": (lambda i: entry(i)["pieces"][0].update(crc32=[]), "one checksum for each block"),
    "wrong checksum": (lambda i: entry(i)["pieces"][0].update(crc32=[1]), "tensor a does not match its checksum"),
    "beyond 64 bits": (lambda i: entry(i).update(shape=[2**63, 3]), "whole numbers from 0"),
    "no number": (lambda i: i.update(block_bytes=float("nan")), "[nan, 10] is not a list of whole numbers"),
    "true": (lambda i: entry(i).update(shape=[True, 3]), "whole numbers from 0"),
    "huge shape": (lambda i: entry(i).update(shape=[2**40, 2**40]), "[1099511627776, 1099511627776] is not the shape"),
    "10,000 dimensions": (lambda i: entry(i).update(shape=[1] * 10_000), "is not the shape of a tensor"),
    "deep shape": (lambda i: entry(i).update(shape=deep(500)), "whole numbers from 0"),
    "long dtype": (lambda i: entry(i).update(dtype="x" * 10**6), "unknown dtype 'xxx"),
    "list as dtype": (lambda i: entry(i).update(dtype=[1]), "wrong kind"),
    "list as layout": (lambda i: i.update(layout=[1]), "wrong kind"),
    "name with a line": (lambda i: i["tensors"].update({"a\nb": entry(i)}), "'a\\nb' is no name of a tensor"),
    "negative rank": (lambda i: i["rank_tensors"].update({"-1": {}}), "'-1' is no number of a rank"),
    "rank twice": (lambda i: i["rank_tensors"].update({"00": {}}), "'00' is no number of a rank"),
    "link as file": (lambda i: i["files"].update({"rank_00000.safetensors/..": 1}), "is no name of a file"),
    "other rank": (lambda i: i["rank_tensors"].update({"1": i["rank_tensors"].pop("0")}), "does not have rank 0"),
}


@pytest.mark.parametrize("name", INDEX_CHANGES)
def test_changed_indices_are_refused(directory: Path, name: str) -> None:
    change, words = INDEX_CHANGES[name]
    change_index(directory, change)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load(directory)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["", "[]", "null", "5", "{}", '"x"', "[" * 100_000, "\xff\xfe", "9" * 10_000])
def test_indices_that_are_something_else(directory: Path, text: str) -> None:
    (directory / "iter_0000010/index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"index\.json: the index is broken"):
        load(directory)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, "it cannot be read: its values are nested too deeply"),
        ('{"x": {"__float__": [1]}}', "it cannot be read: __float__ [1]: accepted are inf, -inf, nan"),
        ('{"x": {"__float__": "1"}}', "__float__ '1': accepted are"),
        ('{"x": ', "it cannot be read: Expecting value"),
        ("[1, 2]", "it must be a JSON object, and is a list"),
        ("null", "it must be a JSON object, and is a NoneType"),
        ('{"__float__": "nan"}', "it must be a JSON object, and is a float"),
    ],
)
def test_states_of_another_kind(directory: Path, text: str, words: str) -> None:
    """With a checksum that fits, as a hostile hand or another program would leave them."""
    (directory / "iter_0000010/state.json").write_text(text)
    change_index(directory, lambda index: index.update(state_crc32=zlib.crc32(text.encode())))
    for read in (load, read_state):
        with pytest.raises(ValueError, match=r"iter_0000010/state\.json: .*" + re.escape(words)):
            read(directory)


def test_a_folder_that_was_given_another_number(directory: Path) -> None:
    (directory / "iter_0000010").rename(directory / "iter_0000012")
    (directory / TRACKER).write_text("12\n")
    for read in (load, read_state):
        with pytest.raises(ValueError, match=r"iter_0000012/index\.json: it is of iteration 10, and .* says 12"):
            read(directory)
    load(directory, iteration=5)


HEADERS: list[Any] = [[], 5, None, {"b@0": 5}, {"b@0": {"dtype": "F32", "shape": [5], "data_offsets": ["x", "y"]}}]
HEADERS += [{"b@0": {"dtype": "F32", "shape": [5], "data_offsets": [a, b]}} for a, b in ((0, 99), (-20, 0))]


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_are_something_else(directory: Path, header: Any) -> None:
    path = directory / "iter_0000010" / FILE
    length = int.from_bytes(path.read_bytes()[:8], "little")
    text = json.dumps(header).encode()
    assert len(text) <= length
    path.write_bytes(path.read_bytes()[:8] + text.ljust(length) + path.read_bytes()[8 + length :])
    with pytest.raises(ValueError, match=f"{re.escape(FILE)}: its header"):
        load(directory)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({**model(), "c": torch.ones(1)}, "tensors of the model are not in the checkpoint: c"),
        ({"a": model()["a"]}, "tensors of the checkpoint are not in the model: b"),
        ({**model(), "a": torch.ones(3, 4)}, "tensor a is float32 [4, 3] in the checkpoint and float32 [3, 4]"),
        ({**model(), "b": torch.ones(5).double()}, "tensor b is float32 [5] in the checkpoint and float64 [5]"),
        ({f"x{i}": torch.ones(1) for i in range(9)}, "not in the checkpoint: x0, x1, x2 and 6 more"),
    ],
)
def test_another_model_is_refused(directory: Path, tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        load(directory, tensors)


def test_a_refusal_for_another_model_fills_nothing(directory: Path) -> None:
    tensors = {"a": torch.full((4, 3), 7.0), "b": torch.full((6,), 7.0)}
    with pytest.raises(ValueError, match="tensor b"):
        load(directory, tensors)
    assert all((t == 7.0).all() for t in tensors.values())


def test_an_iteration_that_is_not_there_tells_which_are(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"iter_0000007: there is no such folder; .*: 5, 10"):
        load(directory, iteration=7)
    load(directory, iteration=5)


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "executed")


@pytest.mark.parametrize("name", ["index.json", "state.json", FILE, f"../{TRACKER}"])
def test_pickles_under_our_names_are_not_executed(directory: Path, name: str) -> None:
    marker = directory / "marker"
    content = pickle.dumps({"tensors": Hostile(marker)})
    pickle.loads(content)
    assert marker.exists(), "the pickle does what the test relies on"
    marker.unlink()
    path = directory / "iter_0000010" / name
    path.write_bytes(content.ljust(path.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match=re.escape(Path(name).name)):
        load(directory)
    assert not marker.exists()


def test_the_state_alone_is_refused_likewise(directory: Path) -> None:
    assert read_state(directory) == {"x": 1}
    flip(directory / "iter_0000010/state.json", 3)
    with pytest.raises(ValueError, match=r"state\.json: it does not match its checksum"):
        read_state(directory)
