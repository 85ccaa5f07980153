"""A whole batch over the paged KV cache: exact prefill rows, decode rows by policy."""
