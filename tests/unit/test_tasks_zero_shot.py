"""The text of WikiText as it is typed, its words, and windows over tokens."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.tasks.detokenizing import detokenize
from megatron.tasks.lambada import Passage
from megatron.tasks.wikitext import count_words, overlapping_windows, read_text
from megatron.tasks.windows import Window, batch_numbers

WIKITEXT = "data/wikitext103/wiki.valid.tokens"


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        (" = = Life cycle = = ", "== Life cycle =="),
        (" = Tikal = ", "= Tikal ="),
        ("a = b", "a = b"),
        ("weigh 0 @.@ 7 – 2 @.@ 2 kg , or 1 @,@ 462 t", "weigh 0.7 – 2.2 kg, or 1,462 t"),
        (
            "a long @-@ time fan ; he ( also ) didn 't [ sic ] : why ?",
            "a long-time fan; he (also) didn't [sic]: why?",
        ),
        ('the " crusher " , and " it " .', 'the "crusher", and "it".'),
        ('one " only', 'one " only'),
        ("Linnaeus ' concept and Bart 's artworks", "Linnaeus' concept and Bart's artworks"),
        ("four larger ' voes ' . <unk> Voe", "four larger 'voes'. <unk> Voe"),
        ("defined the ' anti @-@ lodgment ' concept", "defined the 'anti-lodgment' concept"),
        (" \n = A = \n \n Text , here . \n", "\n= A =\n\nText, here.\n"),
        ("", ""),
    ],
)
def test_text_is_typed(given: str, typed: str) -> None:
    assert detokenize(given) == typed


def test_a_whole_file_keeps_all_but_blanks_and_marks(shared: Path) -> None:
    """And no two lines become one, so that each can be told from what it became."""
    text = (shared / WIKITEXT).read_text(encoding="utf-8")
    typed = detokenize(text)
    assert re.sub(r"\s", "", re.sub(r" @([-,.])@ ", r"\1", text)) == re.sub(r"\s", "", typed)
    assert "@-@" not in typed and " ," not in typed and " )" not in typed and "( " not in typed
    lines = {line.strip() for line in text.split("\n")}
    assert len({detokenize(line) for line in lines}) == len(lines) > 2000


def test_words_are_counted_as_the_published_figures_do(shared: Path) -> None:
    assert count_words(read_text(str(shared / WIKITEXT))) == 217_642


@given(st.integers(2, 200), st.integers(1, 40), st.data())
def test_windows_score_each_token_but_the_first_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    windows = overlapping_windows(range(tokens), length, stride)
    scored = [int(i) for window in windows for i in window.ids[-window.scored :]]
    assert scored == list(range(1, tokens))
    for number, window in enumerate(windows):
        assert window.ids[0] == number * stride
        assert window.scored < len(window.ids) <= length + 1
        assert number == 0 or window.scored <= stride
    assert len(windows[0].ids) == min(length + 1, tokens)


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(1, 3)), max_size=40), st.integers(1, 5))
def test_batches_hold_each_window_once_and_like_ones_together(sizes: list[tuple[int, int]], most: int) -> None:
    windows = [Window(overlapping_windows(range(length), 9, 9)[0].ids, scored) for length, scored in sizes]
    batches = batch_numbers(windows, most)
    assert sorted(i for batch in batches for i in batch) == list(range(len(windows)))
    assert all(1 <= len(batch) <= most for batch in batches)
    assert all(len({windows[i].scored for i in batch}) == 1 for batch in batches)


def test_the_last_word_is_behind_the_last_blank() -> None:
    assert Passage(1, 'he said , "why\nnot?').parts == ['he said , "why', "not?"]
    assert Passage(1, "alone").parts == ["alone"]
    assert Passage(1, "").parts == []
