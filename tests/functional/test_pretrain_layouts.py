"""The same tiny GPT trained at several layouts, micro-batch sizes and dropouts: what must agree does."""

import numpy as np
import pytest
import torch

from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, flags, run_pretrain, write_documents

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # (tensor, data)


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def run(ranks: Ranks, layout: tuple[int, int], words: list[str]) -> list[Outcome]:
    tensor, data = layout
    return ranks(tensor * data, run_pretrain, [*words, "--tensor-model-parallel-size", str(tensor)])


def test_loss_curves_agree_at_every_layout(ranks: Ranks, data_path: str) -> None:
    curves = {layout: run(ranks, layout, flags(data_path, micro_batch_size=4))[0] for layout in LAYOUTS}
    serial = curves[1, 1]
    assert serial.series("loss")[-1] < 0.97 * serial.series("loss")[0]
    for layout, outcome in curves.items():
        difference = np.array(outcome.series("loss")) / np.array(serial.series("loss")) - 1
        assert np.abs(difference).max() <= 1e-5, f"layout {layout}"
        assert_close(outcome.series("grad-norm"), serial.series("grad-norm"), 1e-4)
        assert_close([e["loss"] for e in outcome.evaluations], [e["loss"] for e in serial.evaluations], 1e-5)
        assert [e["iteration"] for e in outcome.evaluations] == [10, 20]


def test_initial_weights_are_bit_equal_at_every_layout(ranks: Ranks, data_path: str) -> None:
    words = flags(data_path, train_iters=0, eval_iters=0, lr_warmup_iters=0)
    serial = assemble(run(ranks, (1, 1), words))
    assert serial["embedding.word_embeddings.weight"].std() > 0.01
    for layout in LAYOUTS[1:]:
        whole = assemble(run(ranks, layout, words))
        assert whole.keys() == serial.keys()
        for name, values in serial.items():
            assert torch.equal(whole[name], values), f"{name} at layout {layout}"


def test_float64_losses_and_final_weights_agree(ranks: Ranks, data_path: str) -> None:
    words = flags(data_path, params_dtype="float64", micro_batch_size=4)
    serial_run = run(ranks, (1, 1), words)
    serial = assemble(serial_run)
    for layout in [(2, 1), (4, 1), (2, 2)]:
        outcomes = run(ranks, layout, words)
        assert_close(outcomes[0].series("loss"), serial_run[0].series("loss"), 1e-9)
        assert_close(assemble(outcomes), serial, 1e-9, floor=1e-3)


def test_micro_batch_size_changes_nothing(ranks: Ranks, data_path: str) -> None:
    """With masked tokens, micro-batches count unequal numbers of tokens."""
    words = flags(data_path, eod_mask_loss=True, params_dtype="float64", train_iters=6)
    runs = {micro: run(ranks, (1, 1), [*words, "--micro-batch-size", str(micro)]) for micro in (1, 2, 8)}
    expected = assemble(runs[8])
    for outcomes in runs.values():
        assert_close(outcomes[0].series("loss"), runs[8][0].series("loss"), 1e-10)
        assert_close(outcomes[0].series("grad-norm"), runs[8][0].series("grad-norm"), 1e-10)
        assert_close(assemble(outcomes), expected, 1e-9, floor=1e-3)


def test_microbatch_normalization_is_the_mean_of_means(ranks: Ranks, data_path: str) -> None:
    """It differs from the mean over tokens where micro-batches count unequal numbers, and only there."""
    words = flags(data_path, eod_mask_loss=True, params_dtype="float64", train_iters=1, eval_iters=0, lr_warmup_iters=0)

    def loss(micro: int, normalization: str) -> float:
        chosen = ["--micro-batch-size", str(micro), "--loss-normalization", normalization]
        return run(ranks, (1, 1), words + chosen)[0].series("loss")[0]

    assert loss(8, "microbatch") == pytest.approx(loss(8, "tokens"), rel=1e-12)
    assert abs(loss(1, "microbatch") / loss(1, "tokens") - 1) > 1e-6


def test_replicated_tensors_stay_bit_equal_with_dropout(ranks: Ranks, data_path: str) -> None:
    words = flags(data_path, attention_dropout=0.1, hidden_dropout=0.1)
    first, second = run(ranks, (2, 1), words)
    split = ("word_embeddings", "query_key_value", "dense_h_to_4h", "dense.weight", "dense_4h_to_h.weight")
    replicated = [name for name in first.local if not any(part in name for part in split)]
    assert "transformer.final_layernorm.weight" in replicated
    assert any(name.endswith("self_attention.dense.bias") for name in replicated)
    for name in replicated:
        np.testing.assert_array_equal(first.local[name], second.local[name], err_msg=name)
    assert any((first.local[name] != second.local[name]).any() for name in first.local if name not in replicated)
