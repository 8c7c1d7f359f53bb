"""Checkpoint folders made to exhaust or mislead whoever reads them: each is refused in one sentence."""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.convert.native import from_native
from megatron.checkpointing.survey import Survey
from tests.harness.saved_folders import FILE, TRACKER, change_index, entry, load, two_checkpoints


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return two_checkpoints(tmp_path)


def test_a_tensor_is_no_larger_than_the_files(directory: Path) -> None:
    """Where nothing else says how large it must be: a survey would make room for it."""
    wide = {"offset": [0, 0], "shape": [2**40, 3], "crc32": [0]}
    change_index(directory, lambda i: entry(i).update(shape=[2**40, 3], pieces=[{**entry(i)["pieces"][0], **wide}]))
    assert list(Survey.of(directory).problems()) == [f"tensor a: {FILE} is too small to hold it, or is not listed"]
    with pytest.raises(ValueError, match="is too small to hold it"):
        from_native(directory)


ALL = {"model": "gpt", "vocab_size": 8}
SIZES = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "max_position_embeddings": 4}
STATES: dict[str, tuple[Any, str]] = {
    "model as a list": ({"model": [1]}, "model is a list, and must be a JSON object"),
    "another model": ({"model": {"model": ["x"]}, "config": {"model": SIZES}}, "it is of ['x']; GPTs"),
    "no config": ({"model": ALL}, "it is of 'gpt'; GPTs"),
    "layers": ({"model": ALL, "config": {"model": {**SIZES, "num_layers": 10**9}}}, "num_layers 1000000000 is more"),
    "width": ({"model": ALL, "config": {"model": {**SIZES, "hidden_size": "4"}}}, "hidden_size is '4'"),
    "no width": ({"model": ALL, "config": {"model": {"num_layers": 1}}}, "it does not say hidden_size"),
    "vocabulary": ({"model": {**ALL, "vocab_size": -1}, "config": {"model": SIZES}}, "[-1] is not a list of whole"),
    "progress": ({"model": ALL, "config": {"model": SIZES}, "run": 5}, "run is a int, and must be"),
}


@pytest.mark.parametrize("what", STATES)
def test_states_that_no_gpt_has(directory: Path, what: str) -> None:
    state, words = STATES[what]
    text = json.dumps(state)
    (directory / "iter_0000010/state.json").write_text(text)
    change_index(directory, lambda index: index.update(state_crc32=zlib.crc32(text.encode())))
    with pytest.raises(ValueError, match=r"iter_0000010.*" + re.escape(words)):
        from_native(directory)


@pytest.mark.parametrize("name", ["index.json", "state.json", f"../{TRACKER}"])
def test_a_file_that_is_huge_is_not_read(directory: Path, name: str) -> None:
    path = directory / "iter_0000010" / name
    os.truncate(path, 2**40)  # it takes no room on the disk
    with pytest.raises(
        ValueError, match=rf"{re.escape(path.name)}: it has {2**40} bytes, and at most (100|2\d+) are read"
    ):
        load(directory)


@pytest.mark.parametrize("name", ["index.json", "state.json", FILE, f"../{TRACKER}"])
def test_what_is_no_file_is_not_waited_for(directory: Path, name: str) -> None:
    """A pipe has no end."""
    path = directory / "iter_0000010" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=re.escape(path.name)):
        load(directory)


def test_a_link_out_of_the_folder_is_not_followed(directory: Path) -> None:
    path = directory / "iter_0000010" / FILE
    path.rename(directory / "elsewhere")
    path.symlink_to(directory / "elsewhere")
    with pytest.raises(ValueError, match=rf"{FILE}: it is a link to .*elsewhere, out of the checkpoint's folder"):
        load(directory)
    (directory / "elsewhere").rename(path.with_name("inside"))
    path.unlink()
    path.symlink_to("inside")
    load(directory)


def test_a_name_that_is_there_twice(directory: Path) -> None:
    path = directory / "iter_0000010/index.json"
    path.write_text(path.read_text().replace('"version"', '"tensors": {}, "version"', 1))
    with pytest.raises(ValueError, match=r"index\.json: the index is broken: 'tensors' is there twice"):
        load(directory)
