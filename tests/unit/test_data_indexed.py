"""Token files: what an independent writer wrote is read, what we write is what it would write, damage is told."""

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from megatron.data.indexed_format import HEADER_BYTES
from tests.harness.token_files import LETTERS, write_token_files

DOCUMENTS = [[[5, 1, 2]], [[7], [], [3, 9]], [[]], [[100, 0]]]


def sequences_of(dataset: IndexedDataset) -> list[list[int]]:
    return [dataset.get(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("end", [[], [99]], ids=["without an end of document", "with one"])
@pytest.mark.parametrize(
    ("code", "letter", "dtype"),
    [(code, letter, np.dtype(letter)) for code, letter in LETTERS.items()]
    + [(6, "f", np.dtype("f")), (7, "f", np.dtype("f"))],
)
def test_reads_every_element_type(
    tmp_path: Path, code: int, letter: str, dtype: np.dtype, end: list[int], modes: bool
) -> None:
    documents = [[*sequences[:-1], sequences[-1] + end] for sequences in DOCUMENTS]
    dataset = IndexedDataset(write_token_files(tmp_path / "x", documents, code, letter=letter, modes=modes))
    more = len(end)
    assert dataset.dtype == dtype
    assert dataset.sizes.tolist() == [3 + more, 1, 0, 2 + more, 0 + more, 2 + more]
    assert dataset.document_indices.tolist() == [0, 1, 4, 5, 6]
    assert sequences_of(dataset) == [[5, 1, 2] + end, [7], [], [3, 9] + end, end, [100, 0] + end]


def test_get_gives_a_part_that_cannot_be_written(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_token_files(tmp_path / "x", DOCUMENTS))
    assert dataset.get(0, 1).tolist() == [1, 2]
    assert dataset.get(0, 1, 1).tolist() == [1]
    assert dataset.get(3, 2).tolist() == []
    with pytest.raises(IndexError, match="sequence 0, which has 3"):
        dataset.get(0, 1, 3)
    with pytest.raises(ValueError, match="read-only"):
        dataset.get(0)[0] = 1


def test_reads_what_megatron_wrote(shared: Path) -> None:
    dataset = IndexedDataset(shared / "data/megatron_2_5/tr_text_document")
    assert (len(dataset), int(dataset.sizes.sum()), dataset.dtype) == (200, 14_109, np.uint16)
    assert {dataset.get(i)[-1] for i in range(200)} == {256}
    sentences = IndexedDataset(shared / "data/megatron_2_5/bt_text_sentence")
    per_document = np.diff(sentences.document_indices)
    assert (len(per_document), per_document.min(), per_document.max()) == (300, 2, 7)


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    sizes = [2**31 - 1, 2**20, 3]  # tokens of two bytes: the last starts at 4 GiB + 2 MiB - 2
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4) + struct.pack("<3i", *sizes)
    index += struct.pack("<3q", 0, 2 * sizes[0], 2 * (sizes[0] + sizes[1])) + struct.pack("<4q", 0, 1, 2, 3)
    (tmp_path / "x.idx").write_bytes(index)
    with open(tmp_path / "x.bin", "wb") as stream:
        stream.seek(2 * (sizes[0] + sizes[1]))
        stream.write(struct.pack("<3H", 11, 12, 13))
    assert IndexedDataset(tmp_path / "x").get(2).tolist() == [11, 12, 13]


def test_offsets_that_are_written_beyond_4_gib(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([1])
        # what the index is made of at the end: sizes of sequences, here without the tokens
        writer._sizes.write(struct.pack("<3i", 2**31 - 1, 2**31 - 1, 5))
        offsets = np.concatenate(list(writer._pointer_chunks()))
    assert offsets.tolist() == [0, 2, 2 + 2 * (2**31 - 1), 2 + 4 * (2**31 - 1)]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_writes_the_bytes_of_the_table(tmp_path: Path, dtype: str) -> None:
    code = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}[dtype]
    write_token_files(tmp_path / "expected", DOCUMENTS, code)
    with IndexedWriter(tmp_path / "actual", dtype) as writer:
        for document in DOCUMENTS:
            writer.add_sequences(document)
    for extension in ("bin", "idx"):
        assert (tmp_path / f"actual.{extension}").read_bytes() == (tmp_path / f"expected.{extension}").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actual.bin", "actual.idx", "expected.bin", "expected.idx"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 65_535), max_size=6), max_size=12), st.integers(0, 12))
def test_documents_come_back_one_by_one_and_together(tmp_path: Path, documents: list[list[int]], alone: int) -> None:
    with IndexedWriter(tmp_path / "x", "u2") as writer:
        for document in documents[:alone]:
            writer.add_document(document)
        rest = documents[alone:]
        writer.add_documents(np.array(sum(rest, []), np.int64), [len(d) for d in rest])
    dataset = IndexedDataset(tmp_path / "x")
    assert sequences_of(dataset) == documents
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", "u2") as writer:
        writer.add_document([1, 2])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail() -> None:
        with IndexedWriter(tmp_path / "x", "u2") as writer:
            writer.add_document([3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_leaves_no_readable_set(tmp_path: Path) -> None:
    code = (
        "import sys, time; from megatron.data.indexed import IndexedWriter\n"
        "with IndexedWriter(sys.argv[1], 'u2') as writer:\n"
        "    writer.add_document([1] * 100000); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "x.bin").exists()
    with pytest.raises(ValueError, match="is missing"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("step", range(4))
def test_a_kill_while_the_files_get_their_names_leaves_no_half_set(tmp_path: Path, old: bool, step: int) -> None:
    """`step` is how many of the changes of names are done: the old index goes, tokens and index come."""
    if old:
        with IndexedWriter(tmp_path / "x", "u2") as writer:
            writer.add_document([7] * 3)
    code = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "from megatron.data.indexed import IndexedWriter\n"
        "left = [int(sys.argv[2])]\n"
        "def killed_at_its_turn(change):\n"
        "    def changed(*arguments, **options):\n"
        "        if left[0] == 0:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        left[0] -= 1\n"
        "        return change(*arguments, **options)\n"
        "    return changed\n"
        "with IndexedWriter(sys.argv[1], 'u2') as writer:\n"
        "    writer.add_document([8] * 5)\n"
        "    os.replace, Path.unlink = killed_at_its_turn(os.replace), killed_at_its_turn(Path.unlink)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x"), str(step)], check=False)
    assert done.returncode == -signal.SIGKILL
    if step == 3:
        assert sequences_of(IndexedDataset(tmp_path / "x")) == [[8] * 5]
    elif old and step == 0:
        assert sequences_of(IndexedDataset(tmp_path / "x")) == [[7] * 3]
    else:
        with pytest.raises(ValueError, match="is missing"):
            IndexedDataset(tmp_path / "x")


def test_memory_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    document = np.arange(500, dtype=np.int64)
    with IndexedWriter(tmp_path / "x", "i4") as writer:
        writer.add_document(document)
        tracemalloc.start()
        for _ in range(5_000):  # 2.5 million tokens, 10 MB
            writer.add_document(document)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 500_000


def test_bytes_that_do_not_arrive_on_disk_are_told(tmp_path: Path) -> None:
    def lose_bytes() -> None:
        with IndexedWriter(tmp_path / "x", "u2") as writer:
            writer.add_document([1, 2, 3])
            writer._data.flush()
            os.truncate(next(tmp_path.glob(".x.bin.*")), 2)

    with pytest.raises(OSError, match=r"x.bin: 2 bytes arrived on disk, expected 6"):
        lose_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "ids"), [("u2", [65_536]), ("u2", [-1]), ("i1", [128]), ("i4", [0.5])])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, dtype: str, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit"), IndexedWriter(tmp_path / "x", dtype) as writer:
        writer.add_document(ids)
    assert list(tmp_path.iterdir()) == []


