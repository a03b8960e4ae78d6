"""Products in full precision whatever a caller has allowed, and its settings as they were afterwards."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gstep
from gstep.selection.dispatch import MAX_PLAIN_PRODUCTS
from gstep.selection.precision import use_full_precision
from tests.gstep.selection.videos import video

pytestmark = pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="needs torch 2.9")
CUDA, CPU, ALL = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None), torch.backends


def put(target: Any, name: str, value: Any) -> Callable[[], None]:
    return partial(setattr, target, name, value)


SETTINGS: dict[str, list[Callable[[], None]]] = {
    "nothing": [],
    **{name: [partial(torch.set_float32_matmul_precision, name)] for name in ("high", "medium", "highest")},
    "allow_tf32": [put(CUDA, "allow_tf32", True)],
    "GPU": [put(CUDA, "fp32_precision", "tf32")],
    "CPU": [put(CPU, "fp32_precision", "bf16")],
    "both": [put(CUDA, "fp32_precision", "tf32"), put(CPU, "fp32_precision", "tf32")],
    "all": [put(ALL, "fp32_precision", "tf32")],
    "old and new": [partial(torch.set_float32_matmul_precision, "medium"), put(CPU, "fp32_precision", "tf32")],
}


def state() -> list[str]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return [older, CUDA.fp32_precision, CPU.fp32_precision]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    put(ALL, "fp32_precision", "none")()
    torch.set_float32_matmul_precision("highest")
    for target in (CUDA, CPU):
        put(target, "fp32_precision", "none")()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_full_within_and_restored_after(name: str) -> None:
    for change in SETTINGS[name]:
        change()
    before = state()
    for _ in range(2):
        with pytest.raises(KeyError), use_full_precision(), use_full_precision():
            assert set(state()[1:]) <= {"none", "ieee"}
            assert state()[0] == "highest" or name == "old and new"  # torch still tells of no single setting there
            raise KeyError
        assert state() == before
    if name == "all":  # an operator without a setting of its own has none now
        put(ALL, "fp32_precision", "ieee")()
        assert state()[1:] == ["ieee", "ieee"]


def test_threads_leave_the_settings_of_before_the_first() -> None:
    torch.set_float32_matmul_precision("medium")
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    seen: list[list[str]] = []

    def work(place: int) -> None:
        with use_full_precision():
            entered.wait()
            leave[place].wait()
            seen.append(state())

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    for thread, event in zip(threads, leave, strict=True):
        assert state() == ["highest", "ieee", "ieee"]
        event.set()
        thread.join()
    assert seen == [["highest", "ieee", "ieee"]] * 2
    assert state() == ["medium", "tf32", "bf16"]


class Bfloat16Products(TorchFunctionMode):
    """What oneDNN does under "medium" on a CPU with bfloat16: it rounds the factors of float32 matrix products."""

    NAMES = frozenset({"__matmul__", "matmul", "mm", "mv"})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES and CPU.fp32_precision == "bf16":
            args = [a.bfloat16().float() if a.dtype == torch.float32 else a for a in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("hidden", [256, 2048])  # the wide one is sampled lazily
def test_medium_selects_the_same_where_it_means_bfloat16(hidden: int) -> None:
    tokens = video("scenes", 10, 50, hidden).float() * 1.01
    assert (tokens.numel() * 125 > MAX_PLAIN_PRODUCTS) == (hidden > 256)
    expected = gstep.prune(tokens)
    torch.set_float32_matmul_precision("medium")
    with Bfloat16Products():
        assert gstep.prune(tokens) == expected
