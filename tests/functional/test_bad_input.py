"""What a user can get wrong: every mistake is told in a sentence, the exit code is 2, nothing is written."""

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import pretrain_gpt
from megatron.base.complaints import ConfigError
from megatron.data.indexed import IndexedWriter
from megatron.tasks import main
from megatron.tokenizer.null import NullTokenizer
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.failure import user_errors
from megatron.training.loop import pretrain
from tests.harness.runs import complaints, flags, write_documents
from tools import generate_text


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def test_all_complaints_of_a_launch_come_at_once(
    capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path
) -> None:
    words = flags(
        data_path + "x",
        hidden_size=33,
        tensor_model_parallel_size=3,
        clip_grad=-1,
        no_such_flag=5,
        tokenizer_type="GPT2BPETokenizer",
        vocab_file="none.json",
        merge_file="none.txt",
        load=tmp_path,
        save=tmp_path / "saved",
        tensorboard_dir=tmp_path / "board",
        metrics_file=tmp_path / "metrics.jsonl",
    )
    told = "\n".join(complaints(capsys, words))
    for words in (
        "--hidden-size 33: it must be a multiple of --num-attention-heads 4",
        "--tensor-model-parallel-size 3: it must divide the number of ranks, which is 1",
        "--clip-grad -1",
        "--no-such-flag is not known",
        f"--data-path {data_path}x: ",
        "--vocab-file none.json: there is no such file",
        f"--load {tmp_path}: there is no checkpoint",
    ):
        assert words in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": 5}, "--hidden-size 32: it must be a multiple of --num-attention-heads 5"),
        (
            {"tensor_model_parallel_size": 2},
            "--tensor-model-parallel-size 2: it must divide the number of ranks, which is 1",
        ),
        ({"global_batch_size": 7}, "--global-batch-size 7: it must be a multiple of --micro-batch-size 2"),
        ({"seq_length": 17}, "--seq-length 17: it must not be above --max-position-embeddings 16"),
        ({"train_iters": "many"}, "--train-iters many: it must be a whole number"),
        ({"num_layers": None}, "--num-layers is not given"),
        ({"distributed_backend": "mpi"}, "--distributed-backend mpi: accepted are"),
        ({"distributed_backend": "nccl"}, "--distributed-backend nccl: there is no GPU here"),
        ({"data_path": "/no/such/place"}, "--data-path /no/such/place: "),
        ({"data_path": None}, "--data-path"),
        ({"seq_length": 4096, "max_position_embeddings": 4096}, "--seq-length 4096"),
        ({"vocab_size": 50}, "the data holds the token id 99, but the vocabulary has only 50 ids"),
        ({"vocab_size": 99}, "the data holds the token id 99, but the vocabulary has only 99 ids"),
        ({"num_workers": 10**6}, "--num-workers 1000000"),
        ({"seed": 2**32}, "--seed 4294967296"),
        ({"distributed_timeout_minutes": "1e300"}, "--distributed-timeout-minutes 1e+300"),
        ({"clip_grad": "-1e-4"}, "--clip-grad -0.0001"),
        ({"tensorboard_dir": ""}, "--tensorboard-dir"),
        ({"hidden_size": 10**15}, "--hidden-size 1000000000000000: with "),
        ({"max_position_embeddings": 2**60}, "1152921504606846984 rows of embeddings there are 3.7e+19 parameters"),
        ({"num_layers": 10**15}, "--num-layers 1000000000000000: it must be at least 1 and below 1000000"),
        ({"hidden_size": 2**24}, "there is not enough memory for the model ("),
    ],
)
def test_one_mistake(
    capsys: pytest.CaptureFixture[str], data_path: str, changes: dict[str, object], sentence: str
) -> None:
    if changes.get("distributed_backend") == "nccl" and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here, so nccl is no mistake")
    told = complaints(capsys, flags(**{"data_path": data_path} | changes))
    assert len(told) == 1
    assert sentence in told[0]


@pytest.mark.parametrize(("hidden", "heads", "tensor"), [(33, 3, 2), (32, 4, 8)])
def test_heads_must_divide_by_the_tensor_ranks(hidden: int, heads: int, tensor: int) -> None:
    words = flags("data", hidden_size=hidden, num_attention_heads=heads, tensor_model_parallel_size=tensor)
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, words, world_size=tensor, check_inputs=False)
    expected = f"--num-attention-heads {heads}: it must be a multiple of --tensor-model-parallel-size {tensor}"
    assert expected in caught.value.problems


