"""Hugging Face's folders (config.json and model.safetensors) as a `Transfer`, and a `Transfer` as one.

Those of a GPT-2 are here, those of a BERT in `hugging_face_bert`.
"""

import dataclasses
import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.base.files import atomic_write, new_folder
from megatron.checkpointing.convert import hugging_face_bert
from megatron.checkpointing.convert.deferred import Readable, same_values
from megatron.checkpointing.convert.gpt import hugging_face_entries
from megatron.checkpointing.convert.kinds import check_matrices, check_tensors, transformer_config
from megatron.checkpointing.convert.mapping import RowOrder, Rows, export_all, import_all
from megatron.checkpointing.convert.megatron_lm import Told, own_defaults, with_padding
from megatron.checkpointing.convert.safetensors_files import read_safetensors, write_safetensors
from megatron.checkpointing.convert.torch_files import read_torch_file
from megatron.checkpointing.convert.transfer import Transfer, table_of
from megatron.checkpointing.folders import read_whole
from megatron.checkpointing.index import dtype_name
from megatron.model import TransformerConfig

# Of a config or an index of files.
_LARGEST_JSON = 2**26
ORDER: RowOrder = "3nd"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_WORDS, _OUTPUT = "transformer.wte.weight", "lm_head.weight"
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
}
# Masks that older versions stored with the weights.
_MASK = re.compile(r"transformer\.h\.[0-9]+\.attn\.(bias|masked_bias)")
# What a GPT-2 of theirs may ask for and ours does not do, with the value at which it does nothing.
_NOT_HERE = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def from_hugging_face(directory: Path, told: Told) -> Transfer:
    """The GPT-2 or BERT in a folder.

    Raises ValueError where it is not whole, is another model or has tensors that there is no place for.
    """
    saved = _read_json(directory / CONFIG)
    if saved.get("model_type") == "bert":
        read, _ = read_weights(directory, hugging_face_bert.PREFIXES)
        return hugging_face_bert.from_bert(directory / CONFIG, saved, read, told)
    if saved.get("model_type") != "gpt2":
        kind = reprlib.repr(saved.get("model_type"))
        raise ValueError(f"{directory / CONFIG}: model_type {kind}; gpt2 and bert are read here")
    weights, notes = read_weights(directory)
    if _WORDS not in weights:
        raise ValueError(f"{directory}: it has no {_WORDS}")
    untied = _is_untied(saved, weights)
    if not untied:
        weights.pop(_OUTPUT, None)
    config = _our_config(directory, saved, told, untied, len(weights))
    there = weights[_WORDS].shape[0]
    vocab_size = told.vocab_size or min(told.tokenizer_size or there, there)
    config = with_padding(config, told, vocab_size, there)
    rows = Rows(ORDER, config.head_size, config.vocabulary_rows(vocab_size))
    if (told.tokenizer_size or 0) > vocab_size:
        notes.append(f"the tokenizer has {told.tokenizer_size} ids, and the model {vocab_size}")
    entries = list(hugging_face_entries(config))
    pieces = {name: [tensor] for name, tensor in weights.items()}
    tensors = import_all(entries, pieces, rows)
    sections = {"model": dataclasses.asdict(config)}
    return Transfer(config, vocab_size, tensors, sections=sections, table=table_of(entries, pieces, rows), notes=notes)


def _read_json(path: Path) -> dict[str, Any]:
    text = read_whole(path, _LARGEST_JSON)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: it must be a JSON object")
    return content


def read_weights(
    directory: Path, prefixes: tuple[str, ...] = ("transformer.", "lm_head.")
) -> tuple[dict[str, Readable], list[str]]:
    """Every tensor by the name that the model with all heads gives it, and sentences about what is left out.

    Names begin with one of the `prefixes`, the first of which a model without heads leaves out.
    """
    found: dict[str, Readable] = {}
    for path in _files(directory):
        for name, tensor in _tensors(path).items():
            whole = name if name.startswith(prefixes) else prefixes[0] + name
            if whole in found:
                raise ValueError(f"{path}: {name} is in another file already")
            found[whole] = tensor
    masks = [name for name in found if _MASK.fullmatch(name)]
    notes = [f"{len(masks)} causal masks are left out, they are no weights"] if masks else []
    weights = {name: tensor for name, tensor in found.items() if name not in masks}
    check_matrices(weights)
    return weights, notes


