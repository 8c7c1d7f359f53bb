"""Floor 3: config composition and flags, setup, the training loop, evaluation, logging."""
