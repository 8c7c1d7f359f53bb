"""SentencePiece models: ids by the library itself, special ids, parts of words, threads, broken files."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

EDGES = [
    "",
    "   ",
    "This License does not grant permission",
    "  blanks  inside   and\tout \n",
    "na\u00efve caf\u00e9 cafe\u0301 \u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469",
    "\x00\x01\x7f\ufeff\uffff\U0010ffff",
    "\u2581 is the sign for a blank, <0x41> a byte",
    "</s> <s> <unk> <pad> [CLS] [MASK]",
    "x" * 3000,
]


def train(folder: Path, lines: list[str], name: str = "m.model", **options: object) -> Path:
    """A small model, which knows unknown characters by their bytes."""
    settings = {"vocab_size": 420, "byte_fallback": True, "pad_id": 3, "minloglevel": 2, "num_threads": 1} | options
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **settings)
    (folder / name).write_bytes(model.getvalue())
    return folder / name


def build(path: Path, parse_special_tokens: bool = False) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(path),
            parse_special_tokens=parse_special_tokens,
        )
    )


@pytest.fixture(scope="module")
def lines(repository: Path) -> list[str]:
    """English to train on."""
    return [line for line in (repository / "LICENSE").read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def path(request: pytest.FixtureRequest, lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    return train(folder, lines, model_type=request.param, control_symbols=["[CLS]", "[SEP]", "[MASK]"])


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return build(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_ids_are_the_librarys(
    tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor, lines: list[str]
) -> None:
    texts = EDGES + lines
    expected = [theirs.encode(text) for text in texts]
    assert [tokenizer.tokenize(text) for text in texts] == tokenizer.tokenize_batch(texts) == expected
    assert [tokenizer.detokenize(ids) for ids in expected] == [theirs.decode(ids) for ids in expected]
    assert tokenizer.detokenize(tokenizer.tokenize(EDGES[2])) == EDGES[2]
    assert tokenizer.tokenize_batch([]) == []


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_of_any_text_are_the_librarys(
    tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    assert tokenizer.tokenize(text) == theirs.encode(text)


def test_the_number_of_threads_changes_no_id(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, lines: list[str]
) -> None:
    ids = tokenizer.tokenize_batch(lines)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert tokenizer.tokenize_batch(lines) == ids


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 420
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, 3)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.mask) == (4, 5, 6)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, 5, 6}
    ids = tokenizer.tokenize("grant")
    assert tokenizer.detokenize([4, *ids, 5, *ids, 2]) == "[CLS]grant[SEP]grant</s>"


def test_a_model_without_special_ids_but_the_unknown_one(tmp_path: Path, lines: list[str]) -> None:
    path = train(tmp_path, lines, model_type="bpe", bos_id=-1, eos_id=-1, pad_id=-1)
    tokenizer = build(path)
    assert tokenizer.special_ids == {0}
    for use in ("eod", "bos", "pad", "cls", "sep", "mask"):
        with pytest.raises(ValueError, match="--tokenizer-model .*m.model: no .* token; looked for "):
            getattr(tokenizer, use)
    assert build(path, parse_special_tokens=True).tokenize("grant") == tokenizer.tokenize("grant")


def test_the_end_of_document_is_the_models_own_whatever_its_name(tmp_path: Path, lines: list[str]) -> None:
    tokenizer = build(train(tmp_path, lines, model_type="bpe", eos_piece="[END]", eos_id=5, control_symbols=["</s>"]))
    assert tokenizer.eod == 5
    assert tokenizer.detokenize([5]) == "[END]"


def test_ids_that_continue_a_word(tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor) -> None:
    continues = tokenizer.continues_word()
    assert continues.dtype == np.bool_ and continues.shape == (420,)
    assert not continues[list(tokenizer.special_ids)].any()
    for i in range(7, 420):
        assert continues[i] != theirs.id_to_piece(i).startswith("\u2581")
    ids = tokenizer.tokenize("unlimited distribution \U0001f600")
    assert (~continues[ids]).sum() == 3 < len(ids)


def test_names_of_special_tokens_are_text_unless_asked_for(
    path: Path, tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor
) -> None:
    text = "grant</s>of [MASK]</s>"
    assert not tokenizer.special_ids & set(tokenizer.tokenize(text))
    parsing = build(path, parse_special_tokens=True)
    expected = [*theirs.encode("grant"), 2, *theirs.encode("of "), 6, 2]
    assert parsing.tokenize(text) == expected
    assert parsing.tokenize_batch(["", text, "<s>", "grant"]) == [[], expected, [1], theirs.encode("grant")]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_symbols_that_the_model_looks_for_are_text_too_unless_asked_for(
    tmp_path: Path, lines: list[str], byte_fallback: bool
) -> None:
    symbols = ["<|endoftext|>", "<mask>", "<other>"]
    options = {"eos_id": -1, "byte_fallback": byte_fallback, "vocab_size": 420 if byte_fallback else 160}
    path = train(tmp_path, lines, model_type="bpe", user_defined_symbols=symbols, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = build(path)
    eod, mask, other = map(theirs.piece_to_id, symbols)
    assert (tokenizer.eod, tokenizer.mask) == (eod, mask)
    text = "grant<|endoftext|>or<mask><other>"
    assert {eod, mask, other} <= set(theirs.encode(text))
    ids = tokenizer.tokenize(text)
    assert not {eod, mask} & set(ids)
    assert other in ids
    if byte_fallback:
        assert tokenizer.detokenize(ids) == text
    else:  # "<" and the like are unknown
        assert tokenizer.detokenize(ids).startswith("grant \u2047 ")
    parsed = build(path, parse_special_tokens=True).tokenize(text)
    assert parsed.count(eod) == parsed.count(mask) == 1


def test_broken_models_are_told(tmp_path: Path, path: Path) -> None:
    broken = tmp_path / "x.model"
    with pytest.raises(ValueError, match="--tokenizer-model .*x.model cannot be read: No such file"):
        build(broken)
    with pytest.raises(ValueError, match="--tokenizer-model .* cannot be read: Is a directory"):
        build(tmp_path)
    good = path.read_bytes()
    for content in (b"", b"{}", b"garbage" * 100, good[: len(good) // 2], good[:-1], good[1:], b"\x80\x02}q\x00."):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"--tokenizer-model .*x.model is not a (whole )?SentencePiece model"):
            build(broken)
    with pytest.raises(ValueError, match="SentencePieceTokenizer needs --tokenizer-model"):
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer")


def test_a_model_that_ends_between_two_pieces_is_not_taken(tmp_path: Path, lines: list[str]) -> None:
    good = train(tmp_path, lines, model_type="bpe", byte_fallback=False, vocab_size=160).read_bytes()
    taken_by_the_library = 0
    for end in range(1000, 1200):
        (tmp_path / "x.model").write_bytes(good[:end])
        with contextlib.suppress(RuntimeError):
            sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(good[:end])
            taken_by_the_library += 1
        with pytest.raises(ValueError, match=r"x.model is not a (whole )?SentencePiece model"):
            build(tmp_path / "x.model")
    assert taken_by_the_library > 5


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for wrong in (-1, 420):
        with pytest.raises(ValueError, match=f"id {wrong}: --tokenizer-model .* has ids 0 to 419"):
            tokenizer.detokenize([0, wrong])
