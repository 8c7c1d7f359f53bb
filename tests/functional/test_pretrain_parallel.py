"""Tensor, data and sequence parallelism, the sharded optimizer and overlap in all mixtures: the run of one rank."""

import numpy as np
import pytest

from tests.harness.closeness import assert_close
from tests.harness.collectives import Call, CollectiveCounter
from tests.harness.ranks import Ranks
from tests.harness.runs import Outcome, assemble, flags, run_pretrain, write_documents

SP, SHARDED = "--sequence-parallel", "--use-distributed-optimizer"
REDUCE, GATHER = "--overlap-grad-reduce", "--overlap-param-gather"

MIXTURES = [  # (tensor, data, flags)
    (2, 1, [SP]),
    (4, 1, [SP, REDUCE]),
    (1, 2, []),
    (1, 2, [SHARDED]),
    (1, 2, [SHARDED, REDUCE, GATHER]),
    (1, 4, [REDUCE]),
    (1, 4, [SHARDED, GATHER]),
    (2, 2, []),
    (2, 2, [REDUCE]),
    (2, 2, [SP]),
    (2, 2, [SHARDED]),
    (2, 2, [SP, SHARDED, REDUCE]),
    (2, 2, [SP, SHARDED, REDUCE, GATHER]),
]
IN_FLOAT64 = [MIXTURES[1], MIXTURES[6], MIXTURES[12]]

# Several buckets of a few parameters each.
BUCKET = 4000


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def run(ranks: Ranks, data_path: str, tensor: int, data: int, words: list[str], **changes: object) -> list[Outcome]:
    chosen = {"train_iters": 8, "eval_interval": 4, "ddp_bucket_size": BUCKET, "tensor_model_parallel_size": tensor}
    return ranks(tensor * data, run_pretrain, [*flags(data_path, **chosen | changes), *words])


def test_losses_of_every_mixture_are_the_serial_ones(ranks: Ranks, data_path: str) -> None:
    serial = run(ranks, data_path, 1, 1, [])[0]
    assert serial.series("loss")[-1] < 0.99 * serial.series("loss")[0]
    for tensor, data, words in MIXTURES:
        outcome = run(ranks, data_path, tensor, data, words)[0]
        difference = np.array(outcome.series("loss")) / np.array(serial.series("loss")) - 1
        assert np.abs(difference).max() <= 1e-5, (tensor, data, words)
        assert_close(outcome.series("grad-norm"), serial.series("grad-norm"), 1e-4)
        assert_close([e["loss"] for e in outcome.evaluations], [e["loss"] for e in serial.evaluations], 1e-5)


def test_weights_and_moments_in_float64_are_the_serial_ones(ranks: Ranks, data_path: str) -> None:
    wide = {"params_dtype": "float64", "train_iters": 4, "eval_iters": 0}
    serial_run = run(ranks, data_path, 1, 1, [], **wide)
    serial = assemble(serial_run)
    for tensor, data, words in IN_FLOAT64:
        outcomes = run(ranks, data_path, tensor, data, words, **wide)
        assert_close(outcomes[0].series("loss"), serial_run[0].series("loss"), 1e-9)
        assert_close(assemble(outcomes), serial, 1e-9, floor=1e-3)


@pytest.mark.parametrize(
    ("tensor", "data", "extra", "optimizer"),
    [(1, 4, [], "adam"), (2, 2, [SP, "--bf16"], "adam"), (1, 2, [], "sgd")],
)
def test_sharded_and_overlapped_are_bit_equal_to_plain(
    ranks: Ranks, data_path: str, tensor: int, data: int, extra: list[str], optimizer: str
) -> None:
    clip = 0.5
    changes = {"clip_grad": clip, "train_iters": 4, "eval_iters": 0, "optimizer": optimizer, "hidden_dropout": 0.1}
    runs = {
        tuple(words): run(ranks, data_path, tensor, data, [*extra, *words], **changes)
        for words in ([], [REDUCE], [SHARDED], [SHARDED, REDUCE, GATHER])
    }
    plain = runs.pop(())
    weights = assemble(plain)
    assert min(plain[0].series("grad-norm")) > clip  # clipping is at work
    for words, outcomes in runs.items():
        assert outcomes[0].series("loss") == plain[0].series("loss"), words
        assert outcomes[0].series("grad-norm") == plain[0].series("grad-norm"), words
        found = assemble(outcomes)
        assert found.keys() == weights.keys()
        for name, values in weights.items():
            np.testing.assert_array_equal(found[name].numpy(), values.numpy(), err_msg=f"{name} with {words}")
        if SHARDED in words:
            shares = [sum(v.size for n, v in o.local.items() if n.startswith("optimizer.exp_avg.")) for o in outcomes]
            assert optimizer == "sgd" or max(shares) < 0.75 * sum(v.numel() for v in weights.values())


