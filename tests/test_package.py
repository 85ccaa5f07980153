"""What importing the package costs every process of a vLLM that has it installed."""

import subprocess
import sys


def loaded_by(module: str) -> set[str]:
    """Top-level modules in a fresh interpreter that imported `module`."""
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(shown.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    assert not {"torch", "vllm", "numpy"} & loaded_by("vllm_hybrid_sparse")


def test_values_and_config_load_no_torch() -> None:
    assert not {"torch", "vllm"} & loaded_by("vllm_hybrid_sparse.config")


def test_the_command_starts_without_torch() -> None:
    assert not {"torch", "vllm"} & loaded_by("vllm_hybrid_sparse.cli.main")
