"""Puts load on OpenAI-compatible servers and measures what clients see; imports neither torch nor vllm."""
