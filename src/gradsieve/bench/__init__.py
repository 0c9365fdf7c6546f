"""What a training step costs, by every method, side by side in one process."""
