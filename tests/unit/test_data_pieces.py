"""Huge texts in pieces: the ids are those of the whole, with tokenizers of several kinds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from megatron.data.pieces import pieces

LEARNED = [
    "it's a test, isn't it? we'll see: 12 345\n\n  indented  more ",
    "d\u00e9j\u00e0 vu \u4f60\u597d\uff0c\u4e16\u754c\u3002",
] * 20
LLAMA_3 = r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "bert": pre_tokenizers.BertPreTokenizer(),
    "metaspace": pre_tokenizers.Metaspace(),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
}


def trained(kind: str) -> Callable[[str], list[int]]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]
    if kind == "bert":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LEARNED, trainer)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


TOKENIZERS = {kind: trained(kind) for kind in PRE_TOKENIZERS}
WORDS = [
    "a",
    "we'll",
    "it's",
    " ",
    "  ",
    "\n",
    "\r\n",
    "12",
    "345",
    "d\u00e9j\u00e0",
    "\u0301",
    "\u4f60\u597d",
    "\u3002",
    ".",
    "'",
    "x\x00",
    "\u2028",
    "!?",
]
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=120).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(text=TEXT)
def test_the_ids_are_those_of_the_whole(kind: str, text: str) -> None:
    tokenize = TOKENIZERS[kind]
    cut = list(pieces(text, tokenize, 8))
    assert "".join(cut) == text
    assert [i for piece in cut for i in tokenize(piece)] == tokenize(text)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "bert", "digits", "metaspace"])
def test_prose_is_cut(kind: str) -> None:
    text = "It is a test, isn't it? We'll see: 12 345\n  and more " * 400
    cut = list(pieces(text, TOKENIZERS[kind], 500))
    assert max(map(len, cut)) < 1500
    tokenize = TOKENIZERS[kind]
    assert [i for piece in cut for i in tokenize(piece)] == tokenize(text)


def test_writing_without_blanks_is_cut() -> None:
    text = "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 500
    assert len(list(pieces(text, TOKENIZERS["gpt2"], 100))) > 10


def test_a_tokenizer_that_knows_no_words_gets_the_whole() -> None:
    # one token for each pair of characters, from the start: no cut is right but at even places
    def pairs(text: str) -> list[int]:
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)] + [-len(text)]

    text = "two words " * 100
    assert list(pieces(text, pairs, 20)) == [text]


def test_ids_of_gpt2s_vocabulary(shared: Path) -> None:
    from megatron.tokenizer import TokenizerConfig, build_tokenizer

    folder = shared / "data/gpt2"
    files = {"vocab_file": str(folder / "gpt2-vocab.json"), "merge_file": str(folder / "gpt2-merges.txt")}
    tokenizer = build_tokenizer(TokenizerConfig(**files))  # type: ignore[arg-type]
    text = json.dumps([path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))])
    text += Path(__file__).read_text(encoding="utf-8")
    cut = list(pieces(text, tokenizer.tokenize, 300))
    assert len(cut) > 50
    assert [i for piece in cut for i in tokenizer.tokenize(piece)] == tokenizer.tokenize(text)