def test_element_types_that_the_format_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot hold uint32"):
        IndexedWriter(tmp_path / "x", "u4")


def test_the_best_type_is_that_of_megatron() -> None:
    assert [best_dtype(n) for n in (2, 65_499, 65_500, 10**6)] == [np.uint16, np.uint16, np.int32, np.int32]


def test_the_largest_id_is_found_in_shares(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_token_files(tmp_path / "x", DOCUMENTS))
    assert dataset.max_token_id() == 100
    assert [dataset.max_token_id(part, 3) for part in range(3)] == [5, 7, 100]
    assert [dataset.max_token_id(part, 20) for part in range(20)].count(-1) == 12
    empty = IndexedDataset(write_token_files(tmp_path / "empty", []))
    assert (len(empty), empty.max_token_id()) == (0, -1)
    negative = IndexedDataset(write_token_files(tmp_path / "negative", [[[1, -4]]], 4))
    with pytest.raises(ValueError, match=r"negative.bin holds the token id -4"):
        negative.max_token_id()


def test_a_copy_for_another_process_opens_the_files_itself(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_token_files(tmp_path / "x", DOCUMENTS))
    packed = pickle.dumps(dataset)
    assert len(packed) < 300 + len(str(tmp_path))
    assert sequences_of(pickle.loads(packed)) == sequences_of(dataset)


def damaged(folder: Path, name: str, change: bytes | int, at: int = 0) -> Path:
    """A good set of which file `name` has `change` written over it at byte `at`, or is cut or grown to that length."""
    write_token_files(folder / "x", DOCUMENTS)
    path = folder / name
    if isinstance(change, int):
        os.truncate(path, change)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:at] + change + content[at + len(change) :])
    return folder / "x"


