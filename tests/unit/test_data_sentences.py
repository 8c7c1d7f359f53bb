"""Sentences: where they end, and that no character of the text is lost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sentences import WINDOW, SentenceSplitter

SPLIT = SentenceSplitter("en")


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello World.", "My name is Jonas E. Smith."],
        ["At 5 a.m. Mr. Smith went to the bank.", "He left the bank at 6 P.M.", "Mr. Smith then went to the store."],
        ["They closed the deal with Pitt, Briggs & Co. at noon.", "It cost $3.50."],
        ['She turned to him, "This is great." she said.', "Was it?", "Yes!"],
        ["See https://www.example.50.com/a.html and Fig. 3.", "I live in the U.S.", "How about you?"],
        ["Prof. Lee et al. agreed, e.g. on Jan. 5."],
    ],
)
def test_english(sentences: list[str]) -> None:
    assert SPLIT(" ".join(sentences)) == sentences


def test_other_languages() -> None:
    assert SentenceSplitter("de")("Das ist z.B. Herr Dr. M\u00fcller. Er kam am 3. Mai an.") == [
        "Das ist z.B. Herr Dr. M\u00fcller.",
        "Er kam am 3. Mai an.",
    ]
    assert SentenceSplitter("zh")("\u8fd9\u662f\u7b2c\u4e00\u53e5\u3002\u8fd9\u662f\u7b2c\u4e8c\u53e5\uff01") == [
        "\u8fd9\u662f\u7b2c\u4e00\u53e5\u3002",
        "\u8fd9\u662f\u7b2c\u4e8c\u53e5\uff01",
    ]


def test_blank_lines_end_a_sentence_and_other_breaks_do_not() -> None:
    assert SPLIT("A heading\n\nOne line\nbroken. Two.\n \r\n\n\nThe end\n") == [
        "A heading",
        "One line\nbroken.",
        "Two.",
        "The end",
    ]
    assert SPLIT(" \n\n ") == []


@given(
    st.lists(st.sampled_from(["Dr. ", "He went. ", "\n", "\n\n", "\u201c", "x\x00", "\u2028"]) | st.text(max_size=5))
)
def test_nothing_but_blanks_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    sentences = SPLIT(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


def test_long_paragraphs_are_cut_as_if_there_were_no_windows() -> None:
    sentences = [f"Mr. Smith went to room no. {i} at 5 p.m. on that day." for i in range(4 * WINDOW // 50)]
    assert SPLIT(" ".join(sentences)) == sentences


def test_odd_texts_take_no_time_that_grows_with_their_square() -> None:
    start = time.process_time()
    assert max(map(len, SPLIT("\u201c" * 100_000))) <= WINDOW
    assert max(map(len, SPLIT("word " * 100_000))) <= WINDOW
    assert time.process_time() - start < 10


def test_a_language_that_the_library_does_not_know_has_the_rules_of_english() -> None:
    text = "Dr. Smith saw Mt. Hood, e.g. at 5 p.m. on Monday. Hr. Meier, St. Jan. He left."
    assert SentenceSplitter("zz")(text) == SPLIT(text)
    assert SentenceSplitter("fr")(text) != SPLIT(text)
