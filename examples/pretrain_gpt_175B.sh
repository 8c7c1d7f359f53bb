#!/usr/bin/env bash
# GPT with 175 billion parameters on 1024 A100s of 80 GB, 128 nodes of 8: GPT-3 (arXiv:2005.14165) in the manner of
# Megatron-LM's second paper (arXiv:2104.04473), tensor parallelism inside a node, a pipeline across nodes.
#
# One command a node, the same on all but for NODE_RANK:
#
#   export DATA_PATH="0.6 /data/web 0.4 /data/books" VOCAB_FILE=/data/vocab.json MERGE_FILE=/data/merges.txt
#   export SAVE=/data/175B
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/pretrain_gpt_175B.sh      # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 bash examples/pretrain_gpt_175B.sh      # on node1, and so on to 127
#
# With Slurm, `sbatch -J gpt-175B --nodes 128 --gpus-per-node 8 examples/pretrain.slurm examples/pretrain_gpt_175B.sh`
# does that. On any machine,
#
#   TOY=1 bash examples/pretrain_gpt_175B.sh        runs it at toy size, on four ranks of the CPU
#   DRY_RUN=1 ...                                   prints the command and runs nothing
#
# and without a GPU or any file of the run
#
#   DRY_RUN=1 bash examples/pretrain_gpt_175B.sh | sed 's/.*pretrain_gpt.py //' |
#     xargs python tools/check_layout.py --world-size 1024
#
# trains a model shrunk from this one on eight ranks and in one process, and compares; with --dry-run behind the last
# word it shows what a rank will hold.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

# --- ranks ------------------------------------------------------------------------------------------------------------
place_ranks gpt-175B 128 8
prepare "$repository"

# Kernels start in the order in which they are queued: a collective of a tensor-parallel layer before the product of
# matrices that is meant to hide it.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# --- the model: 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) = 175e9 parameters ---------------------------------------------
model=(
  --num-layers 96
  --hidden-size 12288
  --num-attention-heads 96
  --seq-length 2048
  --max-position-embeddings 2048
  --attention-dropout 0.1
  --hidden-dropout 0.1
  --init-method-std 0.006 # 0.02 is for smaller models; the spread falls with the width, about as 1/sqrt(3h)
)

# --- where it lies: 8 ranks share a layer, 16 such groups are a pipeline, 8 pipelines are replicas -----------------------
#   --tensor-model-parallel-size 8    All of a node, and no more: its ranks exchange 2 s b h bytes, 50 MB, four times in
#       every layer and micro-batch. NVLink does that; a network between nodes does not.
#   --sequence-parallel               The same bytes, and norms, dropout and residuals on s/8 tokens of each sample.
#   --pipeline-model-parallel-size 16 What is left of the model goes over nodes: 6 layers a rank. A boundary tensor,
#       2 s b h / t bytes, 6.3 MB a rank, is all that neighbours exchange.
#   --num-layers-per-virtual-pipeline-stage 2  Three stages of 2 layers on each rank rather than one of 6: the bubble,
#       (p - 1)/(v m) of the ideal time, is 2.6 % at the full batch of m = 192 micro-batches and not 7.8 %, and 31 % and
#       not 94 % at the first one of 16. It costs three times as many messages and 1.31 times the activations of the
#       first rank. One layer a stage would halve the bubble again, for twice the messages.
#       `python -m megatron.pipeline.show --pp 16 --vpp 3 --microbatches 32` draws it, for a batch that fits a screen.
layout=(
  --tensor-model-parallel-size 8
  --sequence-parallel
  --pipeline-model-parallel-size 16
  --num-layers-per-virtual-pipeline-stage 2
)

# --- memory of a rank of the first stage, which has most: 1.46e9 parameters, micro-batch 1, 80 GB ------------------------
#   parameters, gradients, optimizer      2 + 4 + 12/8 bytes each                       11.0 GB
#   activations                           34 s b h / t a layer, 126 layers in flight    13.5 GB
# in all 25 GB, and what NCCL and the allocator take. 126 layers are the 63 passes through 2 layers, 2 (p - 1) +
# (v - 1) p + 1, that wait for their gradient at the peak; the last rank has 33 and the logits. So nothing is recomputed.
# The published run recomputed every layer (--recompute-granularity full), a third more arithmetic: without
# --sequence-parallel and with the s x s matrices kept, activations take 72.9 GB.
memory=(
  --bf16 # as FP32 in its range: no loss scale to be found, no skipped steps
  --use-distributed-optimizer
)

# --- hiding what the replicas exchange --------------------------------------------------------------------------------
overlap=(
  --overlap-grad-reduce  # the gradients of a stage are reduced once its last micro-batch is through
  --overlap-param-gather # parameters are gathered while the pipeline fills
)

# --- the recipe: that of GPT-3, its tokens divided by 2048 ---------------------------------------------------------------
# Every global batch is a multiple of micro-batch x replicas x stages, 1 x 8 x 16 = 128, which virtual stages need: so
# the ramp-up begins there. (GPT-3 began with 32 thousand tokens, 16 samples, which would leave the pipeline idle.)
recipe=(
  --micro-batch-size 1
  --global-batch-size 1536              # 3.1e6 tokens
  --rampup-batch-size 128 128 5859375   # by 128 samples, eleven times, over the first 12e9 tokens
  --train-samples 146484375             # 300e9 tokens; 3.2e23 operations, 26 days at 45 % of the GPUs' 312 TFLOP/s
  --lr 6e-5
  --min-lr 6e-6
  --lr-decay-style cosine
  --lr-decay-samples 126953125          # 260e9 tokens
  --lr-warmup-samples 183105            # 375e6 tokens
  --adam-beta1 0.9
  --adam-beta2 0.95
  --weight-decay 0.1
  --clip-grad 1.0
)

# --- data, checkpoints, watching --------------------------------------------------------------------------------------
# `python tools/build_index.py` with the flags that DRY_RUN=1 prints and --world-size 1024 makes the sample indices
# before the GPUs are there. A checkpoint is 175e9 parameters of 14 bytes, 2.4 TB, and every 300 iterations is one in
# 2 hours; older ones are yours to delete.
read -r -a data_path <<<"$DATA_PATH"
files=(
  --data-path "${data_path[@]}"
  --split "98,2,0"
  --tokenizer-type GPT2BPETokenizer  # 50,257 entries, padded to 51,200 = 8 x 6,400
  --vocab-file "$VOCAB_FILE"
  --merge-file "$MERGE_FILE"
  --save "$SAVE"
  --load "$SAVE"
  --save-interval 300
  --eval-interval 1000
  --eval-iters 10
  --log-interval 10
  --timing-log-level 1               # where the time goes: the least and the most that any rank computes and waits
  --tensorboard-dir "$SAVE/tensorboard"
)

# --- toy size: the same flags, and then these; two tensor ranks, two stages of two virtual ones --------------------------
toy=()
if is_toy; then
  toy=(
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --make-vocab-size-divisible-by 8
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
    --distributed-backend gloo --num-workers 0
    --global-batch-size 4 --rampup-batch-size 2 2 6
    --train-samples 14 --lr-warmup-samples 2 --lr-decay-samples 14
    --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1
  )
fi

launch torchrun --nproc-per-node "$ranks" "${meet[@]}" "$repository/pretrain_gpt.py" \
  "${layout[@]}" "${model[@]}" "${memory[@]}" "${overlap[@]}" "${recipe[@]}" "${files[@]}" "${toy[@]}" "$@"
