"""No request waits for Triton: whatever serving launches, `warm_up` alone has launched in the same form."""

import inspect
from typing import Any

import pytest
import torch
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import native_specialize_impl

from tests.kernels.served_layer import Shape
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.runtime import warm_up as warm_up_module

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:All-NaN"),  # what lies in the store before anything was stored
]

SERVED = Shape(dtype=torch.bfloat16, head_dim=16, block_tokens=32)

Form = tuple[str, tuple[Any, ...]]
"""A kernel's name, and of each of its arguments what the kernel is compiled for."""


def form_of(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Form:
    parameters = inspect.signature(kernel.fn).parameters
    given = {**dict(zip(parameters, args, strict=False)), **named}
    as_they_come = kernel.kwargs.get("do_not_specialize") or ()
    anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    parts: list[Any] = []
    for name, value in given.items():
        if name not in parameters or "constexpr" in str(parameters[name].annotation):
            parts.append((name, value))
        else:
            form = native_specialize_impl(BaseBackend, value, False, name not in as_they_come, name not in anywhere)
            parts.append((name, *form))
    return kernel.fn.__name__, tuple(parts)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Form]:
    """What has been launched so far."""
    forms: set[Form] = set()
    run = InterpretedFunction.run

    def spy(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        forms.add(form_of(kernel, args, named))
        return run(kernel, *args, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(InterpretedFunction, "run", spy)
    monkeypatch.setattr(warm_up_module, "_CANDIDATES", 8)
    return forms


def serve(model: TieredModel) -> None:
    """Prompts in one chunk and in two, beside decode rows and alone; rows that end pages and blocks, and begin them."""
    one, other, third = (model.start() for _ in range(3))
    for request, length in ((one, 23), (other, 110), (third, 33), (one, 40)):
        model.step([(request, length)], decode=False)
    for _ in range(3):
        model.step([(one, 1), (third, 1)], sharpness=3.0)
    model.step([(other, 20), (third, 1)])
    model.step([(other, 1), (one, 1), (third, 1)], sharpness=0.3)


@pytest.mark.parametrize(
    ("policy", "ranking", "resident", "among"),
    [
        ("codes", "device", 0.5, {"_attend_frames_kernel", "_forget_kernel", "_clear_runs_kernel", "_withdraw_kernel"}),
        ("codes", "device", 0.0, {"_store_tokens_kernel", "_look_up_kernel"}),
        ("codes", "host", 0.5, {"_attend_frames_kernel", "_attend_kernel"}),
        ("codes", "host", 0.0, {"_store_tokens_kernel", "_attend_kernel", "_verify_kernel"}),
        ("dense", "device", 0.5, {"_attend_frames_kernel", "_forget_kernel"}),
        ("topk", "host", 0.0, {"_store_tokens_kernel", "_attend_kernel"}),
        ("hgca", None, None, {"_store_tokens_kernel", "_attend_kernel"}),
        ("fluxion", None, None, {"_store_tokens_kernel", "_attend_kernel"}),
    ],
)
def test_nothing_is_compiled_while_serving(
    policy: str, ranking: str | None, resident: float | None, among: set[str], launched: set[Form]
) -> None:
    settings = {**SMALL, **POLICIES.get(policy, {"policy": policy}), "device": "cuda", "device_pool_pages": 128}
    if ranking is not None:
        settings |= {"device_ranking": ranking, "device_resident_share": resident}
    with TieredModel(settings, shape=SERVED, layers=2) as model:
        assert model.layers[0].on_cuda is not None
        model.layers[0].on_cuda.warm_up()
        model.settle()
        warm = set(launched)
        launched.clear()
        with torch.inference_mode():  # as vLLM runs its steps
            serve(model)
        assert {name for name, _ in launched} >= among
        assert launched - warm == set()
