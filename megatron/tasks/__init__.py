"""Floor 4: what is done with a trained model. Here: generating text."""
