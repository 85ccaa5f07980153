"""Commands for people: what a user runs beside `vllm serve`."""
