"""Files of other programs that are damaged, or made to exhaust or mislead: each is refused in one sentence."""

import contextlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpointing.convert.restricted import read_pickle
from megatron.checkpointing.convert.safetensors_files import read_safetensors
from megatron.checkpointing.convert.torch_files import FileTensor, read_torch_file

HEAD = b"\x80\x02"
TEXT = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000
DOUBLED = b"q\x000" + b"h\x00h\x00\x86q\x000" * 40 + b"h\x00"
# Pickles that ask for memory or time that they are not worth, and words of the complaint.
BOMBS = {
    "a list doubled 40 times": (HEAD + b"]q\x00" + b"]h\x00ah\x00aq\x00" * 40 + b".", "again and again"),
    "a tuple doubled 40 times": (HEAD + b")" + DOUBLED + b".", "again and again"),
    "a dict doubled 40 times": (HEAD + b"}q\x00" + b"}K\x01h\x00sK\x02h\x00sq\x00" * 40 + b".", "again and again"),
    "a list that holds itself": (HEAD + b"]q\x00h\x00a.", "again and again"),
    "lists 10,000 deep": (HEAD + b"]" * 10_000 + b"a" * 9_999 + b".", "again and again"),
    "one long text in a list": (HEAD + b"]" + TEXT + b"q\x00a" + b"h\x00a" * 1000 + b".", "again and again"),
    "a text that is encoded again and again": (
        HEAD + b"X\x06\x00\x00\x00latin1q\x02c_codecs\nencode\nq\x01" + TEXT + b"q\x00" + b"h\x01h\x00h\x02\x86R" * 99,
        "copies the same",
    ),
    "a text of 2^62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.", "remain"),
    "bytes of 2^62": (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.", "remain"),
    "a number of 800,000 bits": (HEAD + b"\x8b" + struct.pack("<I", 100_000) + b"\x01" * 100_000 + b".", "bits"),
    "a number of a million digits": (b"I" + b"9" * 1_000_000 + b"\n.", "digits"),
    "2,000 open marks": (HEAD + b"(" * 2000 + b".", "nested too deep"),
    "an opcode of extensions": (HEAD + b"\x82\x01.", "opcode EXT1"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_takes_no_more_than_it_is_worth(what: str) -> None:
    content, words = BOMBS[what]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words) as caught:
            read_pickle(io.BytesIO(content))
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400


def test_a_large_number_in_the_memo_takes_nothing() -> None:
    """The memo of Python's own unpickler is an array of as many places."""
    tracemalloc.start()
    assert read_pickle(io.BytesIO(HEAD + b"Nr\x00\x00\x00\x10j\x00\x00\x00\x10.")) is None
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_key_that_takes_long_to_hash_is_not_looked_at() -> None:
    """It is a tuple doubled 40 times."""
    value = read_pickle(io.BytesIO(HEAD + b"}(X\x01\x00\x00\x00aK\x01)" + DOUBLED + b"K\x02u."))
    assert value["a"] == 1 and len(value) == 2


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, 5))
def test_plain_values_are_as_pickle_reads_them(value: Any, protocol: int) -> None:
    found = read_pickle(io.BytesIO(pickle.dumps(value, protocol)))
    assert found == value and repr(found) == repr(value)


@given(st.binary(max_size=60))
def test_any_bytes_are_plain_values_or_refused(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_pickle(io.BytesIO(HEAD + content))


# --- files ------------------------------------------------------------------------------------------------------------

VALUES = {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.arange(4).half(), "n": 5}, "view": torch.arange(9)[2:5]}


def written(zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(VALUES, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


FILES = {zipped: written(zipped) for zipped in (True, False)}


def read_again(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: read_again(entry) for key, entry in value.items()}
    return value.read() if isinstance(value, FileTensor) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file.pt"


def damaged(content: bytes, where: float, bit: int, length: int) -> bytes:
    """With a bit flipped at a place, told as a part of the whole, and cut `length` bytes behind it unless that is 0."""
    changed = bytearray(content)
    position = int(where * len(content))
    changed[position] ^= 1 << bit
    return bytes(changed[: position + length] if length else changed)


@contextlib.contextmanager
def refusals_name(path: Path) -> Iterator[None]:
    """A ValueError that names the file is as good as no error."""
    try:
        yield
    except ValueError as error:
        if str(path) not in str(error):
            raise


@settings(max_examples=400)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.sampled_from([0, 0, 0, 1, 50]))
def test_a_damaged_archive_gives_the_right_tensors_or_is_refused(
    scratch: Path, where: float, bit: int, length: int
) -> None:
    scratch.write_bytes(damaged(FILES[True], where, bit, length))
    with refusals_name(scratch):
        assert same(VALUES, read_again(read_torch_file(scratch)))


@settings(max_examples=400)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.sampled_from([0, 0, 0, 1, 50]))
def test_a_damaged_old_container_is_read_or_refused(scratch: Path, where: float, bit: int, length: int) -> None:
    """It has no checksums, so that damaged values are not noticed."""
    scratch.write_bytes(damaged(FILES[False], where, bit, length))
    with refusals_name(scratch):
        read_again(read_torch_file(scratch))


