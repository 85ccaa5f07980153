"""Measurements: kernels alone, serving, and accuracy, all through the shipped code."""
