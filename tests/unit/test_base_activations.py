"""activation_bytes against the published rows of arXiv:2205.05198."""

from typing import Any

import pytest

from megatron.base.activations import activation_bytes

# s, b, h, n, t of the paper's four models, table 3.
MODELS = {
    "22B": (2048, 4, 6144, 64, 8),
    "175B": (2048, 1, 12288, 96, 8),
    "530B": (2048, 1, 20480, 128, 8),
    "1T": (2048, 1, 25600, 160, 8),
}
ROWS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "sequence": {"sequence_parallel": True},
    "selective": {"recompute": "selective"},
    "both": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
}


def rows(name: str) -> dict[str, int]:
    s, b, h, n, t = MODELS[name]
    return {row: activation_bytes(s, b, h, n, t=t, **given) for row, given in ROWS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_formulas_of_table_2(name: str) -> None:
    s, b, h, n, t = MODELS[name]
    sbh, matrices = s * b * h, 5 * n * s * s * b
    assert activation_bytes(s, b, h, n) == 34 * sbh + matrices
    assert rows(name) == {
        "tensor": 10 * sbh + 24 * sbh // t + matrices // t,
        "sequence": (34 * sbh + matrices) // t,
        "selective": 10 * sbh + 24 * sbh // t,
        "both": 34 * sbh // t,
        "full": 2 * sbh,
    }


@pytest.mark.parametrize(("name", "saved"), [("175B", 0.70), ("530B", 0.65)])
def test_what_selective_recomputation_saves_of_a_layer(name: str, saved: float) -> None:
    """Section 5: 70 % and 65 %."""
    found = rows(name)
    assert 1 - found["both"] / found["sequence"] == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_both_together_save_five_times_and_full_recomputation_ten_times(name: str) -> None:
    """Section 6.1: each of the two nearly halves the memory, together they need about a fifth, full about a tenth."""
    found = rows(name)
    share = {row: size / found["tensor"] for row, size in found.items()}
    assert 0.45 < share["selective"] < 0.7 and 0.5 < share["sequence"] < 0.7
    assert 0.15 < share["both"] < 0.21
    assert 0.07 < share["full"] < 0.105


def test_settings_that_the_paper_does_not_have() -> None:
    s, b, h, n = 64, 2, 96, 4
    sbh, matrix = s * b * h, n * s * s * b
    assert activation_bytes(s, b, h, n, fused_attention=True) == 34 * sbh
    assert activation_bytes(s, b, h, n, fused_attention=True, hidden_dropout=False) == 32 * sbh
    assert activation_bytes(s, b, h, n, attention_dropout=False) == 34 * sbh + 2 * matrix
    assert activation_bytes(s, b, h, n, width=4) == (16 + 2 + 48) * sbh + 9 * matrix
    assert activation_bytes(s, b, h, n, recompute="full", width=4) == 4 * sbh
    for given in ({"sequence_parallel": True}, {"distribute_saved": True}):
        assert activation_bytes(s, b, h, n, t=2, recompute="full", **given) == sbh  # type: ignore[arg-type]
    assert activation_bytes(s, b, h, n, f=h, projection=2 * h, fused_attention=True) == (10 + 16 + 4) * sbh
