# The versions that setup.sh and the images install; sourced.
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0 # the one that vLLM's CPU build is made for
