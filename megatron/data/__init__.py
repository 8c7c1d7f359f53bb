"""Data: token files, sample indices, datasets, samplers and loaders. NumPy first; ranks and ids are handed in."""

from megatron.data.batch_sizes import BatchSchedule, RampUp
from megatron.data.bert_build import build_bert_datasets
from megatron.data.bert_config import BertDataConfig
from megatron.data.bert_masking import BertIds
from megatron.data.blend import BlendedDataset
from megatron.data.config import DataConfig
from megatron.data.gpt_build import build_gpt_datasets
from megatron.data.gpt_dataset import HOST_KEYS, GPTDataset
from megatron.data.gpt_indices import GPTIndices, build_gpt_indices
from megatron.data.indexed import IndexedDataset, IndexedWriter, best_dtype
from megatron.data.loader import build_loader
from megatron.data.samplers import GlobalBatchSampler
from megatron.data.splits import parse_split, split_boundaries

__all__ = [
    "HOST_KEYS",
    "BatchSchedule",
    "BertDataConfig",
    "BertIds",
    "BlendedDataset",
    "DataConfig",
    "GPTDataset",
    "GPTIndices",
    "GlobalBatchSampler",
    "IndexedDataset",
    "IndexedWriter",
    "RampUp",
    "best_dtype",
    "build_bert_datasets",
    "build_gpt_datasets",
    "build_gpt_indices",
    "build_loader",
    "parse_split",
    "split_boundaries",
]
