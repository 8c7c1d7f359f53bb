"""Files of text: names and globs, every compression, every layout, damage, and cuts into parts."""

import bz2
import gzip
import itertools
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import parquet
from megatron.data.compression import zstd
from megatron.data.inputs import cut, find_files, find_sources, layout_of, read_chunks
from megatron.data.records import Source, documents_of

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd.compress,
}
BOM = b"\xef\xbb\xbf"


def read(source: Source, chunk_bytes: int = 40) -> list[tuple[int, object]]:
    chunks = list(read_chunks(source, ["text"], chunk_bytes))
    return [pair for chunk in chunks for pair in zip(chunk.numbers, chunk.records, strict=True)]


@pytest.mark.parametrize("ending", PACK)
def test_lines_are_whole_and_none_is_left_out(tmp_path: Path, ending: str) -> None:
    lines = [b"%d" % i * (i % 5) + b"\x00\xe2\x80\xa8\r\n" for i in range(50)] + [b"last, without line feed"]
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(PACK[ending](BOM + b"".join(lines)))
    assert read(Source(str(path), "jsonl")) == list(enumerate(lines, start=1))
    chunks = list(read_chunks(Source(str(path), "jsonl"), ["text"], 40))
    assert len(chunks) > 5
    assert sum(chunk.bytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("ending", [ending for ending in PACK if ending])
@pytest.mark.parametrize("damage", ["cut", "garbage", "stump", "empty", "second stream"])
def test_damaged_compression_is_told_with_the_file(tmp_path: Path, ending: str, damage: str) -> None:
    data = PACK[ending](b"".join(b"%d line\n" % (i * 7919) for i in range(5000)))
    changed = {
        "cut": data[: len(data) // 2],
        "garbage": b"no compression at all" * 9,
        "stump": data[:3],
        "empty": b"",
        "second stream": data + b"?" + data[1:],
    }[damage]
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=f"x.jsonl{ending} is cut short or damaged: ."):
        read(Source(str(path), "jsonl"))


@pytest.mark.parametrize("window_log", [28, 31])
def test_zstandard_with_a_long_window_is_read(tmp_path: Path, window_log: int) -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window_log})
    with (tmp_path / "x.zst").open("wb") as file:
        # the length is not told beforehand, so the window is not made smaller
        file.write(compressor.compress(b"one\n"))
        file.write(compressor.compress(b"two\n"))
        file.write(compressor.flush())
    assert read(Source(str(tmp_path / "x.zst"), "line")) == [(1, b"one\n"), (2, b"two\n")]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_compressed_files_put_one_behind_another_are_read_to_the_end(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    padding = b"\0" * 8 if ending == ".xz" else b""
    path.write_bytes(PACK[ending](b"a\n") + padding + PACK[ending](b"b\n") + padding)
    assert read(Source(str(path), "line")) == [(1, b"a\n"), (2, b"b\n")]


@pytest.mark.parametrize("other", ["folder/../x.jsonl", "link.jsonl"])
def test_a_file_under_two_names_is_named_twice(tmp_path: Path, other: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("x.jsonl")
    files, problems = find_files([f"{tmp_path}/x.jsonl", f"{tmp_path}/{other}"])
    assert files == [f"{tmp_path}/x.jsonl"]
    assert problems == [
        f"--input {tmp_path}/{other}: {tmp_path}/{other} is named twice, before as {tmp_path}/x.jsonl",
    ]


def test_documents_of_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(BOM + b"\n one\r\ntwo\r\n \r\n\nthree\x00\xe2\x80\xa8\nfour")
    found = {
        layout: [
            (number, texts[0])
            for chunk in read_chunks(Source(str(path), layout), ["text"], 1000)
            for documents in [documents_of(chunk, ["text"])]
            for number, texts in zip(documents.numbers, documents.texts, strict=True)
        ]
        for layout in ("line", "blank-line", "file")
    }
    assert found["line"] == [(2, " one"), (3, "two"), (6, "three\x00\u2028"), (7, "four")]
    assert found["blank-line"] == [(2, " one\r\ntwo"), (6, "three\x00\u2028\nfour")]
    assert found["file"] == [(1, "\n one\r\ntwo\r\n \r\n\nthree\x00\u2028\nfour")]


def test_names_tell_the_layout() -> None:
    names = ["a.jsonl", "a.json.gz", "a", "a.txt", "a.txt.zst", "a.text", "a.parquet", "a.v2.xz"]
    layouts = [layout_of(name, "auto", "file") for name in names]
    assert layouts == ["jsonl", "jsonl", "jsonl", "file", "file", "file", "parquet", "jsonl"]
    assert layout_of("a.txt", "jsonl", "file") == "jsonl"
    assert layout_of("a", "text", "line") == "line"


def test_globs_are_sorted_and_names_keep_their_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "[odd].txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.txt").mkdir()
    files, problems = find_files([f"{tmp_path}/c.jsonl", f"{tmp_path}/[a-z].txt", f"{tmp_path}/[odd].txt"])
    assert [Path(file).name for file in files] == ["c.jsonl", "a.txt", "b.txt", "[odd].txt"]
    assert problems == []
    problems = find_files(
        [f"{tmp_path}/*.csv", f"{tmp_path}/none", f"{tmp_path}/sub.txt", f"{tmp_path}/a*", f"{tmp_path}/a.txt"]
    )[1]
    assert problems == [
        f"--input {tmp_path}/*.csv: no file matches",
        f"--input {tmp_path}/none: there is no such file",
        f"--input {tmp_path}/sub.txt: there is no such file",
        f"--input {tmp_path}/a.txt: {tmp_path}/a.txt is named twice",
    ]


def test_plain_text_has_one_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert "which has one text a document" in find_sources([f"{tmp_path}/a.txt"], "auto", "line", ["a", "b"])[1][0]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from(["a.jsonl", "b.txt", "c.jsonl.gz", "d.txt"]),
            st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"-")), max_size=6),
        )
    ),
    parts=st.integers(1, 7),
    final=st.booleans(),
)
def test_parts_hold_every_record_once_in_order(
    tmp_path: Path, files: list[tuple[str, list[bytes]]], parts: int, final: bool
) -> None:
    sources = []
    for number, (name, lines) in enumerate(files):
        path = tmp_path / f"{number}{name}"
        data = b"\n".join(lines) + b"\n" * final
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        sources.append(Source(str(path), "blank-line" if name == "d.txt" else layout_of(name, "auto", "line")))

    def placed(listed: list[Source]) -> list[tuple[str, object]]:
        return [(source.place(number), record) for source in listed for number, record in read(source, 3)]

    cut_up = cut(sources, parts)
    assert len(cut_up) == parts
    assert placed(list(itertools.chain(*cut_up))) == placed(sources)


