"""The only package that imports vllm: everything that makes this project a vLLM plugin."""
