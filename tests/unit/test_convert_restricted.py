"""Pickles and files of torch.save are read without running anything in them, whatever they ask for."""

import argparse
import builtins
import collections
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing.convert.restricted import Inert, Namespace, read_pickle
from megatron.checkpointing.convert.torch_files import FileTensor, read_torch_file
from tests.harness.classic_files import Layout, write_classic
from tests.unit.test_convert_classic import ARGS, CONFIG, convert, random
from tools import convert_checkpoint


class Calls:
    """Pickles as a call of `function` on `args`, and perhaps a state and items set on the result."""

    def __init__(self, function: Any, *args: Any, more: tuple[Any, ...] = ()) -> None:
        self.reduced = (function, args, *more)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def hostile(marker: Path) -> dict[str, Any]:
    """Objects each of which makes the file `marker` when it is unpickled without care."""
    command = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
    return {
        "system": Calls(os.system, command),
        "popen": Calls(subprocess.Popen, ["touch", str(marker)]),
        "exec": Calls(exec, code),
        "eval": Calls(eval, code),
        "open": Calls(open, str(marker), "w"),
        "getattr": Calls(list, Calls(map, Calls(getattr, Calls(__import__, "os"), "system"), [command])),
        "map": Calls(list, Calls(map, os.system, [command])),
        "state": Calls(argparse.Namespace, more=({"a": Calls(os.system, command)},)),
        "items": Calls(collections.OrderedDict, more=(None, None, iter([("a", Calls(exec, code))]))),
        "argument": Calls(rebuild, Calls(os.system, command), 0, (1,), (1,), False, collections.OrderedDict()),
        "hook": Calls(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (command,), {}),
        "key": {Calls(os.system, command): 1},
    }


NAMES = sorted(hostile(Path("marker")))


def test_the_objects_are_hostile(tmp_path: Path) -> None:
    """Where the usual reader reads them, the marker is made: each by itself, in a process of its own."""
    program = "import pickle, sys\ntry: pickle.load(open(sys.argv[1], 'rb'))\nexcept Exception: pass"
    for name in ("system", "exec", "getattr", "map", "items", "argument"):
        (tmp_path / name).write_bytes(pickle.dumps(hostile(tmp_path / f"{name}.made")[name], protocol=2))
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=True)
        assert (tmp_path / f"{name}.made").exists(), name


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "marker"
    content = pickle.dumps([hostile(marker)[name], "end"], protocol=protocol)
    before = dict(vars(builtins))
    try:
        value = read_pickle(io.BytesIO(content))
    except ValueError:
        pass  # refused
    else:
        assert value[1] == "end"
    assert not marker.exists()
    assert vars(builtins) == before


def test_hostile_files_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    write_classic(tmp_path / "theirs", CONFIG, random(1), Layout(), ARGS)
    path = tmp_path / "theirs/iter_0000007/mp_rank_00/model_optim_rng.pt"
    record = torch.load(path, weights_only=False)
    for number, (name, value) in enumerate(hostile(marker).items()):
        if name == "key":
            continue
        for zipped in (True, False):
            torch.save({**record, "rng": value}, path, _use_new_zipfile_serialization=zipped)
            convert(tmp_path / "theirs", tmp_path / f"ours{number}{zipped}")
            torch.save({**record, "model": value}, path, _use_new_zipfile_serialization=zipped)
            assert convert(tmp_path / "theirs", tmp_path / "none") == 2
        folder = tmp_path / f"hf{number}"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        torch.save({"wte.weight": value}, folder / "pytorch_model.bin")
        asked = ["--from", "hf", "--to", "native", "--load", str(folder), "--save", str(tmp_path / "none")]
        assert convert_checkpoint.main(asked) == 2
    assert not marker.exists()


def test_functions_of_ours_cannot_be_changed() -> None:
    """A pickle that sets the defaults or attributes of what it calls."""
    for state in (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_pickle(io.BytesIO(b"\x80\x02c_codecs\nencode\n" + state + b"b."))


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"garbage", b"\x80\x02" + b"(" * 10000 + b".", b"\x80\x02Pab\n."]
)
def test_what_is_no_pickle_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_pickle(io.BytesIO(content))


# --- what is rebuilt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values(protocol: int) -> None:
    value = {
        "numbers": [1, -2, 2**70, 1.5, True, None],
        "text": ("a", "ä", b"bytes"),
        "ordered": collections.OrderedDict(a=1),
        "size": torch.Size([2, 3]),
        "scalar": np.float64(2.5),
        "args": argparse.Namespace(lr=0.1, dtype=torch.float16),
        "unknown": Path("x"),
    }
    found = read_pickle(io.BytesIO(pickle.dumps(value, protocol=protocol)))
    for name in ("numbers", "text", "ordered", "size", "scalar"):
        assert found[name] == value[name]
    assert isinstance(found["args"], Namespace)
    assert found["args"].values == {"lr": 0.1, "dtype": "torch.float16"}
    assert isinstance(found["unknown"], Inert)
    assert "pathlib" in found["unknown"].name


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.ones((3, 2), ">f4", order="F"), np.array([True, False])]
)
def test_arrays_of_numbers(array: np.ndarray[Any, Any]) -> None:
    found = read_pickle(io.BytesIO(pickle.dumps(array, protocol=2)))
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


def test_an_array_of_objects_stays_empty(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = pickle.dumps(np.array([Calls(os.system, f"touch {marker}")], object), protocol=2)
    assert read_pickle(io.BytesIO(content)).size == 0
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(24.0).view(4, 6)
    marked = torch.nn.Parameter(torch.ones(2))
    marked.mark = 1  # type: ignore[attr-defined]
    value = {
        "whole": base,
        "view": base[1:3, ::2],
        "turned": base.t(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7),
        "marked": marked,
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.half, torch.bool)},
    }
    torch.save(value, tmp_path / "file", _use_new_zipfile_serialization=zipped)
    found = read_torch_file(tmp_path / "file")
    assert found.keys() == value.keys()
    for name, tensor in value.items():
        assert isinstance(found[name], FileTensor)
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(found[name].read(), tensor)


DAMAGED: dict[str, Callable[[Any, Any], Any]] = {
    "a view beyond its storage": lambda rebuild, t: Calls(rebuild, t.storage(), 2, (3,), (1,), False, {}),
    "a giant of one element": lambda rebuild, t: Calls(rebuild, t.storage(), 0, (2**40,), (0,), False, {}),
    "a negative stride": lambda rebuild, t: Calls(rebuild, t.storage(), 3, (3,), (-1,), False, {}),
    "a tensor changed later": lambda rebuild, t: Calls(
        rebuild, t.storage(), 0, (2,), (1,), False, {}, more=({"shape": (2**40,)},)
    ),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("what", DAMAGED)
def test_tensors_that_do_not_fit_their_storage(tmp_path: Path, what: str) -> None:
    rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
    torch.save({"a": DAMAGED[what](rebuild, torch.ones(4))}, tmp_path / "file")
    with pytest.raises(ValueError, match="file: its pickled part cannot be read"):
        read_torch_file(tmp_path / "file")
