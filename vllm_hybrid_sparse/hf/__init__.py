"""Sparse decode attention inside Hugging Face Transformers: the same kernels and settings without a server."""

from vllm_hybrid_sparse.hf.session import DecodeStep, SparseSession

__all__ = ["DecodeStep", "SparseSession"]
