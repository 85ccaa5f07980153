"""Kernels alone, compared with what the machine's memory can deliver."""