HEADER = 34
DAMAGE = {
    "old layout": ("x.idx", b"TNTIDX\0\0", 0, "x.idx is in the old TNTIDX layout"),
    "foreign": ("x.idx", b"GIF89a", 0, r"x.idx starts with b'GIF89a.*expected b'MMIDIDX"),
    "empty": ("x.idx", 0, 0, "x.idx starts with b'', expected"),
    "header cut": ("x.idx", 20, 0, "x.idx has 20 bytes, its header alone takes 34"),
    "version": ("x.idx", b"\x02", 9, "x.idx has version 2, expected 1"),
    "code": ("x.idx", b"\x09", 17, "x.idx has element type code 9, expected 1 to 8"),
    "index cut": ("x.idx", 145, 0, "x.idx has 145 bytes, expected 146 for 6 sequences and 5 entries"),
    "index longer": ("x.idx", 147, 0, "x.idx has 147 bytes, expected 146"),
    "huge count": ("x.idx", b"\xff" * 8, 18, "x.idx has 146 bytes, expected .* for 18446744073709551615 sequences"),
    "negative size": ("x.idx", struct.pack("<i", -1), HEADER + 4, "negative size or an offset"),
    "negative offset": ("x.idx", struct.pack("<q", -2), HEADER + 24, "negative size or an offset"),
    "odd offset": ("x.idx", struct.pack("<q", 3), HEADER + 24, "not a multiple of 2 bytes"),
    "offset too far": ("x.idx", struct.pack("<q", 40), HEADER + 24, "x.bin has 16 bytes, its index describes 46"),
    "offset enormous": ("x.idx", struct.pack("<q", 2**63 - 2), HEADER + 24, "its index describes 9223372036854775806"),
    "size too large": ("x.idx", struct.pack("<i", 9), HEADER + 20, "x.bin has 16 bytes, its index describes 30"),
    "documents start": ("x.idx", struct.pack("<q", 1), HEADER + 72, "document index holds 1 to 6, expected 0 to 6"),
    "documents end": ("x.idx", struct.pack("<q", 7), HEADER + 104, "document index holds 0 to 7, expected 0 to 6"),
    "documents order": ("x.idx", struct.pack("<q", 9), HEADER + 80, "document index goes backwards"),
    "tokens cut": ("x.bin", 15, 0, "x.bin has 15 bytes, its index describes 16"),
    "tokens gone": ("x.bin", 0, 0, "x.bin has 0 bytes, its index describes 16"),
    "tokens longer": ("x.bin", 18, 0, "x.bin has 18 bytes, its index describes 16"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told(tmp_path: Path, kind: str) -> None:
    name, change, at, message = DAMAGE[kind]
    with pytest.raises(ValueError, match=message):
        IndexedDataset(damaged(tmp_path, name, change, at))


@pytest.mark.parametrize("name", ["x.idx", "x.bin"])
def test_a_missing_file_is_told(tmp_path: Path, name: str) -> None:
    prefix = write_token_files(tmp_path / "x", DOCUMENTS)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: a token set is a pair"):
        IndexedDataset(prefix)


def test_a_name_with_its_extension_gets_a_hint(tmp_path: Path) -> None:
    prefix = write_token_files(tmp_path / "x", DOCUMENTS)
    for extension in (".bin", ".idx"):
        with pytest.raises(ValueError, match=f"give the name without {extension}"):
            IndexedDataset(prefix + extension)


def test_a_folder_is_told(tmp_path: Path) -> None:
    write_token_files(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").unlink()
    (tmp_path / "x.bin").mkdir()
    with pytest.raises(ValueError, match=r"x.bin cannot be read: Is a directory"):
        IndexedDataset(tmp_path / "x")


def test_opened_without_verifying_the_ends_of_the_files_are_looked_at(tmp_path: Path) -> None:
    prefix = write_token_files(tmp_path / "x", [[[1, 2, 3]], [[4, 5]], [[6]]])
    assert IndexedDataset(prefix, verify=False).get(1).tolist() == [4, 5]
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[HEADER_BYTES + 12 + 8] = 100  # the offset of the second sequence
    Path(prefix + ".idx").write_bytes(index)
    opened = IndexedDataset(prefix, verify=False)
    assert opened.get(2).tolist() == [6]
    with pytest.raises(ValueError, match="sequence 1 does not lie inside"):
        opened.get(1)
    with pytest.raises(ValueError, match=r"has 12 bytes, its index describes 104"):
        opened.verify()
    Path(prefix + ".bin").write_bytes(b"\0" * 10)
    with pytest.raises(ValueError, match=r"has 10 bytes, its index describes 104"):
        IndexedDataset(prefix, verify=False)


@pytest.mark.parametrize("tokens", [1_000, 100_000])
def test_a_file_that_cannot_grow_is_named_and_leaves_nothing(tmp_path: Path, tokens: int) -> None:
    def write() -> None:
        with IndexedWriter(tmp_path / "x", np.uint16) as writer:
            writer.add_document(np.zeros(tokens, np.uint16))  # what stays in the buffer fails again at the close
            writer.add_document(np.zeros(tokens, np.uint16))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*x\.bin"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
