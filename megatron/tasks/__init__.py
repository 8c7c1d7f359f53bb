"""Floor 4: what is done with a trained model: fine-tuning on RACE and GLUE, and generating text."""
