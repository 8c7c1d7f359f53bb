"""The names that Megatron-LM had before pipelines (1.0), when "model parallel" meant what is now tensor parallel.

`get_model_parallel_group` is not among them: since 2.0 it means tensor and pipeline together, as here. Without a
pipeline the two have the same ranks.
"""

from megatron.mpu.initialize import get_tensor_model_parallel_rank as get_model_parallel_rank
from megatron.mpu.initialize import get_tensor_model_parallel_src_rank as get_model_parallel_src_rank
from megatron.mpu.initialize import get_tensor_model_parallel_world_size as get_model_parallel_world_size
from megatron.mpu.initialize import set_tensor_model_parallel_rank as set_model_parallel_rank
from megatron.mpu.initialize import set_tensor_model_parallel_world_size as set_model_parallel_world_size
from megatron.mpu.mappings import copy_to_tensor_model_parallel_region as copy_to_model_parallel_region
from megatron.mpu.mappings import gather_from_tensor_model_parallel_region as gather_from_model_parallel_region
from megatron.mpu.mappings import reduce_from_tensor_model_parallel_region as reduce_from_model_parallel_region
from megatron.mpu.mappings import scatter_to_tensor_model_parallel_region as scatter_to_model_parallel_region

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "set_model_parallel_rank",
    "set_model_parallel_world_size",
]
