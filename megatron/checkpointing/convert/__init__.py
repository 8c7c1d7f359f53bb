"""Checkpoints of other programs become ours: Hugging Face's GPT-2 and BERT, Megatron-LM's classic ones; and back."""

from megatron.checkpointing.convert.hugging_face import from_hugging_face, refuse_model, to_hugging_face
from megatron.checkpointing.convert.megatron_lm import Told, from_classic
from megatron.checkpointing.convert.models import ModelKind
from megatron.checkpointing.convert.native import from_native, native_logits, refuse_checkpoints, to_native
from megatron.checkpointing.convert.reference import classic_gpt, hugging_face_gpt
from megatron.checkpointing.convert.reference_bert import classic_bert, hugging_face_bert_model
from megatron.checkpointing.convert.transfer import Transfer

__all__ = [
    "ModelKind",
    "Told",
    "Transfer",
    "classic_bert",
    "classic_gpt",
    "from_classic",
    "from_hugging_face",
    "from_native",
    "hugging_face_bert_model",
    "hugging_face_gpt",
    "native_logits",
    "refuse_checkpoints",
    "refuse_model",
    "to_hugging_face",
    "to_native",
]
