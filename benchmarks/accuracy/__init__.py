"""What sparsity costs in the quality of answers."""