def rewritten(change: Callable[[str, bytes], tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with each entry's name and content changed."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(FILES[True])) as source, zipfile.ZipFile(target, "w", compression) as archive:
        for entry in source.infolist():
            archive.writestr(*change(entry.filename, source.read(entry)))
    return target.getvalue()


def overlapping(content: bytes) -> bytes:
    """With the sizes of the pickle grown in the list at the end, over what follows it."""
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data.pkl"))
    return content[: place + 20] + struct.pack("<II", 600, 600) + content[place + 28 :]


ARCHIVES: dict[str, tuple[bytes, str]] = {
    "compressed": (rewritten(lambda *entry: entry, zipfile.ZIP_DEFLATED), "is compressed"),
    "overlapping": (overlapping(rewritten(lambda *entry: entry)), "reaches into what follows"),
    "no pickle": (rewritten(lambda name, content: (name.replace("data.pkl", "x"), content)), "there is no data.pkl"),
    "no storage": (
        rewritten(lambda name, content: (name.replace("/1", "/x"), content)),
        "storage 1 is missing",
    ),
    "cut storage": (
        rewritten(lambda name, content: (name, content[:16] if "/0" in name else content)),
        "storage 0 is missing, or has not 24",
    ),
    "other pickle": (
        rewritten(lambda name, content: (name, content.replace(b"FloatStorage", b"ByteStorages"))),
        "is not one that is read here",
    ),
    "other order of bytes": (
        rewritten(lambda name, content: (name, b"big" if name.endswith("byteorder") else content)),
        "highest byte",
    ),
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_archives_of_another_kind(tmp_path: Path, what: str) -> None:
    content, words = ARCHIVES[what]
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"file\.pt: .*{words}"):
        read_again(read_torch_file(tmp_path / "file.pt"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_no_model_has_is_not_read(tmp_path: Path, zipped: bool) -> None:
    """What an archive says beside its tensors, and an opcode of the older container that takes the rest of the file."""
    path = tmp_path / "file.pt"
    if zipped:
        path.write_bytes(rewritten(lambda name, content: (name, bytes(2**27) if "data.pkl" in name else content)))
    else:
        path.write_bytes(HEAD + b"\x8d" + struct.pack("<Q", 2**27))
        with open(path, "r+b") as stream:
            stream.truncate(2**27 + 11)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"file\.pt: .*(at most 16777216 are read|remain)"):
            read_torch_file(path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name(tmp_path: Path) -> None:
    content = rewritten(lambda name, content: (name.replace("data/1", "data/0"), content))
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(ValueError, match="one name"):
        read_torch_file(tmp_path / "file.pt")


# --- safetensors ------------------------------------------------------------------------------------------------------


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, str]] = {
    "not an object": ([1], "not a JSON object"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12), "c": entry(12, 16, (1,))}, "begins at byte"),
    "a hole": ({"a": entry(0, 8), "b": entry(12, 16, (1,))}, "begins at byte"),
    "less than the file": ({"a": entry(0, 8)}, "it is cut, or more was added"),
    "more than the file": ({"a": entry(0, 8), "b": entry(8, 24, (4,))}, "it is cut, or more was added"),
    "another size": ({"a": entry(0, 16, (3,))}, "has the bytes"),
    "a giant": ({"a": entry(0, 2**60, (2**58,))}, "it is cut"),
    "beyond 64 bits": ({"a": entry(0, 2**70, (2**68,))}, "whole numbers"),
    "a shape beyond 64 bits": ({"a": entry(0, 0, (0, 2**62, 2**62))}, "too large"),
    "10,000 dimensions": ({"a": entry(0, 16, (1,) * 10_000)}, "too large"),
    "a negative number": ({"a": entry(-8, 8, (4,))}, "whole numbers"),
    "a fraction": ({"a": entry(0, 16.0, (4,))}, "whole numbers"),
    "an unknown dtype": ({"a": entry(0, 16, (4,), "F7")}, "read are F64"),
    "a dtype that is a list": ({"a": entry(0, 16, (4,), [1])}, "read are F64"),
    "something more": ({"a": {**entry(0, 16, (4,)), "code": "x"}}, "not just dtype"),
    "an entry that is a number": ({"a": 5}, "not just dtype"),
}


def safetensors(text: bytes, content: bytes = bytes(16)) -> bytes:
    return struct.pack("<Q", len(text)) + text + content


@pytest.mark.parametrize("what", HEADERS)
def test_headers_of_another_kind(tmp_path: Path, what: str) -> None:
    header, words = HEADERS[what]
    (tmp_path / "file").write_bytes(safetensors(json.dumps(header).encode()))
    with pytest.raises(ValueError, match=rf"file: its header cannot be read: .*{words}") as caught:
        read_safetensors(tmp_path / "file")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", [b"[" * 100_000, b"", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 1}', b'{"a": 1e999}'])
def test_headers_that_are_no_header(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "file").write_bytes(safetensors(text))
    with pytest.raises(ValueError, match="file: its header cannot be read"):
        read_safetensors(tmp_path / "file")
