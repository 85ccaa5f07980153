"""Kernels alone, against what the memory of the machine gives."""
