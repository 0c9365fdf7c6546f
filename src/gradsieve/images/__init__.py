"""Image classification: data, models, the training loop."""
