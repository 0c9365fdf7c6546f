"""What every task shares: recipe, run directory, checkpoint, signature."""
