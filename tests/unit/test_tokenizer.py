"""Tokenizers: GPT-2's ids by a plain implementation and by transformers, decoding, special tokens, broken files."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import GPT2TokenizerFast

from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

# How GPT-2 cuts text before merging (Radford et al. 2019): contractions, words, numbers, the rest, blanks.
CUTS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

EDGES = [
    "",
    " ",
    "a",
    "   three blanks   ",
    "tabs\tand\n\nnewlines\r\n  x",
    "it's we'll they've I'd IT'S",
    "na\u00efve caf\u00e9 \u00df \u1e9e",
    "cafe\u0301 with a combining accent",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3042\u3044 \ud55c\uae00",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "1234567890 3.14 \u00bd \u2167 \u0663",
    "no\u00a0break\u2003em\u3000wide\u2028line\u0085nel",
    "\x00\x01\x7f\x80\xa0\xad\ufeff\uffff\U0010ffff",
    "<|endoftext|> is text <|endoftext|>",
    "x" * 3000,
    "=" * 500 + " " * 500,
]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it is printable, else the next letter from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(0x100 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    return letters


class PlainBPE:
    """Byte-level BPE as it is defined: again and again, merge the pair of neighbours that was learned first."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self.ids: dict[str, int] = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merge_file.read_text(encoding="utf-8").split("\n")[1:]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if line}
        self.letters = byte_letters()
        self.merge = functools.lru_cache(100_000)(self._merge)

    def _merge(self, word: str) -> tuple[str, ...]:
        parts = [self.letters[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:], strict=False), key=lambda pair: self.ranks.get(pair, 10**9))
            if best not in self.ranks:
                break
            parts = self._joined(parts, best)
        return tuple(parts)

    @staticmethod
    def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
        joined, i = [], 0
        while i < len(parts):
            step = 2 if tuple(parts[i : i + 2]) == pair else 1
            joined.append("".join(parts[i : i + step]))
            i += step
        return joined

    def encode(self, text: str) -> list[int]:
        return [self.ids[part] for word in CUTS.findall(text) for part in self.merge(word)]


@pytest.fixture(scope="module")
def gpt2_files(shared: Path) -> tuple[Path, Path]:
    return shared / "data/gpt2/gpt2-vocab.json", shared / "data/gpt2/gpt2-merges.txt"


@pytest.fixture(scope="module")
def gpt2(gpt2_files: tuple[Path, Path]) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(vocab_file=str(gpt2_files[0]), merge_file=str(gpt2_files[1])))


def write_bytes_only(folder: Path, **more: int) -> tuple[Path, Path]:
    """A vocabulary of single bytes, and no merges; `more` are further entries."""
    vocabulary = {letter: i for i, letter in enumerate(byte_letters().values())}
    (folder / "vocab.json").write_text(json.dumps(vocabulary | more), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    vocab, merges = write_bytes_only(tmp_path_factory.mktemp("bytes"))
    return build_tokenizer(TokenizerConfig(vocab_file=str(vocab), merge_file=str(merges)))


def test_gpt2_ids_of_strange_strings_are_those_of_the_definition(
    gpt2: Tokenizer, gpt2_files: tuple[Path, Path]
) -> None:
    plain = PlainBPE(*gpt2_files)
    for text in EDGES:
        assert gpt2.tokenize(text) == plain.encode(text)
    assert gpt2.tokenize_batch(EDGES) == [plain.encode(text) for text in EDGES]


def test_gpt2_ids_of_wikitext_are_those_of_the_definition_and_of_transformers(
    shared: Path, gpt2: Tokenizer, gpt2_files: tuple[Path, Path]
) -> None:
    lines = (shared / "data/wikitext103/valid_slice.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    ids = gpt2.tokenize_batch(texts)
    plain = PlainBPE(*gpt2_files)
    assert ids == [plain.encode(text) for text in texts]
    theirs = GPT2TokenizerFast(vocab=str(gpt2_files[0]), merges=str(gpt2_files[1]))
    assert ids == [theirs.encode(text) for text in texts]
    assert [gpt2.detokenize(document) for document in ids] == texts


def test_gpt2_end_of_document(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eod) == (50_257, 50_256)
    ids = gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.eod not in ids
    assert gpt2.detokenize(ids) == gpt2.detokenize([64, gpt2.eod, 65]) == "a<|endoftext|>b"


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_ids_decode_to_the_text(bytes_only: Tokenizer, text: str) -> None:
    ids = bytes_only.tokenize(text)
    assert len(ids) == len(text.encode("utf-8"))
    assert bytes_only.detokenize(ids) == text


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_gpt2_ids_decode_to_the_text(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.detokenize(gpt2.tokenize(text)) == text


def test_without_an_end_of_document_asking_for_it_is_an_error(bytes_only: Tokenizer) -> None:
    assert bytes_only.vocab_size == 256
    with pytest.raises(ValueError, match=r"--vocab-file .*vocab.json: no end-of-document token"):
        _ = bytes_only.eod


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path: Path) -> None:
    vocab, merges = write_bytes_only(tmp_path, **{"<|endoftext|>": 999})
    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=str(vocab), merge_file=str(merges)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 999)


def test_ids_outside_the_vocabulary_are_refused(gpt2: Tokenizer) -> None:
    for wrong in (-1, 50_257):
        with pytest.raises(ValueError, match=f"id {wrong}: .* has ids 0 to 50256"):
            gpt2.detokenize([0, wrong])


def write_tokenizer_json(folder: Path, special: list[str]) -> Path:
    """A tokenizer.json of single bytes, with special tokens that a template would put around each text."""
    vocabulary = {letter: i for i, letter in enumerate(byte_letters().values())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(special)
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "[SEP]"])
def test_any_tokenizer_json(tmp_path: Path, end: str) -> None:
    path = write_tokenizer_json(tmp_path, ["<s>", end])
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (258, 257)
    text = f"<s>no cut, no padding{end}"
    letters = list(byte_letters())
    assert tokenizer.tokenize(text) == [letters.index(byte) for byte in text.encode()]
    assert tokenizer.tokenize_batch([text, "b"]) == [tokenizer.tokenize(text), tokenizer.tokenize("b")]
    assert tokenizer.detokenize([257]) == end


