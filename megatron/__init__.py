"""Megatron: GPT and BERT with intra-layer (tensor) model parallelism. Importing it loads nothing; import the rooms."""
