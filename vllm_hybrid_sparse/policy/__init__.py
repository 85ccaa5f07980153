"""Decisions: values in, values out; no vllm, no torch, no kernels."""