def _files(directory: Path) -> list[Path]:
    """The files of the weights: one, or those that an index lists, safetensors before pickled ones."""
    for name in (WEIGHTS, "pytorch_model.bin"):
        if (directory / name).is_file():
            return [directory / name]
        if (directory / f"{name}.index.json").is_file():
            parts = _read_json(directory / f"{name}.index.json").get("weight_map")
            if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
                raise ValueError(f"{directory / name}.index.json: weight_map must give a file for each tensor")
            return [directory / Path(part).name for part in sorted(set(parts.values()))]
    raise ValueError(f"{directory}: there is no {WEIGHTS} in it, nor an index of several files")


def _tensors(path: Path) -> Mapping[str, Readable]:
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing")
    content = read_safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    try:
        check_tensors(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return content


def _is_untied(saved: Mapping[str, Any], weights: Mapping[str, Readable]) -> bool:
    """Whether the output projection has a matrix of its own."""
    if not saved.get("tie_word_embeddings", True):
        return True
    if _OUTPUT in weights and not same_values(weights[_OUTPUT], weights[_WORDS]):
        raise ValueError(f"{_OUTPUT} is not {_WORDS}, although the config says that they are tied")
    return False


def _our_config(directory: Path, saved: Mapping[str, Any], told: Told, untied: bool, tensors: int) -> TransformerConfig:
    path = directory / CONFIG
    wrong = [name for name, value in _NOT_HERE.items() if saved.get(name, value) != value]
    if wrong:
        values = ", ".join(f"{name} {reprlib.repr(saved[name])}" for name in wrong)
        raise ValueError(f"{path}: {values}: ours cannot do that")
    activation = saved.get("activation_function", "gelu_new")
    known = isinstance(activation, str) and activation in _ACTIVATIONS
    if not known and told.activation is None:
        raise ValueError(f"{path}: activation_function {reprlib.repr(activation)}; known are {', '.join(_ACTIVATIONS)}")
    try:
        fields = {
            "num_layers": saved["n_layer"],
            "hidden_size": saved["n_embd"],
            "num_attention_heads": saved["n_head"],
            "max_position_embeddings": saved["n_positions"],
            "ffn_hidden_size": saved.get("n_inner"),
            "layernorm_epsilon": saved.get("layer_norm_epsilon", 1e-5),
            "init_method_std": saved.get("initializer_range", 0.02),
            "attention_dropout": saved.get("attn_pdrop", 0.1),
            "hidden_dropout": saved.get("resid_pdrop", 0.1),
            "activation": told.activation or _ACTIVATIONS[activation],
            "untie_embeddings_and_output_weights": untied,
        }
        return own_defaults(transformer_config(fields, tensors))
    except KeyError as error:
        raise ValueError(f"{path}: there is no entry {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_hugging_face(transfer: Transfer, directory: Path, special: Mapping[str, int | None]) -> None:
    """Write `config.json` and `model.safetensors` of such a model; `special` are ids for the config of a GPT-2.

    Raises ValueError where a GPT-2 or BERT of theirs cannot be that model.
    """
    if transfer.kind.is_bert:
        tensors, described = hugging_face_bert.bert_tensors(transfer), hugging_face_bert.bert_config(transfer)
    else:
        tensors, described = _gpt_tensors(transfer), _their_config(transfer, special)
    refuse_model(directory)
    with new_folder(directory):
        try:
            write_safetensors(directory / WEIGHTS, tensors)
            with atomic_write(directory / CONFIG) as stream:
                json.dump(described, stream, indent=2)
        except BaseException:
            (directory / WEIGHTS).unlink(missing_ok=True)
            raise


def refuse_model(directory: Path) -> None:
    """Raise ValueError where there is a model in `directory`."""
    if any((directory / name).exists() for name in (CONFIG, WEIGHTS)):
        raise ValueError(f"--save {directory}: there is a model in it already")


def _gpt_tensors(transfer: Transfer) -> dict[str, Readable]:
    config = transfer.config
    if config.apply_residual_connection_post_layernorm:
        raise ValueError("--apply-residual-connection-post-layernorm: a GPT-2 of Hugging Face has no such residual")
    if config.projection_size != config.hidden_size or config.norm_position != "pre":
        raise ValueError(
            f"--kv-channels {config.head_size} and --norm-position {config.norm_position}: a GPT-2 of Hugging Face has "
            f"heads of hidden size over heads, and pre"
        )
    rows = Rows(ORDER, config.head_size, transfer.vocab_size)
    return export_all(hugging_face_entries(config), transfer.weights, rows)


def _their_config(transfer: Transfer, special: Mapping[str, int | None]) -> dict[str, Any]:
    config = transfer.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": {"gelu_tanh": "gelu_new", "gelu_erf": "gelu"}[config.activation],
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "initializer_range": config.init_method_std,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_layer": config.num_layers,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": dtype_name(transfer.dtype),
        "vocab_size": config.vocabulary_rows(transfer.vocab_size),
        **special,
    }
