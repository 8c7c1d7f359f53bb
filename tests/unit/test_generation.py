"""Continuing prompts side by side, and the texts that come of it, with a model that counts."""

import math
from typing import Any

import pytest
import torch

from megatron.tasks.generation import Chosen, Continuations, Prompt, continue_prompts
from megatron.tasks.sampling import SamplingConfig
from megatron.tasks.texts import TextStream
from megatron.tasks.writer import write
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from tests.harness.counting_model import CountingModel

GREEDY = SamplingConfig(greedy=True)


def continued(prompts: list[Prompt], rows: int, recompute: bool = False, **model: Any) -> list[list[int]]:
    """The ids that are added to each prompt, and after them why it ended."""
    texts = Continuations(CountingModel(**model), rows, recompute=recompute)
    found: list[list[Any]] = [[] for _ in prompts]
    for one in continue_prompts(texts, prompts):
        found[one.number] += [one.token] if one.finish is None else [one.token, one.finish]
    assert texts.room == rows
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("recompute", [False, True])
def test_each_prompt_goes_on_by_itself_and_ends_by_itself(rows: int, recompute: bool) -> None:
    prompts = [
        Prompt([1, 2], 3, GREEDY),
        Prompt([5], 9, GREEDY, stop_ids={8}),
        Prompt([7, 8, 9, 0, 1], 99, GREEDY),
        Prompt([3], 0, GREEDY),
        Prompt([4, 5, 6, 7, 8, 9, 0, 1], 5, GREEDY),
        Prompt([9], 1, GREEDY),
    ]
    assert continued(prompts, rows, recompute, context=8) == [
        [3, 4, 5, "length"],
        [6, 7, 8, "stop"],
        [2, 3, 4, 5, "context"],
        [],
        [2, "context"],
        [0, "length"],
    ]


def test_only_the_new_token_is_read_again() -> None:
    model = CountingModel()
    texts = Continuations(model, 2)
    texts.step({4: Prompt([1, 2, 3], 9, GREEDY)})
    texts.step({5: Prompt([1, 2], 9, GREEDY)})
    assert texts.step() == [Chosen(4, 6, None), Chosen(5, 4, None)]
    texts.drop([4])
    assert texts.step() == [Chosen(5, 5, None)]
    assert model.asked == [[3], [1], [2], [1, 1], [1]]


def test_draws_depend_on_the_prompt_s_seed_alone() -> None:
    """Neither on what is continued beside it, nor on when it began, nor on the default generator."""
    before = torch.get_rng_state()
    prompts = [Prompt([n], 12, SamplingConfig(temperature=4.0), seed=(seed, n)) for seed in (1, 2) for n in range(4)]
    found = [continued(prompts, rows, counted=False) for rows in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    assert continued(prompts[3:4], 1, counted=False) == found[0][3:4]
    assert continued(prompts[::-1], 5, counted=False) == found[0][::-1]
    assert all(found[0][n] != found[0][n + 4] for n in range(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_that_are_no_numbers_end_it() -> None:
    with pytest.raises(FloatingPointError, match="no numbers"):
        continued([Prompt([1], 3)], 1, sharpness=math.nan)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (Prompt([], 1), "the prompt is empty"),
        (Prompt([1] * 17, 1), "the prompt has 17 tokens: the model takes 16 at most"),
        (Prompt([1, 10], 1), "token 10: the vocabulary has ids 0 to 9"),
        (Prompt([1], 1, stop_ids=(3, 11)), "stop token 11: the vocabulary has ids 0 to 9"),
    ],
)
def test_prompts_that_are_none_for_the_model_are_told(prompt: Prompt, sentence: str) -> None:
    model, tokenizer = CountingModel(), build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    with pytest.raises(ValueError, match=f"prompt 2: {sentence}"):
        write(Continuations(model, 2), tokenizer, [Prompt([1], 1), prompt])
    assert model.asked == []


class Letters:
    """A tokenizer of bytes."""

    def detokenize(self, ids: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def streamed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Letters(), b"before: \xe2\x82", stop)  # type: ignore[arg-type]
    return [stream.add(byte) for byte in text.encode()] + [stream.end()], stream


def test_a_letter_of_several_ids_comes_whole() -> None:
    pieces, stream = streamed("aé😀")
    assert pieces == ["a", "", "é", "", "", "", "😀", ""]
    assert stream.text == "aé😀"
    unfinished = TextStream(Letters(), [], ())  # type: ignore[arg-type]
    assert [unfinished.add(0xC3), unfinished.end()] == ["", "\ufffd"]


def test_a_long_text_is_decoded_piece_by_piece() -> None:
    """With letters of two bytes wherever a piece may end; no more than some ids are decoded at a time."""
    lengths: list[int] = []

    class Counting(Letters):
        def detokenize(self, ids: Any) -> str:
            lengths.append(len(ids))
            return super().detokenize(ids)

    text = "aé" * 150 + "stop" + "é" * 9
    stream = TextStream(Counting(), b"", ("stop",))  # type: ignore[arg-type]
    assert "".join(stream.add(byte) for byte in text.encode()) == "aé" * 150
    assert stream.stopped
    assert max(lengths) < 60


def test_a_stop_is_never_given_nor_its_beginning() -> None:
    pieces, stream = streamed("one two three", ("two t", "thr"))
    assert "".join(pieces) == stream.text == "one "
    assert stream.stopped
    pieces, stream = streamed("tw tw", ("two",))
    assert pieces == ["", "", "tw ", "", "", "tw"]
    assert not stream.stopped


def test_a_stop_of_letters_of_several_ids_is_found() -> None:
    """Its first letters are held back while the next one is not whole."""
    pieces, stream = streamed("axéb", ("xé",))
    assert (pieces, stream.stopped) == (["a", "", "", "", "", ""], True)
    pieces, stream = streamed("axêb", ("xé",))
    assert (pieces, stream.stopped) == (["a", "", "", "xê", "b", ""], False)


def test_a_stop_costs_no_more_than_the_text() -> None:
    """To look at all beginnings of one so long would take days."""
    said = "ab" * 20
    stop = said + "c" * 10_000_000
    pieces, stream = streamed(f"x{said}y", (stop,))
    assert "".join(pieces[:-2]) == "x"
    assert (pieces[-2:], stream.stopped) == ([f"{said}y", ""], False)
    pieces, stream = streamed(f"{said}x" * 3, (stop, "bx", "abx"))
    assert ("".join(pieces), stream.stopped) == (said[:-2], True)


def test_a_stop_string_ends_the_text_and_frees_the_place() -> None:
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    texts = Continuations(CountingModel(), 1)
    heard: list[str] = []
    prompts = [Prompt([1], 9, GREEDY), Prompt([2, 3], 3, GREEDY), Prompt([3], 4, GREEDY, stop_ids={6})]
    one, two, three = write(texts, tokenizer, prompts, ["4 5"], heard.append)
    assert (one.text, one.tokens, one.finish) == (" 2 3 ", 4, "stop")
    assert (two.text, two.tokens, two.finish) == (" ", 2, "stop")
    assert (three.text, three.tokens, three.finish) == (" ", 2, "stop")
    assert "".join(heard) == one.text + two.text + three.text
    (four,) = write(texts, tokenizer, [Prompt([3], 4, GREEDY, stop_ids={6})])
    assert (four.text, four.tokens, four.finish) == (" 4 5", 3, "stop")
