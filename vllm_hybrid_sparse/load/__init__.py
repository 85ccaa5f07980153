"""Load on OpenAI-compatible servers and what their clients see of it; imports neither torch nor vllm."""
