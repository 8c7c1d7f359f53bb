"""BERT's WordPiece: ids by a plain implementation of the published algorithm, special ids, parts of words, files."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

KINDS = ("BertWordPieceLowerCase", "BertWordPieceCase")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

EDGES = [
    "",
    " ",
    " \t\r\n ",
    "   three blanks   ",
    "Na\u00efve CAF\u00c9 \u00df \u1e9e \u0130stanbul \u01c5",
    "cafe\u0301 e\u0301\u0323 q\u0307 \u0301alone",
    "\u4f60\u597d\uff0cworld\u4e16\u754c \u3042\u3044\u30a2 \ud55c\uae00 \u3006\u3005\u3007 \U00020000\uf900",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05b8\u05dc\u05d5\u05b9\u05dd \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2603\ufe0f",
    "1234567890 3.14 $5 \u00bd \u2167 \u0663 \uff11\uff12\uff21\uff22 \ufb01",
    "no\u00a0break\u2003em\u3000wide\u2028line\u2029next\u0085nel",
    "nul\x00 bell\x07 tab\tform\x0c sep\x1c\x1d del\x7f c1\x80 soft\xad bom\ufeff bad\ufffd private\ue000 zero\u200bx",
    "don't [MASK] [SEP]s [unused1] ##ing #tag a-b_c ``x'' ~^$+<=>|",
    "\u2026\u2014\u2019\u201c\u00bf\u00a1\u3002\u300c",
    "x" * 100,
    "x" * 101,
    "the" * 33 + " " + "the" * 34,
    "word " * 500,
    "=" * 300,
    "\u00e9" * 101,
]


def chinese(character: str) -> bool:
    """Whether BERT sets the character apart: the ideographs of CJK, not kana, not Hangul."""
    blocks = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F))
    more = ((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
    return any(first <= ord(character) <= last for first, last in blocks + more)


def punctuation(character: str) -> bool:
    """Whether the character is a word of its own: Unicode's punctuation, and all of ASCII but letters and digits."""
    return unicodedata.category(character)[0] == "P" or (" " < character < "\x7f" and not character.isalnum())


def words(text: str, lower_case: bool) -> list[str]:
    """BERT's words (Devlin et al. 2019, multilingual version): cleaned, lower case without accents, split."""
    dropped = ("Cc", "Cf", "Co")
    kept = [c for c in text if c in "\t\n\r" or (c != "\ufffd" and unicodedata.category(c) not in dropped)]
    text = "".join(f" {c} " if chinese(c) else c for c in kept)
    if lower_case:
        text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if punctuation(c) else c for c in text).split()


def pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """The longest token that starts the word, then the longest that goes on, ...; unknown where there is none."""
    found: list[str] = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if prefix + word[start:end] in vocabulary), None)
        if end is None or len(word) > 100:
            return ["[UNK]"]
        found.append(prefix + word[start:end])
        start = end
    return found


def plain_ids(text: str, vocabulary: dict[str, int], lower_case: bool) -> list[int]:
    return [vocabulary[piece] for word in words(text, lower_case) for piece in pieces(word, vocabulary)]


@pytest.fixture(scope="module")
def vocab_file(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of BERT's uncased vocabulary, then the same with capitals, for the cased tokenizer."""
    lines = (shared / "data/bert/bert-base-uncased-vocab.txt").read_text(encoding="utf-8").splitlines()
    whole = [line for line in lines if line.isalpha() and line.isascii()]
    more = dict.fromkeys([*lines, *(line.capitalize() for line in whole), *(line.upper() for line in whole)])
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(more) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def vocabulary(vocab_file: Path) -> dict[str, int]:
    return {token: i for i, token in enumerate(vocab_file.read_text(encoding="utf-8").split("\n")[:-1])}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(vocab_file: Path, kind: str) -> Tokenizer:
    return build(vocab_file, kind)


@pytest.fixture(scope="module")
def plain(vocabulary: dict[str, int], kind: str) -> Callable[[str], list[int]]:
    return lambda text: plain_ids(text, vocabulary, kind == "BertWordPieceLowerCase")


def build(vocab_file: Path, kind: str = KINDS[0], parse_special_tokens: bool = False) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, vocab_file=str(vocab_file), parse_special_tokens=parse_special_tokens)
    )


