"""Data: token files, sample indices, datasets, samplers and loaders. NumPy first; ranks and ids are handed in."""
