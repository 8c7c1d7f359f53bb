"""Special tokens of all tokenizers: their names are text unless asked for; copies, lone surrogates, odd models."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def from_backend(folder: Path, backend: Backend, parse_special_tokens: bool = False) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder / "tokenizer.json"),
            parse_special_tokens=parse_special_tokens,
        )
    )


def unigram() -> Backend:
    """As T5's: the end of text is among the pieces, with the best score of all."""
    characters = [(character, -4.0) for character in LETTERS + "<>/|[]"]
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), *characters], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return backend


def whole_words() -> Backend:
    backend = Backend(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "a": 2, "[MASK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def byte_level(special: bool) -> Backend:
    """As GPT-2's, but `<|endoftext|>` is an added token that may be an ordinary one."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    add = backend.add_special_tokens if special else backend.add_tokens
    add(["<|endoftext|>"])
    return backend


def bert() -> Backend:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "[SEP]", "[CLS]", "[", "]", "a", "sep", "SEP"])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


BACKENDS = {
    "unigram": (unigram, "a</s>a", "</s>"),
    "whole words": (whole_words, "a [SEP] a", "[SEP]"),
    "byte-level, special": (lambda: byte_level(True), "a<|endoftext|>a", "<|endoftext|>"),
    "byte-level, ordinary": (lambda: byte_level(False), "a<|endoftext|>a", "<|endoftext|>"),
    "word pieces": (bert, "a[SEP]a", "[SEP]"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_in_a_text_is_text_unless_asked_for(tmp_path: Path, name: str) -> None:
    make, text, end = BACKENDS[name]
    tokenizer = from_backend(tmp_path, make())
    ids = tokenizer.tokenize(text)
    assert tokenizer.eod == make().token_to_id(end)
    assert tokenizer.eod not in ids
    assert len(ids) > 2
    assert tokenizer.tokenize_batch(["a", text]) == [tokenizer.tokenize("a"), ids]
    parsing = from_backend(tmp_path, make(), parse_special_tokens=True)
    assert parsing.tokenize(text).count(tokenizer.eod) == 1
    assert parsing.tokenize_batch(["a", text]) == [tokenizer.tokenize("a"), parsing.tokenize(text)]
    assert parsing.vocab_size == tokenizer.vocab_size == make().get_vocab_size()


def test_what_a_name_becomes(tmp_path: Path) -> None:
    tokenizer = from_backend(tmp_path, unigram())
    assert tokenizer.detokenize(tokenizer.tokenize("a</s>b</s> c")) == "a</s>b</s> c"
    blank, a, *name = (unigram().token_to_id(piece) for piece in ("\u2581", "a", "<", "/", "s", ">"))
    assert tokenizer.tokenize("a</s>") == [blank, a, *name]
    assert from_backend(tmp_path, whole_words()).tokenize("a [MASK] a") == [2, 0, 0, 2]
    tokenizer = from_backend(tmp_path, byte_level(False))
    assert tokenizer.detokenize(tokenizer.tokenize("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_other_added_tokens_are_found_as_ever(tmp_path: Path) -> None:
    backend = byte_level(True)
    backend.add_tokens([AddedToken("def "), "\n\n\n"])
    tokenizer = from_backend(tmp_path, backend)
    assert tokenizer.tokenize("def \n\n\n") == [257, 258]
    assert tokenizer.special_ids == {256}


def test_special_tokens_without_a_known_use_are_special_too(tmp_path: Path) -> None:
    backend = byte_level(True)
    backend.add_special_tokens(["<|user|>"])
    tokenizer = from_backend(tmp_path, backend)
    assert tokenizer.special_ids == {256, 257}
    assert not tokenizer.special_ids & set(tokenizer.tokenize("<|user|>"))
    assert from_backend(tmp_path, backend, parse_special_tokens=True).tokenize("<|user|>") == [257]


def files_of_gpt2(folder: Path) -> dict[str, Any]:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps(letters | {"<|endoftext|>": 256}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


def test_gpt2_reads_the_end_of_text_where_asked_for(tmp_path: Path) -> None:
    plain = build_tokenizer(TokenizerConfig(**files_of_gpt2(tmp_path)))
    parsing = build_tokenizer(TokenizerConfig(**files_of_gpt2(tmp_path), parse_special_tokens=True))
    [a, b] = plain.tokenize("ab")
    assert parsing.tokenize("a<|endoftext|>b<|endoftext|>") == [a, 256, b, 256]
    assert len(plain.tokenize("a<|endoftext|>b")) == 15
    assert parsing.detokenize([a, 256, b]) == plain.detokenize([a, 256, b]) == "a<|endoftext|>b"


@pytest.mark.parametrize("parse_special_tokens", [False, True])
def test_a_pickled_copy_reads_as_the_original(tmp_path: Path, parse_special_tokens: bool) -> None:
    # the library's own copies forget whether names of special tokens are text
    for make, text, _ in BACKENDS.values():
        tokenizer = from_backend(tmp_path, make(), parse_special_tokens)
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.tokenize(text) == tokenizer.tokenize(text)
        assert (copy.eod, copy.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)


def test_a_lone_surrogate_is_no_text(tmp_path: Path) -> None:
    for make, _, _ in BACKENDS.values():
        with pytest.raises(ValueError, match="surrogates not allowed"):
            from_backend(tmp_path, make()).tokenize_batch(["a", "\ud800"])


def test_what_the_model_cannot_do_is_told(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"a": 0, "b": 1}, unk_token="[UNK]"))
    tokenizer = from_backend(tmp_path, backend)
    assert tokenizer.tokenize("a") == [0]
    with pytest.raises(ValueError, match=r"--tokenizer-model .*tokenizer.json: .*Missing \[UNK\] token"):
        tokenizer.tokenize("c")
    with pytest.raises(ValueError, match="--tokenizer-model .*tokenizer.json has no tokens"):
        from_backend(tmp_path, Backend(models.BPE()))


def test_only_some_vocabularies_mark_the_ids_that_continue_a_word(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "##a": 1, "a": 2}, unk_token="[UNK]"))
    assert from_backend(tmp_path, backend).continues_word().tolist() == [False, True, False]
    null = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5))
    for tokenizer in (from_backend(tmp_path, unigram()), null):
        with pytest.raises(ValueError, match="only WordPiece and SentencePiece mark the ids that continue a word"):
            tokenizer.continues_word()


def test_null_tokenizer_has_an_end_and_no_names(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5))
    assert tokenizer.special_ids == {tokenizer.eod} == {4}
    with pytest.raises(ValueError, match="NullTokenizer .*: no mask token"):
        _ = tokenizer.mask
    with pytest.raises(ValueError, match="--parse-special-tokens: .* NullTokenizer reads ids, not names"):
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=5, parse_special_tokens=True)