def write_parquet(path: Path, **options: object) -> Source:
    table = pyarrow.table(
        {
            "text": pyarrow.array([f"row {i}" if i % 3 else None for i in range(1, 1001)]),
            "title": pyarrow.array(["t\u00e9", ""] * 500).dictionary_encode(),
            "number": list(range(1000)),
        }
    )
    pyarrow.parquet.write_table(table, path, **options)
    return Source(str(path), "parquet")


def test_parquet_rows_in_chunks(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "x.parquet", row_group_size=300)
    chunks = list(read_chunks(source, ["title", "text"], 500))
    assert len(chunks) > 5
    assert sum(chunk.bytes for chunk in chunks) == (tmp_path / "x.parquet").stat().st_size
    rows = [row for chunk in chunks for row in chunk.records]
    assert rows == [(b"t\xc3\xa9" if i % 2 else b"", b"row %d" % i if i % 3 else None) for i in range(1, 1001)]
    assert [number for chunk in chunks for number in chunk.numbers] == list(range(1, 1001))
    documents = documents_of(chunks[0], ["title", "text"])
    assert documents.texts[0] == ["t\u00e9", "row 1"]
    assert documents.bad[:2] == [("empty", 2), ("not a string", 3)]


def test_parquet_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"good", b"\xff"]}), tmp_path / "x.parquet")
    (chunk,) = read_chunks(Source(str(tmp_path / "x.parquet"), "parquet"), ["text"], 1000)
    documents = documents_of(chunk, ["text"])
    assert (documents.texts, documents.bad) == ([["good"]], [("not UTF-8", 2)])


def test_parquet_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path)
    assert parquet.problems(str(path), ["text", "title"]) == []
    assert parquet.problems(str(path), ["body"]) == [f"--json-keys body: {path} has the columns text, title, number"]
    assert parquet.problems(str(path), ["number"]) == [f"{path}: the column number holds int64, not texts"]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "cannot be read as Parquet" in parquet.problems(str(path), ["text"])[0]
    monkeypatch.setattr(parquet.importlib, "import_module", raise_import_error)
    assert parquet.problems(str(path), ["text"]) == [
        'Parquet needs the package pyarrow: pip install "megatron[parquet]"'
    ]


def raise_import_error(name: str) -> None:
    raise ImportError(name)


def test_parquet_damaged_inside_is_told_with_the_file(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "x.parquet", compression="gzip", use_dictionary=False)
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[60:200] = b"\xff" * 140
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"x.parquet is cut short or damaged: ."):
        list(read_chunks(source, ["text", "title"], 100))