def test_truncated_token_files(capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        for other in (".bin", ".idx"):
            shutil.copy(data_path + other, tmp_path / f"cut{other}")
        file = tmp_path / f"cut{suffix}"
        file.write_bytes(file.read_bytes()[:-3])
        told = complaints(capsys, flags(tmp_path / "cut"))
        assert len(told) == 1
        assert f"cut{suffix}" in told[0]


def test_too_small_a_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "small", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    told = complaints(capsys, flags(tmp_path / "small", split="1,0,0"))
    assert len(told) == 1
    assert "3 tokens" in told[0]


def test_checkpoint_of_a_different_model(capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    pretrain_gpt.main(flags(data_path, train_iters=2, save=saved, lr_warmup_iters=0))
    capsys.readouterr()
    before = sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*"))
    board = tmp_path / "board"
    words = flags(data_path, load=saved, save=saved, num_layers=3, activation="gelu_erf", tensorboard_dir=board)
    told = complaints(capsys, words)
    assert any("--num-layers 3" in line and "2" in line for line in told)
    assert any("--activation gelu_erf" in line for line in told)
    assert sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*")) == before
    assert not board.exists()


def test_checkpoint_of_another_number_format_or_optimizer(
    capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    pretrain_gpt.main(flags(data_path, train_iters=1, save=saved, lr_warmup_iters=0, bf16=True))
    capsys.readouterr()
    told = complaints(capsys, flags(data_path, load=saved, optimizer="sgd", params_dtype="float64"))
    way_out = "; --no-load-optim goes on with a new optimizer"
    assert told == [
        f"--optimizer sgd: the checkpoint in {saved} is of a run with --optimizer adam{way_out}",
        f"--params-dtype float64: the checkpoint in {saved} is of a run with --bf16{way_out}",
    ]


def test_checkpoint_with_momentum_or_without(
    capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path
) -> None:
    words = flags(data_path, train_iters=1, lr_warmup_iters=0, eval_iters=0, optimizer="sgd")
    for saved, loading in ((0.0, 0.5), (0.9, 0.0)):
        folder = tmp_path / str(saved)
        pretrain_gpt.main([*words, "--save", str(folder), "--sgd-momentum", str(saved)])
        capsys.readouterr()
        told = complaints(capsys, [*words, "--load", str(folder), "--sgd-momentum", str(loading)])
        sentence = f"--sgd-momentum {loading}: the checkpoint in {folder} is of a run with --sgd-momentum {saved}"
        assert told == [f"{sentence}; --no-load-optim goes on with a new optimizer"]
    pretrain_gpt.main([*words, "--load", str(tmp_path / "0.9"), "--sgd-momentum", "0.5"])  # the same kind of state


def test_checkpoint_that_is_not_there(capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    told = complaints(capsys, flags(data_path, load=tmp_path / "nothing"))
    assert len(told) == 1
    assert "--load" in told[0]


def test_outputs_that_cannot_be_written(capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for changes in (
        {"save": tmp_path / "file" / "x"},
        {"metrics_file": tmp_path},
        {"tensorboard_dir": tmp_path / "file"},
    ):
        told = complaints(capsys, flags(data_path, **changes))
        assert len(told) == 1
        assert "cannot be written" in told[0]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_that_is_beyond_its_end(capsys: pytest.CaptureFixture[str], data_path: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    pretrain_gpt.main(flags(data_path, train_iters=4, save=saved))
    capsys.readouterr()
    loading = {"load": saved, "override_lr_scheduler": True, "accept_data_change": True}
    told = complaints(capsys, flags(data_path, train_iters=3, **loading))
    assert told == ["--train-iters 3: the checkpoint is of iteration 4 already"]
    told = complaints(capsys, flags(data_path, train_iters=None, train_samples=31, **loading))
    assert told == ["--train-samples 31: the checkpoint has consumed 32 already"]
    metrics = tmp_path / "metrics.jsonl"
    words = flags(data_path, train_iters=6, global_batch_size=2, metrics_file=metrics, **loading)
    told = complaints(capsys, words)
    assert len(told) == 1
    assert "give the batch size of the checkpoint (about 8)" in told[0]
    assert not metrics.exists()


@pytest.mark.parametrize(
    ("program", "asks", "words", "loses"),
    [
        (pretrain_gpt, "train", [], True),
        (main, "finetune", ["--task", "RACE"], True),
        (main, "evaluate", ["--task", "LAMBADA"], False),
        (generate_text, "run", [], False),
    ],
)
def test_ctrl_c_says_what_is_lost_where_something_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: ModuleType,
    asks: str,
    words: list[str],
    loses: bool,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("parse_composed", "parse_request"):
        monkeypatch.setattr(program, name, lambda *_, **__: None, raising=False)
    monkeypatch.setattr(program, asks, interrupt)
    with pytest.raises(SystemExit) as caught:
        program.main(words)
    lost = ": what was done since the last checkpoint is lost" if loses else ""
    assert caught.value.code == 130 and capsys.readouterr().err == f"interrupted{lost}\n"


def test_an_error_of_the_program_keeps_its_traceback(capsys: pytest.CaptureFixture[str], data_path: str) -> None:
    config = parse_composed(RunConfig, flags(data_path), world_size=1)

    def spoilt(model: object, batch: object) -> object:
        one, two = (1, 2, 3)  # type: ignore[misc]
        return one, two

    with pytest.raises(SystemExit) as caught, user_errors():
        pretrain(
            config,
            model_provider=lambda dtype, device: pretrain_gpt.provide_model(config, 100, dtype, device),
            dataset_provider=lambda counts: pretrain_gpt.provide_datasets(config, NullTokenizer(100), counts),
            forward_step=spoilt,  # type: ignore[arg-type]
            vocab_size=100,
        )
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "in spoilt" in error
    assert "too many values to unpack" in error
