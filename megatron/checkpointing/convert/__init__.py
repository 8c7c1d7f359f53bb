"""Checkpoints of other programs become ours, and ours theirs: Hugging Face's GPT-2, Megatron-LM's classic folders."""

from megatron.checkpointing.convert.hugging_face import from_hugging_face, to_hugging_face
from megatron.checkpointing.convert.megatron_lm import Told, from_classic
from megatron.checkpointing.convert.native import from_native, native_logits, to_native
from megatron.checkpointing.convert.reference import classic_gpt, hugging_face_gpt
from megatron.checkpointing.convert.transfer import Transfer

__all__ = [
    "Told",
    "Transfer",
    "classic_gpt",
    "from_classic",
    "from_hugging_face",
    "from_native",
    "hugging_face_gpt",
    "native_logits",
    "to_hugging_face",
    "to_native",
]