def write_small(folder: Path, *more: str) -> Path:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, "play", "##ing", "##s", "##", *more]), encoding="utf-8")
    return folder / "vocab.txt"


def test_ids_of_strange_strings_are_those_of_the_definition(
    tokenizer: Tokenizer, plain: Callable[[str], list[int]]
) -> None:
    for text in EDGES:
        assert tokenizer.tokenize(text) == plain(text), text
    assert tokenizer.tokenize_batch(EDGES) == [plain(text) for text in EDGES]


def test_the_strange_strings_are_not_all_unknown(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> None:
    ids = [i for document in tokenizer.tokenize_batch(EDGES) for i in document]
    assert len(set(ids)) > 80
    assert 0 < ids.count(vocabulary["[UNK]"]) < len(ids) / 10


def test_every_settled_character_is_read_as_the_definition_says(
    tokenizer: Tokenizer, plain: Callable[[str], list[int]]
) -> None:
    # Unicode adds characters and corrects old ones, and the library knows an older edition than Python does. Those
    # that Unicode 3.2 had, and has in the same class still, are the same in both. Of ideographs and Hangul some do.
    old = unicodedata.ucd_3_2_0
    many = [*range(0x3400, 0xD800), *range(0x20000, 0x30000)]
    numbers = sorted({*range(0xD800), *range(0xE000, 0x110000)}.difference(many).union(many[::97]))
    classes = ((chr(i), unicodedata.category(chr(i))) for i in numbers)
    texts = [f"a{c}b" for c, is_class in classes if is_class not in ("Cn", "Co") and old.category(c) == is_class]
    assert len(texts) > 10_000
    for text, ids in zip(texts, tokenizer.tokenize_batch(texts), strict=True):
        assert ids == plain(text), hex(ord(text[1]))


@settings(max_examples=300)
@given(text=st.text(st.characters(max_codepoint=0x233, exclude_characters="\u0221")))
def test_latin_text_is_read_as_the_definition_says(
    tokenizer: Tokenizer, plain: Callable[[str], list[int]], text: str
) -> None:
    assert tokenizer.tokenize(text) == plain(text)


def test_a_final_sigma_is_a_sigma(tmp_path: Path) -> None:
    # Python alone, and so the first BERT's program, writes the last capital sigma of a word as another letter.
    tokenizer = build(write_small(tmp_path, "\u03c3", "##\u03c3"))
    assert tokenizer.tokenize("\u03a3\u03a3") == [9, 10]


def test_ids_of_wikitext_are_those_of_the_definition(
    shared: Path, tokenizer: Tokenizer, plain: Callable[[str], list[int]]
) -> None:
    lines = (shared / "data/wikitext103/valid_slice.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert tokenizer.tokenize_batch(texts) == [plain(text) for text in texts]


def test_ids_of_wikitext_are_those_of_transformers_python_tokenizer(
    shared: Path, kind: str, tokenizer: Tokenizer, vocabulary: dict[str, int]
) -> None:
    theirs = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy", reason="no Python BERT tokenizer")
    cut = theirs.BasicTokenizer(do_lower_case=kind == "BertWordPieceLowerCase")
    find = theirs.WordpieceTokenizer(vocabulary, "[UNK]")
    lines = (shared / "data/wikitext103/valid_slice.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    expected = [[vocabulary[piece] for word in cut.tokenize(text) for piece in find.tokenize(word)] for text in texts]
    assert tokenizer.tokenize_batch(texts) == expected


def test_case_matters_only_to_the_cased(vocab_file: Path) -> None:
    lower, cased = (build(vocab_file, kind) for kind in KINDS)
    assert lower.tokenize("The CAF\u00c9") == lower.tokenize("the cafe")
    assert cased.tokenize("The") != cased.tokenize("the")
    assert lower.detokenize(lower.tokenize("Hello, WORLD")) == "hello, world"
    assert cased.detokenize(cased.tokenize("Hello, WORLD")) == "Hello, WORLD"


def test_special_ids(shared: Path) -> None:
    tokenizer = build(shared / "data/bert/bert-base-uncased-vocab.txt")
    assert tokenizer.vocab_size == 30_522
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 101, 102, 103)
    assert tokenizer.eod == tokenizer.sep
    assert tokenizer.special_ids == {0, 100, 101, 102, 103}
    with pytest.raises(ValueError, match=r"--vocab-file .*: no beginning-of-text token; looked for <s>, <bos>"):
        _ = tokenizer.bos


def test_a_vocabulary_of_megatron(shared: Path) -> None:
    tokenizer = build(shared / "data/megatron_2_5/bert_vocab.txt")
    assert tokenizer.vocab_size == 200
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.tokenize("w0 w3 nothing") == [5, 8, 1]


def test_ids_that_continue_a_word(vocabulary: dict[str, int], tokenizer: Tokenizer) -> None:
    continues = tokenizer.continues_word()
    assert continues.dtype == np.bool_ and continues.shape == (tokenizer.vocab_size,)
    for token, i in vocabulary.items():
        assert continues[i] == token.startswith("##"), token
    ids = tokenizer.tokenize("unaffable players")
    assert (~continues[ids]).sum() == 2 < len(ids)


def test_names_of_special_tokens_are_text_unless_asked_for(tmp_path: Path, kind: str) -> None:
    path = write_small(tmp_path, "[", "]", "SEP", "sep")
    plays = [5, 7, 9, 12 if kind == KINDS[0] else 11, 10, 5]
    assert build(path, kind).tokenize("plays[SEP]play") == plays
    parsing = build(path, kind, parse_special_tokens=True)
    assert parsing.tokenize("plays[SEP]play [MASK]") == [5, 7, 3, 5, 4]
    assert parsing.tokenize_batch(["[CLS]", "x[sep]"]) == [[2], build(path, kind).tokenize("x[sep]")]


BROKEN = {
    "missing": (None, "--vocab-file .* cannot be read: No such file"),
    "empty": (b"", r"--vocab-file .*: no line is \[UNK\], the token for unknown words"),
    "binary": (b"\xff\xfe[UNK]", "--vocab-file .* is not a text file in UTF-8"),
    "JSON": (b'{"[UNK]": 0}', r"no line is \[UNK\]"),
    "twice": (b"[UNK]\na\nb\na\n", "--vocab-file .*, line 4: the token 'a' stands in line 2 already"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_vocabularies_are_told(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build(path)


def test_a_folder_for_a_vocabulary_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--vocab-file .* cannot be read: Is a directory"):
        build(tmp_path)


def test_line_ends_of_windows_and_tokens_that_look_like_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes("[UNK]\r\na\r\n\u2028\r\n##b\r\n".encode())
    tokenizer = build(path)
    assert tokenizer.vocab_size == 4
    assert tokenizer.tokenize("ab a") == [1, 3, 1]


def test_a_vocabulary_without_a_mask_says_so_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\na\n", encoding="utf-8")
    tokenizer = build(tmp_path / "vocab.txt")
    assert tokenizer.special_ids == {0}
    for use, meaning in (("mask", "mask"), ("cls", "classification"), ("sep", "separator"), ("eod", "end-of-document")):
        with pytest.raises(ValueError, match=f"--vocab-file .*: no {meaning} token; looked for "):
            getattr(tokenizer, use)


def test_without_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="--tokenizer-type BertWordPieceCase needs --vocab-file"):
        TokenizerConfig(tokenizer_type="BertWordPieceCase")
