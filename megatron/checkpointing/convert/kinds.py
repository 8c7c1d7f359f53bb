"""Refuses what is not of the kind that its reader expects, by name, before anything is made of it."""

import dataclasses
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.base.compose import make_section
from megatron.checkpointing.convert.deferred import Readable
from megatron.checkpointing.convert.restricted import Inert, Namespace
from megatron.checkpointing.convert.safetensors_files import StoredArray
from megatron.checkpointing.convert.torch_files import FileTensor
from megatron.checkpointing.untrusted import shown
from megatron.model import TransformerConfig

# More than any size or count of a model or a run.
_LARGEST_SIZE = 2**24
_LARGEST_COUNT = 2**60
_COUNTS = ("iteration", "total_iters")
_SIZE_FLAGS = (
    *("num_layers", "num_attention_heads", "kv_channels", "make_vocab_size_divisible_by", "padded_vocab_size"),
    *("global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size"),
)
_WHOLE = re.compile(r"[0-9]{1,18}")  # a number that is kept as text
_NUMBER_FLAGS = ("layernorm_epsilon", "attention_dropout", "hidden_dropout", "init_method_std")


def check_record(record: Any) -> None:
    """Raise ValueError where an entry of a classic file, or one of its flags, is not of the kind that is read."""
    _expect(record, dict, "it", "a dict")
    for name in _COUNTS:
        _expect_count(record, name, _LARGEST_COUNT)
    _expect_number(record, "checkpoint_version")
    if isinstance(record.get("lr_scheduler"), dict):
        _expect_count(record["lr_scheduler"], "num_steps", _LARGEST_COUNT)
    _check_flags(record.get("args"))


def _check_flags(args: Any) -> None:
    if args is None:
        return
    _expect(args, Namespace, "args", "a Namespace")
    _expect_count(args.values, "consumed_train_samples", _LARGEST_COUNT)
    for name in _SIZE_FLAGS:
        _expect_count(args.values, name, _LARGEST_SIZE)
    for name in _NUMBER_FLAGS:
        _expect_number(args.values, name)
    for number in _expect(args.values.get("rampup_batch_size") or [], list | tuple, "rampup_batch_size", "a list"):
        if type(number) is not int and not (isinstance(number, str) and _WHOLE.fullmatch(number)):
            raise ValueError(f"rampup_batch_size has {reprlib.repr(number)} where a whole number is expected")


def check_optimizer(saved: Any, masters: Sequence[str], inner: Sequence[str]) -> None:
    """Raise ValueError where something in the state of a classic optimizer is not of the kind that is read.

    `masters` and `inner` are names that master weights, and the optimizer inside of that for 16 bits, may have in it.
    """
    _expect(saved, dict, "it", "a dict")
    _expect(saved.get("grad_scaler") or {}, dict, "grad_scaler", "a dict")
    for name, value in (saved.get("grad_scaler") or {}).items():
        if isinstance(value, FileTensor) and math.prod(value.shape) != 1:
            raise ValueError(f"{name} of the grad_scaler is a tensor of {list(value.shape)}, and must be one number")
    for name in [name for name in masters if name in saved]:
        for group in _list(saved, name):
            _expect(group, list | tuple, name, "a list of lists of tensors")
            for master in group:
                _expect(master, FileTensor, name, "a list of lists of tensors")
    plain = next((_expect(saved[name], dict, name, "a dict") for name in inner if name in saved), saved)
    for group in _list(plain, "param_groups"):
        _expect(group, dict, "param_groups", "a list of dicts")
        for number in _list(group, "params"):
            _expect(number, int, "params", "a list of numbers")
    for number, state in _expect(plain.get("state"), dict, "state", "a dict").items():
        for kind, value in _expect(state, dict, f"state of {number}", "a dict").items():
            _check_state(number, kind, value)


def _check_state(number: Any, kind: Any, value: Any) -> None:
    words = f"{reprlib.repr(kind)} in the state of {reprlib.repr(number)}"
    _expect(kind, str, words, "a name")
    if kind != "step":
        _expect(value, FileTensor, words, "a tensor")
    elif not isinstance(value, FileTensor):
        _expect_count({words: value}, words, _LARGEST_COUNT)
    elif math.prod(value.shape) != 1:
        raise ValueError(f"{words} is a tensor of {list(value.shape)}, and must be one number")


def check_tensors(tensors: Any) -> None:
    """Raise ValueError unless they are tensors by name, and nothing else."""
    for name, tensor in _expect(tensors, dict, "it", "a dict of tensors").items():
        if not isinstance(name, str) or shown(name) != name:
            raise ValueError(f"{reprlib.repr(name)} is no name of a tensor")
        _expect(tensor, FileTensor | StoredArray, name, "a tensor")


def check_matrices(tensors: Mapping[str, Readable]) -> None:
    """Raise ValueError naming a tensor that is neither a vector nor a matrix."""
    for name, tensor in tensors.items():
        if len(tensor.shape) not in (1, 2):
            raise ValueError(f"{name} is {list(tensor.shape)}: it must be a vector or a matrix")


def transformer_config(values: Mapping[str, Any], most_layers: int) -> TransformerConfig:
    """The config with these fields, which a file says. ValueError for wrong kinds and sizes that no model has."""
    for field in dataclasses.fields(TransformerConfig):
        value = values.get(field.name, field.default)
        if value is dataclasses.MISSING:
            raise ValueError(f"it does not say {field.name}")
        wanted: Any = float | int if field.type is float else field.type
        if not isinstance(value, wanted) or (isinstance(value, bool) and field.type is not bool):
            raise ValueError(f"{field.name} is {reprlib.repr(value)}, and must be {wanted}")
        if isinstance(value, int) and value > _LARGEST_SIZE:
            raise ValueError(f"{field.name} {reprlib.repr(value)} is more than {_LARGEST_SIZE}")
    if values["num_layers"] > most_layers:
        raise ValueError(f"num_layers {values['num_layers']} is more than there are tensors for")
    return make_section(TransformerConfig, values)


def _expect(value: Any, kind: Any, name: str, words: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        found = value if isinstance(value, Inert) else type(value).__name__
        raise ValueError(f"{name} is {reprlib.repr(found)} where {words} is expected")
    return value


def _list(values: Mapping[str, Any], name: str) -> Any:
    return _expect(values.get(name), list | tuple, name, "a list")


def _expect_count(values: Mapping[str, Any], name: str, most: int) -> None:
    value = values.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise ValueError(f"{name} is {reprlib.repr(value)} where a whole number up to {most} is expected")


def _expect_number(values: Mapping[str, Any], name: str) -> None:
    value = values.get(name)
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError(f"{name} is {reprlib.repr(value)} where a number is expected")
