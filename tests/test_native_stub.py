"""The type stub of the native module says what the module has."""

import ast
from pathlib import Path

from nanobind.stubgen import StubGen

import vllm_hybrid_sparse
from vllm_hybrid_sparse import _native

STUB = Path(vllm_hybrid_sparse.__file__).with_name("_native.pyi")


def test_stub_equals_what_nanobind_generates() -> None:
    generator = StubGen(_native)
    generator.put(_native)
    command = f"python -m nanobind.stubgen -m vllm_hybrid_sparse._native -o {STUB.parent.name}/{STUB.name}"
    assert ast.dump(ast.parse(STUB.read_text(encoding="utf-8"))) == ast.dump(ast.parse(generator.get())), command
