"""Flags of Megatron-LM 2.5 and later that do nothing here: some are accepted with a line, the others are refused."""

from collections.abc import Mapping

_ALWAYS_FLAT = "gradients always lie in contiguous buffers, and --overlap-grad-reduce says when they are reduced"
_BEST_KERNEL = "there is one form of each operation, the fastest that PyTorch has for the device"
_ONE_MODEL = "there is one implementation of the model"
_ALL_TO_TENSORBOARD = "every number of the log line goes to TensorBoard"

# What means nothing here, so that old scripts start: the name, followed by VALUE where the flag takes one, and why.
IGNORED: Mapping[str, str] = {
    "adlr-autoresume": "it belongs to one site's scheduler",
    "adlr-autoresume-interval VALUE": "it belongs to one site's scheduler",
    "use-cpu-initialization": "weights are always drawn on the CPU, equal for every layout",
    "lazy-mpu-init VALUE": "model parallelism is set up when the run starts",
    "DDP-impl VALUE": _ALWAYS_FLAT,
    "use-contiguous-buffers-in-ddp": _ALWAYS_FLAT,
    "use-contiguous-buffers-in-local-ddp": _ALWAYS_FLAT,
    "no-contiguous-buffers-in-local-ddp": _ALWAYS_FLAT,
    "no-async-tensor-model-parallel-allreduce": "the order of the work changes no result",
    "attention-softmax-in-fp32": "the statistics of softmax are always float32",
    "no-query-key-layer-scaling": "scores are never divided by the number of their layer",
    "apply-query-key-layer-scaling": "it changes no result, and the statistics of softmax are always float32",
    "no-masked-softmax-fusion": "--attention-backend says how attention is computed",
    "no-bias-gelu-fusion": _BEST_KERNEL,
    "no-bias-dropout-fusion": _BEST_KERNEL,
    "no-persist-layer-norm": _BEST_KERNEL,
    "cross-entropy-loss-fusion": _BEST_KERNEL,
    "no-gradient-accumulation-fusion": "weight gradients are always added straight into the gradient buffer",
    "empty-unused-memory-level VALUE": "PyTorch keeps the memory that it has, and no result depends on it",
    "no-create-attention-mask-in-dataloader": "the loader makes no masks",
    "mmap-warmup": "token files are mapped, and the system reads ahead by itself",
    "tensorboard-log-interval VALUE": "TensorBoard gets what --log-interval prints",
    "tensorboard-queue-size VALUE": "few numbers are written at a time",
    "log-batch-size-to-tensorboard": _ALL_TO_TENSORBOARD,
    "log-memory-to-tensorboard": _ALL_TO_TENSORBOARD,
    "log-timers-to-tensorboard": f"{_ALL_TO_TENSORBOARD}, and the timers are there with --timing-log-level 1",
    "log-validation-ppl-to-tensorboard": _ALL_TO_TENSORBOARD,
    "no-log-learnig-rate-to-tensorboard": _ALL_TO_TENSORBOARD,  # so spelt there
    "no-log-loss-scale-to-tensorboard": _ALL_TO_TENSORBOARD,
    "use-mcore-models": _ONE_MODEL,
    "use-legacy-models": _ONE_MODEL,
    "transformer-impl VALUE": _ONE_MODEL,
    "use-flash-attn": "--attention-backend fused, the default, is the fastest kernel that PyTorch has for the device",
    "exit-signal-handler": "SIGTERM always saves and ends the run",
    "log-throughput": "the log line always has tokens and TFLOP/s",
}

# What has another name here, and how to ask for it.
RENAMED: Mapping[str, str] = {
    "activations-checkpoint-granularity": "--recompute-granularity",
    "activations-checkpoint-method": "--recompute-granularity full with --recompute-method",
    "activations-checkpoint-num-layers": "--recompute-granularity full with --recompute-num-layers",
    "recompute-activations": "--recompute-granularity selective",
    "norm-epsilon": "--layernorm-epsilon",
    "encoder-seq-length": "--seq-length",
    "warmup": "--lr-warmup-fraction",
    "check-for-nan-in-loss-and-grad": "--check-for-nan-in-loss",
    "no-check-for-nan-in-loss-and-grad": "--no-check-for-nan-in-loss",
    "calculate-per-token-loss": "--loss-normalization tokens",
    "num-virtual-stages-per-pipeline-rank": "--num-layers-per-virtual-pipeline-stage with the layers of one of them",
    "skip-train": "--train-iters with the iteration of the checkpoint",
}

# What other programs of ours have: the name, and the program.
_OF_BERT, _OF_GPT = "pretrain_bert.py", "pretrain_gpt.py"
ELSEWHERE: Mapping[str, str] = {
    "mask-prob": _OF_BERT,
    "short-seq-prob": _OF_BERT,
    "bert-no-binary-head": _OF_BERT,
    "reset-position-ids": _OF_GPT,
    "reset-attention-mask": _OF_GPT,
    "eod-mask-loss": _OF_GPT,
}

# What is not here: a launch script that relies on it must not start.
UNSUPPORTED = frozenset(
    """
    fp32-residual-connection fp16-lm-cross-entropy
    no-save-optim no-save-rng
    openai-gelu onnx-safe init-method-xavier-uniform log-params-norm
    log-num-zeros-in-grad log-world-size-to-tensorboard timing-log-option log-progress log-straggler
    vocab-extra-ids decoder-seq-length retriever-seq-length sample-rate
    pipeline-model-parallel-split-rank pipeline-model-parallel-layout standalone-embedding-stage
    start-weight-decay end-weight-decay weight-decay-incr-style head-lr-mult
    lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters decoupled-lr decoupled-min-lr
    no-initialization exit-on-missing-checkpoint use-checkpoint-args use-mp-args-from-checkpoint-args
    save-retain-interval non-persistent-save-interval
    data-args-path per-split-data-args-path mock-data s3-cache-path
    profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler
    wandb-project wandb-exp-name wandb-save-dir
    deterministic-mode manual-gc manual-gc-interval spec
    position-embedding-type no-position-embedding rotary-base rotary-percent rotary-seq-len-interpolation-factor
    use-rotary-position-embeddings use-rope-scaling
    normalization apply-layernorm-1p qk-layernorm swiglu squared-relu disable-bias-linear add-qkv-bias
    group-query-attention num-query-groups multi-latent-attention
    num-experts expert-model-parallel-size expert-tensor-parallel-size
    moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-grouped-gemm moe-token-dispatcher-type
    context-parallel-size cp-comm-type tp-comm-overlap
    fp8-format fp8-margin fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather
    ckpt-format dist-ckpt-format use-dist-ckpt
    """.split()  # noqa: SIM905 - as a list it would be a page
)
