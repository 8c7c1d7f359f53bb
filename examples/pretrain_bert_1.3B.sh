#!/usr/bin/env bash
# BERT with 1.3 billion parameters on 64 V100s, 8 nodes of 8: the second of the first paper (arXiv:1909.08053).
#
# One command a node, the same on all but for NODE_RANK:
#
#   export DATA_PATH=/data/corpus_text_sentence VOCAB_FILE=/data/vocab.txt SAVE=/data/bert-1.3B
#   MASTER_ADDR=node0 NODE_RANK=0 bash examples/pretrain_bert_1.3B.sh      # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 bash examples/pretrain_bert_1.3B.sh      # on node1, and so on to 7
#
# With Slurm, `sbatch -J bert-1.3B --nodes 8 --gpus-per-node 8 examples/pretrain.slurm examples/pretrain_bert_1.3B.sh`
# does that. TOY=1 runs it at toy size, on four ranks of the CPU; DRY_RUN=1 prints the command and runs nothing.
#
# The recipe is in examples/pretraining_bert.sh, how ranks meet in examples/pretraining.sh. On a V100 install PyTorch
# 2.9 or 2.10 (`pip install "torch<2.11"`): later wheels no longer hold kernels for it.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/examples/pretraining_bert.sh"

place_ranks bert-1.3B 8 8
prepare "$repository"

# --- the model --------------------------------------------------------------------------------------------------------
model=(
  --num-layers 24
  --hidden-size 2048
  --num-attention-heads 32
)

# --- where it lies: a whole model on every rank, 64 replicas ----------------------------------------------------------
# With its optimizer shared out, a model fits one GPU, and tensor parallelism would only cost. Alone, 16 bytes a
# parameter and the activations fill 27 GB of 32.
layout=()
toy_layout=()

# --- memory of a rank: 1.28e9 parameters, micro-batch 8 ---------------------------------------------------------------
#   parameters, gradients, optimizer      2 + 2 + 12/64 bytes each                       5.4 GB
#   activations                           24 x 34 s b h                                  6.8 GB
#   logits of 1,024 tokens at a time      4 V bytes a token, a few times                 0.4 GB
# A replica's 16 samples are two micro-batches; 2.6 GB of gradients are reduced while the second goes backwards.
memory=(
  --fp16 # a V100 has no BF16; for GPUs from Ampere on, --bf16
  --micro-batch-size 8
  --cross-entropy-chunk-size 1024
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
)

# --- how long: 8.3e21 operations, at 40 TFLOP/s a GPU 1.63 s an iteration, 38 days ------------------------------------
iterations=2000000

pretrain_bert "$@"
