#!/usr/bin/env bash
# GPT with 8.3 billion parameters on 512 V100s, 32 nodes of 16: the run of Megatron-LM's first paper (arXiv:1909.08053).
#
# One command a node, the same on all but for NODE_RANK:
#
#   export DATA_PATH=/data/webtext_text_document VOCAB_FILE=/data/vocab.json MERGE_FILE=/data/merges.txt SAVE=/data/8.3B
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/pretrain_gpt_8.3B.sh      # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 bash examples/pretrain_gpt_8.3B.sh      # on node1, and so on to 31
#
# With Slurm, `sbatch -J gpt-8.3B --nodes 32 --gpus-per-node 16 examples/pretrain.slurm examples/pretrain_gpt_8.3B.sh`
# does that. On any machine,
#
#   TOY=1 bash examples/pretrain_gpt_8.3B.sh        runs it at toy size, on four ranks of the CPU
#   DRY_RUN=1 ...                                   prints the command and runs nothing
#
# and without a GPU or any file of the run
#
#   DRY_RUN=1 bash examples/pretrain_gpt_8.3B.sh | sed 's/.*pretrain_gpt.py //' |
#     xargs python tools/check_layout.py --world-size 512
#
# trains a model shrunk from this one on eight ranks and in one process, and compares; with --dry-run behind the last
# word it shows what a rank will hold.
#
# What the nodes need: the files named above and SAVE under the same names everywhere (a shared file system), and an
# environment with this repository. A V100 needs PyTorch 2.9 or 2.10 (`pip install "torch<2.11"` first): wheels of later
# versions no longer hold kernels for it, and the first operation ends with "no kernel image is available".
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining.sh"

# --- ranks ------------------------------------------------------------------------------------------------------------
place_ranks gpt-8.3B 32 16 # 64 nodes of 8 do as well: NNODES=64 GPUS_PER_NODE=8
prepare "$repository"

# Kernels start in the order in which they are queued: the all-reduce in the backward pass of a tensor-parallel layer
# before the product of matrices that is meant to hide it.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# --- the model --------------------------------------------------------------------------------------------------------
# 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) = 8.3e9 parameters. The paper's scaling study cuts h into 32 heads; the model
# that was trained has 24, which are of 128 values and were faster (its table 7: 80 against 77 %).
model=(
  --num-layers 72
  --hidden-size 3072
  --num-attention-heads 24
  --seq-length 1024
  --max-position-embeddings 1024
  --attention-dropout 0.1
  --hidden-dropout 0.1
)

# --- where it lies: 8 ranks share a layer, 64 replicas of that --------------------------------------------------------
# A layer's ranks exchange 2 s b h bytes, 50 MB, six times in every layer (four times, and twice for the recomputation)
# and wait for most of it: they must sit behind one NVSwitch. Ranks 0-7 and 8-15 of each node are two replicas. Sixteen
# would fit a node too, but 24 heads do not divide by it and the slices get thin; four would leave a rank 2.1e9
# parameters, 33 GB of them and their optimizer state unless that is sharded.
# There is no --sequence-parallel, as the published run had none. With recomputation it would have less to save, inputs of
# 0.5 GB instead of 3.6, and its price is the same: each layer's backward pass gathers its inputs once more.
layout=(
  --tensor-model-parallel-size 8
)

