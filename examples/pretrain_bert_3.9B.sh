#!/usr/bin/env bash
# BERT with 3.9 billion parameters on 512 V100s, 32 nodes of 16: the largest of the first paper (arXiv:1909.08053).
#
# One command a node, the same on all but for NODE_RANK:
#
#   export DATA_PATH=/data/corpus_text_sentence VOCAB_FILE=/data/vocab.txt SAVE=/data/bert-3.9B
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/pretrain_bert_3.9B.sh      # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 bash examples/pretrain_bert_3.9B.sh      # on node1, and so on to 31
#
# With Slurm, `sbatch -J bert-3.9B --nodes 32 --gpus-per-node 16 examples/pretrain.slurm examples/pretrain_bert_3.9B.sh`
# does that. TOY=1 runs it at toy size, on four ranks of the CPU; DRY_RUN=1 prints the command and runs nothing.
#
# The recipe is in examples/pretraining_bert.sh, how ranks meet in examples/pretraining.sh. On a V100 install PyTorch
# 2.9 or 2.10 (`pip install "torch<2.11"`): later wheels no longer hold kernels for it.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining_bert.sh"

place_ranks bert-3.9B 32 16 # 64 nodes of 8 do as well: NNODES=64 GPUS_PER_NODE=8
prepare "$repository"
# Kernels start in the order in which they are queued: an all-reduce before the product of matrices that hides it.
export CUDA_DEVICE_MAX_CONNECTIONS=1

# --- the model: heads of 64 values, as in all three ------------------------------------------------------------------
# The norms stand before attention and MLP, with one at the end (--norm-position pre, the default): in the order of the
# original BERT, after the residual sum, models beyond BERT-Large did not train (the paper's figure 7).
model=(
  --num-layers 48
  --hidden-size 2560
  --num-attention-heads 40
)

# --- where it lies: 8 ranks share a layer, 64 replicas of that --------------------------------------------------------
# A node of 16 holds two replicas. 40 heads are 5 a rank; 16 ranks would not divide them.
layout=(
  --tensor-model-parallel-size 8
)
toy_layout=(--tensor-model-parallel-size 2)

# --- memory of a rank: 0.50e9 parameters, micro-batch 8 ---------------------------------------------------------------
#   parameters, gradients, optimizer      2 + 2 + 12/64 bytes each                       2.1 GB
#   activations                           48 x s b h (10 + 24/t)                         6.5 GB
#   logits and their gradients            4 s b V/t bytes, a few times                   0.3 GB
# in all 9 GB: it fits a V100 of 16 GB, and nothing needs to be recomputed. A replica's 16 samples are two micro-batches,
# and gradients are reduced while the second goes backwards.
memory=(
  --fp16 # a V100 has no BF16; for GPUs from Ampere on, --bf16 and an own --micro-batch-size in its place
  --micro-batch-size 8
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
)

# --- how long ---------------------------------------------------------------------------------------------------------
# The published one was trained for 1.5 million iterations, on a schedule of 2 million. They are 1.9e22 operations: at
# 40 TFLOP/s a GPU 0.61 s an iteration, 10.6 days.
iterations=1500000

pretrain_bert "$@"
