"""Plain values as JSON: exact, readable by any parser, refused where they are no plain values."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing.values import from_json, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@given(VALUES)
def test_values_come_back_exactly(value: Any) -> None:
    text = to_json(value)
    json.loads(text, parse_constant=refuse_constant)
    back = from_json(text)
    assert back == value and repr(back) == repr(value)


def test_nan_comes_back() -> None:
    text = to_json({"loss": math.nan, "best": -math.inf})
    json.loads(text, parse_constant=refuse_constant)
    back = from_json(text)
    assert math.isnan(back["loss"]) and back["best"] == -math.inf


def test_tuples_become_lists() -> None:
    assert from_json(to_json({"split": (1, (2, 3))})) == {"split": [1, [2, 3]]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, torch.ones(2)]}, r"state\.a\[1\]: Tensor"),
        ({"a": {"b": np.float32(1)}}, r"state\.a\.b: float32"),
        ({"a": {1: 2}}, r"state\.a: the key 1"),
        ({"__float__": "1"}, "the key '__float__'"),
        ({"a": {1, 2}}, r"state\.a: set"),
        ({"a": print}, r"state\.a: builtin_function"),
    ],
)
def test_other_things_are_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_json(value)