# --- what is sent -----------------------------------------------------------------------------------------------------

LAYERS, HIDDEN, LENGTH, MICRO, FLOAT = 2, 32, 16, 2, 4
LEAVE = 1  # whether any rank has a reason to end the run
VOCABULARY = 104  # 100, padded to a multiple of 8


def counted(rank: int, world_size: int, words: list[str]) -> list[Call]:
    """All collectives of a whole run in which more than one rank takes part, from the start of the training on."""
    with CollectiveCounter() as counter:
        run_pretrain(rank, world_size, words)
    return [call for call in counter.calls if call.group_size > 1]


def of_one_iteration(ranks: Ranks, data_path: str, tensor: int, data: int, words: list[str]) -> dict[str, list[int]]:
    """Kind -> sorted bytes of each collective of one iteration: what a run of two has more than a run of one."""
    calls = []
    for iterations in (1, 2):
        chosen = {"lr_warmup_iters": 0, "tensor_model_parallel_size": tensor, "eval_iters": 0}
        line = [*flags(data_path, train_iters=iterations, **chosen), *words]
        calls.append(ranks(tensor * data, counted, line)[0])
    once, twice = calls
    for call in once:
        twice.remove(call)
    kinds = {call.kind for call in twice}
    return {kind: sorted(call.bytes for call in twice if call.kind == kind) for kind in kinds}


def bucket_bytes(data: int) -> list[int]:
    """Of the bucket of all parameters but the word embedding, and of that."""
    h, f = HIDDEN, 4 * HIDDEN
    layer = [h, h, 3 * h * h, 3 * h, h * h, h, h, h, f * h, f, h * f, h]
    return [padded([*layer * LAYERS, h, h, LENGTH * h], data), padded([VOCABULARY * h], data)]


def padded(sizes: list[int], data: int) -> int:
    """Bytes of a bucket: each parameter begins at a multiple of 64 elements, the whole is one of 64 a data rank."""
    total = sum(-(-size // 64) * 64 for size in sizes)
    return -(-total // (64 * data)) * 64 * data * FLOAT


@pytest.mark.parametrize("overlap", [[], [REDUCE]])
@pytest.mark.parametrize("data", [2, 4])
def test_data_parallel_ranks_send_the_gradients_once(
    ranks: Ranks, data_path: str, data: int, overlap: list[str]
) -> None:
    """One all-reduce a bucket, the tied embedding being one, 16 bytes of the loss, and a byte."""
    sent = of_one_iteration(ranks, data_path, 1, data, overlap)
    assert sent == {"all_reduce": sorted([*bucket_bytes(data), 16, LEAVE])}


@pytest.mark.parametrize("overlap", [[], [REDUCE, GATHER]])
def test_the_sharded_optimizer_scatters_gradients_and_gathers_parameters(
    ranks: Ranks, data_path: str, overlap: list[str]
) -> None:
    """As many bytes as the all-reduce; and a float64 of each rank for the norm."""
    buckets = sorted(bucket_bytes(2))
    assert of_one_iteration(ranks, data_path, 1, 2, [SHARDED, *overlap]) == {
        "reduce_scatter": buckets,
        "all_gather": buckets,
        "all_reduce": [LEAVE, 16, 16],  # the loss and its count; the norm
    }


def test_sequence_parallelism_gathers_and_scatters(ranks: Ranks, data_path: str) -> None:
    """A layer: 2 + 2 forward, 4 + 2 backward; and the embedding, the output layer, the loss, the partial gradients."""
    tokens, micro_batches, t = LENGTH * MICRO, 4, 2
    activation = tokens * HIDDEN * FLOAT
    gathers = LAYERS * (2 + 4) + 1 + 2  # backward of the embedding; the output layer, twice
    scatters = LAYERS * (2 + 2) + 1 + 1
    partial = (LAYERS * 6 + 2 + LENGTH) * HIDDEN * FLOAT  # four of norms and two biases a layer, last norm, positions
    losses = [tokens * FLOAT, 2 * tokens * FLOAT]  # the largest logit; the sum of exponentials and the target's logit
    assert of_one_iteration(ranks, data_path, t, 1, [SP]) == {
        "all_gather": [activation] * gathers * micro_batches,
        "reduce_scatter": [activation] * scatters * micro_batches,
        "all_reduce": sorted([*losses * micro_batches, partial, 8 * t, LEAVE]),
    }
