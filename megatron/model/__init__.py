"""GPT, BERT and their parts (transformer blocks, embedding, heads), written with the layers of `megatron.mpu`."""

from megatron.model.bert import BertEncoder, BertModel, BertOutput, Encoding, build_bert
from megatron.model.bert_tasks import BertForClassification, BertForMultipleChoice
from megatron.model.cache import CachedRows, KeyValueCache
from megatron.model.chunk import Chunk
from megatron.model.config import TransformerConfig
from megatron.model.gpt import GPTModel, build_gpt
from megatron.model.init import initialize_parameters
from megatron.model.output import gather_logits
from megatron.model.recompute import RecomputeConfig

__all__ = [
    "BertEncoder",
    "BertForClassification",
    "BertForMultipleChoice",
    "BertModel",
    "BertOutput",
    "CachedRows",
    "Chunk",
    "Encoding",
    "GPTModel",
    "KeyValueCache",
    "RecomputeConfig",
    "TransformerConfig",
    "build_bert",
    "build_gpt",
    "gather_logits",
    "initialize_parameters",
]