def test_a_tokenizer_json_without_an_end_of_document(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path, ["<pad>"])
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path)))
    with pytest.raises(ValueError, match=r"--tokenizer-model .*: no end-of-document token; looked for <\|endoftext"):
        _ = tokenizer.eod


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=20))
    assert (tokenizer.vocab_size, tokenizer.eod) == (20, 19)
    assert tokenizer.tokenize_batch(["5 0\n12", ""]) == [[5, 0, 12], []]
    assert tokenizer.detokenize([5, 0, 12]) == "5 0 12"
    for text, message in (
        ("a b", "takes decimal ids"),
        ("20", "id 20: .* --vocab-size 20 has"),
        ("-1", "not '-1'"),
        ("1_0", "decimal"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer.tokenize(text)
    with pytest.raises(ValueError, match="id -1: .* --vocab-size 20 has ids 0 to 19"):
        tokenizer.detokenize([-1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"),
        ({"vocab_file": "x"}, "GPT2BPETokenizer needs --merge-file"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "HuggingFaceTokenizer needs --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer needs --vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "--vocab-size 0: it must be at least 1"),
        (
            {"tokenizer_type": "Sentence"},
            "--tokenizer-type Sentence: accepted are GPT2BPETokenizer, BertWordPieceLowerCase, Bert",
        ),
    ],
)
def test_flags_that_are_missing_or_wrong(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenizerConfig(**fields)  # type: ignore[arg-type]


def change(name: str, content: str | bytes | None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return apply


BROKEN = {
    "no vocabulary": (change("vocab.json", None), r"--vocab-file .*vocab.json cannot be read: No such file"),
    "no merges": (change("merges.txt", None), r"--merge-file .*merges.txt cannot be read: No such file"),
    "vocabulary cut": (change("vocab.json", '{"a": 1'), r"--vocab-file .*vocab.json is not JSON"),
    "vocabulary binary": (change("vocab.json", b"\xff\xfe"), r"--vocab-file .* is not a text file in UTF-8"),
    "vocabulary a list": (change("vocab.json", "[1]"), "--vocab-file .*: expected a JSON object from token to id"),
    "ids are text": (change("vocab.json", '{"a": "b"}'), "expected a JSON object from token to id"),
    "ids twice": (change("vocab.json", '{"a": 1, "b": 1}'), "several tokens have the same id"),
    "bytes missing": (change("vocab.json", '{"a": 1, "b": 2}'), "254 of the 256 one-byte tokens are missing"),
    "merge of three": (change("merges.txt", "#version: 0.2\na b c\n"), r"merges.txt, line 2: expected two tokens"),
    "foreign merges": (change("merges.txt", "a b\n"), "--merge-file .* does not fit --vocab-file .*ab"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_told_with_their_flag(tmp_path: Path, kind: str) -> None:
    apply, message = BROKEN[kind]
    vocab, merges = write_bytes_only(tmp_path)
    apply(tmp_path)
    with pytest.raises(ValueError, match=message):
        build_tokenizer(TokenizerConfig(vocab_file=str(vocab), merge_file=str(merges)))


def test_a_broken_tokenizer_json_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    with pytest.raises(ValueError, match="--tokenizer-model .* cannot be read: No such file"):
        build_tokenizer(config)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--tokenizer-model .* is not a tokenizer.json"):
        build_tokenizer(config)
