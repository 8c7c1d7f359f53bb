"""The tables of a GPT: our names, Megatron-LM's classic ones and those of Hugging Face's GPT-2."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.checkpointing.convert.mapping import Entry
from megatron.model import TransformerConfig

# Of a layer: our stem, which is the classic one too; Hugging Face's; the dimension by which tensor ranks cut the
# weight, and whether they cut the bias.
_LAYER: tuple[tuple[str, str, int | None, bool], ...] = (
    ("input_layernorm", "ln_1", None, False),
    ("self_attention.query_key_value", "attn.c_attn", 0, True),
    ("self_attention.dense", "attn.c_proj", 1, False),
    ("post_attention_layernorm", "ln_2", None, False),
    ("mlp.dense_h_to_4h", "mlp.c_fc", 0, True),
    ("mlp.dense_4h_to_h", "mlp.c_proj", 1, False),
)
_WORDS, _POSITIONS, _OUTPUT = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)


def classic_entries(config: TransformerConfig) -> Iterator[Entry]:
    """Each tensor of a GPT in a classic checkpoint, with the layers numbered through the whole model."""
    yield from vocabulary_entries()
    yield from layer_entries(config)
    if config.untie_embeddings_and_output_weights:
        yield Entry(_OUTPUT, _OUTPUT, split_dim=0, vocabulary=True)


def vocabulary_entries() -> Iterator[Entry]:
    """Word and position embeddings in a classic checkpoint."""
    yield Entry(_WORDS, _WORDS, split_dim=0, vocabulary=True)
    yield Entry(_POSITIONS, _POSITIONS)


def layer_entries(config: TransformerConfig) -> Iterator[Entry]:
    """The tensors of all layers in a classic checkpoint, and of the norm after them."""
    for layer in range(config.num_layers):
        for stem, _, cut, cuts_bias in _LAYER:
            ours, theirs = f"transformer.layers.{layer}.{stem}", f"encoder.layers.{layer}.{stem}"
            fused = stem.endswith("query_key_value")
            yield Entry(f"{ours}.weight", f"{theirs}.weight", cut, fused=fused)
            yield Entry(f"{ours}.bias", f"{theirs}.bias", 0 if cuts_bias else None, fused=fused)
    for kind in ("weight", "bias"):
        yield Entry(f"transformer.final_layernorm.{kind}", f"encoder.final_layernorm.{kind}")


def hugging_face_entries(config: TransformerConfig) -> Iterator[Entry]:
    """Each tensor of `GPT2LMHeadModel`, whose matrices are [input, output]."""
    for entry in classic_entries(config):
        theirs, transposed = hugging_face_name(entry.theirs)
        yield replace(entry, theirs=theirs, transposed=transposed, split_dim=None)


def hugging_face_name(classic: str) -> tuple[str, bool]:
    """What Hugging Face calls a tensor of a classic checkpoint, and whether it is transposed there."""
    whole = {_WORDS: "transformer.wte.weight", _POSITIONS: "transformer.wpe.weight", _OUTPUT: "lm_head.weight"}
    if classic in whole:
        return whole[classic], False
    stem, _, kind = classic.rpartition(".")
    if stem == "encoder.final_layernorm":
        return f"transformer.ln_f.{kind}", False
    _, _, layer, part = stem.split(".", 3)
    name, cut = next((name, cut) for own, name, cut, _ in _LAYER if own == part)
    return f"transformer.h.{layer}.{name}.{kind}", cut is not None and kind == "weight"
