"""Attention of a whole batch over the paged KV cache: prefill rows exactly, decode rows by policy."""
