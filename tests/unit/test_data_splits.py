"""Splits: what `--split` accepts and where the boundaries fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.splits import parse_split, split_boundaries

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any)


def test_weights_are_divided_by_their_sum() -> None:
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split("90/10/0") == parse_split("9, 1") == (0.9, 0.1, 0.0)
    assert parse_split("3") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf", "1,,2"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--split .*accepted are one to three weights"):
        parse_split(text)


@pytest.mark.parametrize(
    ("text", "n", "boundaries"),
    [
        ("949,50,1", 1000, [0, 949, 999, 1000]),
        ("90,10,0", 200, [0, 180, 200, 200]),  # the set that Megatron-LM 2.5 split
        ("1,1,1", 100, [0, 34, 67, 100]),  # 33 + 33 + 33: one is missing, the first share takes it
        ("1,1,1", 200, [0, 66, 133, 200]),  # 67 + 67 + 67: one too many, the first share loses it
        ("1,1,0", 5, [0, 3, 5, 5]),  # halves are rounded to even: 2 + 2
        ("969,30,1", 3, [0, 3, 3, 3]),
        ("0,1,1", 3, [0, 0, 1, 3]),
        ("1", 7, [0, 7, 7, 7]),
    ],
)
def test_boundaries(text: str, n: int, boundaries: list[int]) -> None:
    assert split_boundaries(parse_split(text), n) == boundaries


@given(WEIGHTS, st.integers(0, 10**9))
def test_boundaries_rise_from_nothing_to_all_and_are_near_the_weights(weights: list[int], n: int) -> None:
    boundaries = split_boundaries(parse_split(",".join(map(str, weights))), n)
    assert boundaries[0] == 0
    assert boundaries[-1] == n
    assert boundaries == sorted(boundaries)
    for share, weight in enumerate(weights):
        exact = weight / sum(weights) * n
        assert abs(boundaries[share + 1] - boundaries[share] - exact) <= 2
