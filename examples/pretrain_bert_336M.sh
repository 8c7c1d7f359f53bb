#!/usr/bin/env bash
# BERT with 336 million parameters, the size of BERT-Large, on 64 V100s, 8 nodes of 8: the first paper's smallest
# (arXiv:1909.08053).
#
# One command a node, the same on all but for NODE_RANK:
#
#   export DATA_PATH=/data/corpus_text_sentence VOCAB_FILE=/data/vocab.txt SAVE=/data/bert-336M
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/pretrain_bert_336M.sh      # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 bash examples/pretrain_bert_336M.sh      # on node1, and so on to 7
#
# or on one node, `NNODES=1 bash examples/pretrain_bert_336M.sh` (GPUS_PER_NODE=1 for one GPU): the same batches, and
# so the same run, only slower. With Slurm, `sbatch -J bert-336M --nodes 8 --gpus-per-node 8 examples/pretrain.slurm
# examples/pretrain_bert_336M.sh`. TOY=1 runs it at toy size, on four ranks of the CPU; DRY_RUN=1 prints the command and
# runs nothing.
#
# The recipe is in examples/pretraining_bert.sh, how ranks meet in examples/pretraining.sh. On a V100 install PyTorch
# 2.9 or 2.10 (`pip install "torch<2.11"`): later wheels no longer hold kernels for it.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining_bert.sh"

place_ranks bert-336M 8 8
prepare "$repository"

# --- the model --------------------------------------------------------------------------------------------------------
model=(
  --num-layers 24
  --hidden-size 1024
  --num-attention-heads 16
)

# --- where it lies: a whole model on every rank -----------------------------------------------------------------------
layout=()
toy_layout=()

# --- memory of a rank: 336e6 parameters, micro-batch 16 ---------------------------------------------------------------
#   parameters, gradients, optimizer      2 + 2 + 12/64 bytes each, 16 on one GPU        1.4 or 5.4 GB
#   activations                           24 x 34 s b h                                  6.8 GB
#   logits of 1,024 tokens at a time      4 V bytes a token, a few times                 0.4 GB
memory=(
  --fp16 # a V100 has no BF16; for GPUs from Ampere on, --bf16
  --micro-batch-size 16 # all of a replica's samples at once
  --cross-entropy-chunk-size 1024
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
)

# --- how long: 2.3e21 operations, at 40 TFLOP/s a GPU 0.44 s an iteration, 10 days ------------------------------------
iterations=2000000

pretrain_bert "$@"
