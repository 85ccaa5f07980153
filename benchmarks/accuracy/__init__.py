"""What sparsity costs in answers."""
