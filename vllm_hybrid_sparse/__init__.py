"""A vLLM attention backend that reads only as much of the KV cache as each decode step needs.

Importing this module imports neither torch nor vllm: vLLM loads the plugin in every one of its processes.
"""

__version__ = "0.1.0"
