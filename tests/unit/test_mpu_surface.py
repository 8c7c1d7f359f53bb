"""`megatron.mpu` as users of Megatron-LM 2.5 and 1.0 know it: every name, the order of arguments, imported alone."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import mpu

EXPORTED = [
    "vocab_parallel_cross_entropy",
    "broadcast_data",
    "is_unitialized",
    "destroy_model_parallel",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "set_tensor_model_parallel_rank",
    "get_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "get_tensor_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_tensor_model_parallel_world_size",
    "set_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "set_pipeline_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_rank",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "set_tensor_model_parallel_attributes",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "checkpoint",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "init_checkpointed_activations_memory_buffer",
    "reset_checkpointed_activations_memory_buffer",
    "gather_split_1d_tensor",
    "split_tensor_into_1d_equal_chunks",
    "divide",
    "split_tensor_along_last_dim",
]

OLD = {
    "get_model_parallel_rank": "get_tensor_model_parallel_rank",
    "get_model_parallel_src_rank": "get_tensor_model_parallel_src_rank",
    "get_model_parallel_world_size": "get_tensor_model_parallel_world_size",
    "set_model_parallel_rank": "set_tensor_model_parallel_rank",
    "set_model_parallel_world_size": "set_tensor_model_parallel_world_size",
    "copy_to_model_parallel_region": "copy_to_tensor_model_parallel_region",
    "gather_from_model_parallel_region": "gather_from_tensor_model_parallel_region",
    "reduce_from_model_parallel_region": "reduce_from_tensor_model_parallel_region",
    "scatter_to_model_parallel_region": "scatter_to_tensor_model_parallel_region",
}

LINEAR = ["init_method", "stride", "keep_master_weight_for_test", "skip_bias_add"]
POSITIONAL = {
    mpu.initialize_model_parallel: [
        "tensor_model_parallel_size_",
        "pipeline_model_parallel_size_",
        "virtual_pipeline_model_parallel_size_",
    ],
    mpu.ColumnParallelLinear: ["input_size", "output_size", "bias", "gather_output", *LINEAR],
    mpu.RowParallelLinear: ["input_size", "output_size", "bias", "input_is_parallel", *LINEAR],
    mpu.VocabParallelEmbedding: ["num_embeddings", "embedding_dim", "init_method"],
    mpu.vocab_parallel_cross_entropy: ["vocab_parallel_logits", "target"],
    mpu.parallel_linear: ["x", "weight", "bias"],
    mpu.checkpoint: ["function"],
    mpu.broadcast_data: ["keys", "data", "datatype"],
    mpu.split_tensor_along_last_dim: ["tensor", "num_partitions", "contiguous_split_chunks"],
    mpu.set_tensor_model_parallel_attributes: ["tensor", "is_parallel", "dim", "stride"],
    mpu.copy_tensor_model_parallel_attributes: ["destination_tensor", "source_tensor"],
    mpu.is_pipeline_first_stage: ["ignore_virtual"],
    mpu.is_pipeline_last_stage: ["ignore_virtual"],
    mpu.VocabUtility.vocab_range_from_global_vocab_size: ["global_vocab_size", "rank", "world_size"],
    mpu.VocabUtility.vocab_range_from_per_partition_vocab_size: ["per_partition_vocab_size", "rank", "world_size"],
}


def test_every_name_is_there() -> None:
    assert not [name for name in EXPORTED if not callable(getattr(mpu, name, None))]
    assert not [name for name in (*EXPORTED, *OLD) if name not in mpu.__all__]
    assert mpu.utils.VocabUtility is mpu.VocabUtility
    assert not [name for name in mpu.__all__ if not hasattr(mpu, name)]


def test_old_names_are_the_same_functions() -> None:
    for old, new in OLD.items():
        assert getattr(mpu, old) is getattr(mpu, new)
    assert mpu.get_cuda_rng_tracker is mpu.get_rng_tracker
    assert mpu.model_parallel_cuda_manual_seed is mpu.model_parallel_manual_seed


@pytest.mark.parametrize("function", POSITIONAL, ids=lambda function: function.__name__)
def test_positional_order(function: object) -> None:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[function]


def test_defaults() -> None:
    def defaults(function: object) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.items()  # type: ignore[arg-type]
        return {name: p.default for name, p in parameters if p.default is not p.empty}

    column, row = defaults(mpu.ColumnParallelLinear), defaults(mpu.RowParallelLinear)
    common = {"bias": True, "stride": 1, "keep_master_weight_for_test": False, "skip_bias_add": False}
    assert column.items() >= {**common, "gather_output": True}.items()
    assert row.items() >= {**common, "input_is_parallel": False}.items()
    assert list(defaults(mpu.initialize_model_parallel).values()) == [1, 1, None, None]
    assert defaults(mpu.get_rng_tracker().fork) == {"name": "model-parallel-rng"}


def test_it_loads_nothing_else_of_ours(repository: Path) -> None:
    code = "import sys, megatron.mpu; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'megatron'))"
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    loaded = result.stdout.split()
    assert "megatron.mpu.layers" in loaded
    assert not [m for m in loaded if m != "megatron" and m.split(".")[:2] != ["megatron", "mpu"]]


def test_buffers_that_are_not_needed_any_more_say_so() -> None:
    with pytest.warns(DeprecationWarning, match="init_checkpointed_.* does nothing"):
        mpu.init_checkpointed_activations_memory_buffer()
    with pytest.warns(DeprecationWarning, match="reset_checkpointed_.* does nothing"):
        mpu.reset_checkpointed_activations_memory_buffer()