# --- memory of a rank: 1.04e9 parameters, micro-batch 8, 32 GB --------------------------------------------------------
#   parameters, gradients, optimizer      2 + 2 + 12/64 bytes each                       4.4 GB
#   activations: the input of each layer  72 x 2 s b h                                   3.6 GB
#   the layer that is being recomputed    s b h (10 + 24/t + 5ns/(ht))                   0.5 GB at most
#   logits and their gradients            4 s b V/t bytes, a few times                   0.6 GB
# in all 9 GB, and what NCCL and the allocator take. What each flag does to it:
#   --use-distributed-optimizer  Each of the 64 replicas keeps a 64th of the master weights and moments, 12 bytes a
#       parameter. Gradients are reduce-scattered and parameters all-gathered: as many bytes as the all-reduce that they
#       replace. The published run had all of it on every rank, 16 bytes, 16.7 GB; that fits 32 GB as well (21 GB in
#       all), so the flag may go. It stays because it costs nothing, fits a V100 of 16 GB, and lets 512 ranks write the
#       optimizer state of a checkpoint rather than 8.
#   --recompute-granularity full  Without, the activations are 72 s b h (10 + 24/t) bytes, 23.6 GB with attention that
#       keeps no s x s matrix and 32.6 GB with it. It costs a third more arithmetic: 96 in place of 72 B s l h^2.
#   --recompute-num-layers 1     The input of every layer is kept. A larger number keeps fewer and recomputes more
#       layers at one time; here nothing has to be saved so hard.
# With FP16 gradients are summed in FP16. There is one micro-batch an iteration, so nothing is summed before the ranks'
# own sum; with smaller micro-batches --accumulate-allreduce-grads-in-fp32 keeps the sum in FP32, 2 bytes more.
memory=(
  --fp16 # a V100 has no BF16; the loss scale is found by doubling and halving
  --use-distributed-optimizer
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
)

# --- hiding what the replicas exchange: 2.1 GB of gradients and 2.1 GB of parameters an iteration ---------------------
# Sixteen GPUs share the eight InfiniBand ports of a node. All-reduced after the backward pass, the gradients held the
# published run at 60 % of one GPU's speed; hidden behind it, 76 %.
overlap=(
  --overlap-grad-reduce  # buckets of gradients are reduced while the layers before them are still at work
  --overlap-param-gather # buckets of parameters are gathered while the layers before them are already at work
)

# --- the recipe -------------------------------------------------------------------------------------------------------
recipe=(
  --micro-batch-size 8    # 512 samples over 64 replicas are 8, all at once: the largest products of matrices
  --global-batch-size 512
  --train-iters 300000    # 157e9 tokens; at the published 15.1 PFLOP/s 8.4 days, 2.42 s an iteration
  --lr 1.5e-4
  --lr-warmup-iters 3000
  --lr-decay-style cosine
  --lr-decay-iters 300000
  --min-lr 1e-5
  --weight-decay 0.01
  --clip-grad 1.0
)

# --- data, checkpoints, watching --------------------------------------------------------------------------------------
# `python tools/build_index.py` with the flags that DRY_RUN=1 prints and --world-size 512 makes the sample indices
# before the GPUs are there. A checkpoint is 8.3e9 parameters of 14 bytes, 116 GB, and every 1000 iterations is one in
# 40 minutes; older ones are yours to delete.
read -r -a data_path <<<"$DATA_PATH"
files=(
  --data-path "${data_path[@]}"
  --split "29,1,0"                   # as the paper: one document in thirty is held out
  --tokenizer-type GPT2BPETokenizer  # 50,257 entries, padded to 51,200 = 8 x 6,400
  --vocab-file "$VOCAB_FILE"
  --merge-file "$MERGE_FILE"
  --save "$SAVE"
  --load "$SAVE"
  --save-interval 1000
  --eval-interval 1000
  --eval-iters 10
  --log-interval 10
  --tensorboard-dir "$SAVE/tensorboard"
)

# --- toy size: the same flags, and then these -------------------------------------------------------------------------
toy=()
if is_toy; then
  toy=(
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --make-vocab-size-divisible-by 8
    --tensor-model-parallel-size 2 --distributed-backend gloo --num-workers 0
    --micro-batch-size 2 --global-batch-size 4 --initial-loss-scale 65536
    --train-iters 4 --lr-warmup-iters 1 --lr-decay-iters 4
    --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1
  )
fi

launch torchrun --nproc-per-node "$ranks" "${meet[@]}" "$repository/pretrain_gpt.py" \
  "${layout[@]}" "${model[@]}" "${memory[@]}" "${overlap[@]}" "${recipe[@]}" "${files[@]}" "${toy[@]}" "$@"
