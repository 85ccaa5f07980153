"""Commands that a user runs in addition to `vllm serve`."""
