"""The choice of FlashAttention 3 for prompts, with a stand-in for its package; no GPU runs here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_parity.engines import config_of
from quire_parity.shapes import shape
from torch import Tensor

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from quire_engine.config import CacheOptions, DeviceOptions, EngineConfig, SchedulerOptions
from quire_engine.runner import device_prompts
from quire_engine.runner.device_prompts import AttentionTimes, choose_prompt_attention, first_faster
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.paged_attention.flash import FlashAttention, find_flash_attention, flash_problem
from quire_kernels.triton_runtime.stand_in import standing_in

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles kernels")

CPU = torch.device("cpu")
SHAPE = shape(windows=(None, 64))
CONFIG = config_of(
    Path("model"), max_model_len=8192, scheduler=SchedulerOptions(max_num_batched_tokens=1024), cache=CacheOptions()
)


@dataclass
class Flash:
    """The library's function. It checks what the real one needs, and returns zeros."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def make(self) -> Callable[..., Tensor]:
        def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]
            q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
            softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
        ) -> Tensor:  # fmt: skip
            assert q.dim() == 3 and k_cache.shape == v_cache.shape and k_cache.shape[2:] == (2, q.shape[2])
            assert k_cache.stride(-1) == v_cache.stride(-1) == 1
            for lengths in (cache_seqlens, page_table, cu_seqlens_q):
                assert lengths.dtype == torch.int32 and lengths.is_contiguous()
            assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == len(page_table) + 1
            assert causal and softmax_scale == q.shape[2] ** -0.5
            self.calls.append({"tokens": len(q), "max_seqlen_q": max_seqlen_q, "window_size": window_size})
            return torch.zeros_like(q)

        return flash_attn_with_kvcache


@pytest.fixture
def flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with standing_in(90):
        yield Flash()


def choose(found: Callable[..., Any] | str, config: EngineConfig = CONFIG, **changes: Any) -> Any:
    dtypes = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16, **changes}
    return choose_prompt_attention(config, SHAPE, CPU, find=lambda: found, **dtypes)


def test_a_library_with_other_results_is_not_used(flash: Flash) -> None:
    """Kernels of ours run nothing here, so that the results differ."""
    choice = choose(flash.make())
    assert choice.attention is None and flash.calls
    assert "quire's attention: FlashAttention 3 failed: its results differ" in choice.line


def test_the_faster_one_is_chosen_by_tokens_and_kept(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_prompts, "largest_error", lambda found, expected: 0.0)
    times = iter([10.0, 9.9, 20.0, 18.0, 80.0, 60.0])
    monkeypatch.setattr(device_prompts, "_time", lambda accelerator, attend: next(times))
    choice = choose(flash.make())
    assert isinstance(choice.attention, FlashAttention) and choice.attention.from_tokens == 256
    assert choice.line.startswith("steps from 256 tokens with a prompt by FlashAttention 3 (µs of quire and ")
    assert [(call["tokens"], call["window_size"]) for call in flash.calls] == [
        (count, window) for count in (64, 256, 1024) for window in ((-1, -1), (63, 0))
    ]
    called = len(flash.calls)
    assert choose(flash.make()).line == choice.line and len(flash.calls) == called  # ``times`` is exhausted


def test_times_of_other_batch_sizes_are_kept(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_prompts, "largest_error", lambda found, expected: 0.0)
    monkeypatch.setattr(device_prompts, "_time", lambda accelerator, attend: 1.0)
    small = replace(CONFIG, scheduler=SchedulerOptions(max_num_batched_tokens=256))
    for config in (CONFIG, small):
        choose(flash.make(), config)
    called = len(flash.calls)
    for config in (CONFIG, small):
        choose(flash.make(), config)
    assert len(flash.calls) == called


@pytest.mark.parametrize(
    ("found", "changes", "words"),
    [
        ("is not installed", {}, "FlashAttention 3 is not installed"),
        (None, {"dtype": torch.float32, "cache_dtype": torch.float32}, "computes in 16 bits"),
        (None, {"cache_dtype": torch.float8_e4m3fn}, "reads float8 caches with float8 queries only"),
        (None, {"config": replace(CONFIG, device=DeviceOptions(deterministic=True))}, "--deterministic excludes"),
    ],
)
def test_what_it_cannot_do_keeps_our_kernels_by_name(
    flash: Flash, found: str | None, changes: dict[str, Any], words: str
) -> None:
    choice = choose(found or flash.make(), **changes)
    assert choice.attention is None and words in choice.line and not flash.calls


@pytest.mark.parametrize(
    ("capability", "head_dim", "words"),
    [((9, 0), 128, None), ((10, 0), 128, "compute capability 9.0"), (None, 128, "9.0"), ((9, 0), 80, None),
     ((9, 0), 264, "up to 256"), ((9, 0), 60, "multiples of 8")],
)  # fmt: skip
def test_gpus_and_heads_it_supports(capability: tuple[int, int] | None, head_dim: int, words: str | None) -> None:
    found = flash_problem(capability=capability, head_dim=head_dim, dtype=torch.float16, cache_dtype=torch.float16)
    assert found is None if words is None else words in str(found)


def test_the_package_is_found_under_either_name() -> None:
    function = Flash().make()

    def load(name: str, *, having: str, module: Any) -> Any:
        if name != having:
            raise ModuleNotFoundError(name)
        if isinstance(module, Exception):
            raise module
        return module

    def find(having: str, module: Any) -> Any:
        return find_flash_attention(lambda name: load(name, having=having, module=module))

    good = SimpleNamespace(flash_attn_with_kvcache=function)
    assert find("flash_attn_interface", good) is find("flash_attn_3.flash_attn_interface", good) is function
    assert find("other", good) == "is not installed"
    assert "has no flash_attn_with_kvcache" in find("flash_attn_interface", SimpleNamespace())
    older = SimpleNamespace(flash_attn_with_kvcache=lambda q, k_cache, v_cache, block_table=None: q)
    assert "does not take cache_seqlens, page_table" in find("flash_attn_interface", older)
    assert "cannot be imported: undefined symbol" in find("flash_attn_interface", ImportError("undefined\nsymbol"))


@pytest.mark.parametrize(
    ("ours", "library", "first"),
    [((9.0, 9.0, 9.0), (1.0, 1.0, 1.0), 64), ((9.0, 9.0, 9.0), (1.0, 9.0, 1.0), 1024), ((9.0,) * 3, (8.9,) * 3, None)],
)
def test_the_library_must_be_faster_from_there_on(
    ours: tuple[float, ...], library: tuple[float, ...], first: int | None
) -> None:
    assert first_faster(AttentionTimes(facts=(), tokens=(64, 256, 1024), ours=ours, library=library)) == first
