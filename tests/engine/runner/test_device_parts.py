"""The parts of the device runner in isolation; on a GPU if there is one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_parity.batches import batch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from quire_engine.core.batch import Admission, Batch, BlockCopies, BlockUpdates, PromptPositions, TokenMasks, mask_bytes
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import DeviceError
from quire_engine.model.layers import ModelInputs
from quire_engine.runner import swap
from quire_engine.runner.accelerator import Accelerator, CpuAccelerator, Mark, make_accelerator
from quire_engine.runner.captured import (
    GraphKey,
    GraphSizes,
    GraphStore,
    default_decode_sizes,
    default_mixed_sizes,
)
from quire_engine.runner.faults import device_faults
from quire_engine.runner.model_runner import ModelRunner, RunnerParts
from quire_engine.runner.staging import ALIGNMENT, HostToDeviceBatch, InputSizes, StepStaging
from quire_engine.runner.swap import StagedSwapper, runs_of
from quire_kernels.kv_cache import KVCache, allocate_kv_cache, allocate_swap_space

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
VOCABULARY = 30


def on_device() -> Accelerator:
    """Return the accelerator of a GPU, or one that stands for it."""
    return make_accelerator(DEVICE) if DEVICE.type == "cuda" else CpuAccelerator(is_device=True)


def make_cache(num_blocks: int, device: torch.device = DEVICE) -> KVCache:
    return allocate_kv_cache(
        num_blocks=num_blocks, block_size=16, kv_heads=2, head_dim=32, dtype=torch.float32, device=device
    )


# --- graphs ---


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (17, (1, 2, 4, 8, 16, 17)),
    ],
)
def test_the_largest_graph_holds_every_decode_batch(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert default_decode_sizes(max_num_seqs) == sizes


@given(st.integers(1, 1024), st.integers(1, 1024))
def test_few_graphs_pad_little(max_num_seqs: int, sequences: int) -> None:
    sizes = default_decode_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_num_seqs and len(sizes) <= 40
    if sequences <= max_num_seqs:
        padded = min(size for size in sizes if size >= sequences)
        assert padded - sequences <= max(8, padded // 5) - 1


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "first", "last", "count"),
    [(16, 16, 16, 1), (64, 64, 64, 1), (100, 64, 100, 3), (1024, 64, 1024, 15), (8192, 64, 1024, 15)],
)
def test_mixed_graphs_have_up_to_1024_tokens(max_num_batched_tokens: int, first: int, last: int, count: int) -> None:
    sizes = default_mixed_sizes(max_num_batched_tokens)
    assert (sizes[0], sizes[-1], len(sizes)) == (first, last, count) and list(sizes) == sorted(set(sizes))


def test_engines_that_verify_drafts_have_small_mixed_graphs() -> None:
    assert default_mixed_sizes(8192, verifies=True) == (2, 4, 8, 12, 16, 24, 32, 48, *default_mixed_sizes(8192))
    assert default_mixed_sizes(10, verifies=True) == (2, 4, 8, 10)


def decode(size: int) -> GraphKey:
    return GraphKey(size, is_mixed=False)


def mixed(size: int) -> GraphKey:
    return GraphKey(size, is_mixed=True)


def test_graphs_are_captured_by_size_and_replayed_by_best_fit() -> None:
    done: list[GraphKey] = []
    sizes = GraphSizes(decode=(1, 4, 6, 99), mixed=(4, 16, 32)).within(sequences=6, tokens=16)
    store = GraphStore(CpuAccelerator(is_device=True), sizes)
    assert store.key_for(sequences=3, tokens=3) is None, "none is captured yet"
    asked: list[GraphKey] = []

    def work_of(key: GraphKey) -> Callable[[], None]:
        asked.append(key)
        return lambda: done.append(key)

    counts: list[int] = []
    store.capture(work_of, lambda: counts.append(len(asked)))
    assert asked == [mixed(16), decode(6), mixed(4), decode(4), decode(1)] and counts == [1, 2, 3, 4, 5]
    assert sizes.largest(2) == GraphSizes(decode=(6,), mixed=(16,))
    found = [store.key_for(sequences=count, tokens=count) for count in (1, 2, 4, 5, 7, 17)]
    assert found == [decode(1), decode(4), decode(4), decode(6), mixed(16), None]
    found = [store.key_for(sequences=1, tokens=count) for count in (2, 5, 17)]
    assert found == [mixed(4), mixed(16), None]
    store.replay(decode(4))
    assert done[-1] == decode(4)
    store.close()
    assert store.key_for(sequences=1, tokens=1) is None


# --- uploads ---


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_every_input_is_aligned_and_transferred_unchanged(tokens: int) -> None:
    largest = InputSizes(tokens=64, sequences=64, logits=64, draws=64)
    staging = StepStaging(on_device(), groups=2, largest=largest)
    sizes = InputSizes(tokens=tokens, sequences=tokens, logits=tokens, draws=tokens)
    for turn in range(3):
        host = staging.begin(sizes)
        columns = [name for name in host.__slots__ if name not in ("slots", "is_feedback")]
        for place, name in enumerate(columns):
            getattr(host, name)[:] = place + turn
        host.is_feedback[:] = turn % 2
        host.slots[0][:], host.slots[1][:] = 100, 200
        staging.upload(sizes)
        device = staging.on_device(sizes)
        for place, name in enumerate(columns):
            column = getattr(device, name)
            assert column.data_ptr() % min(ALIGNMENT, 64) == 0 and (column == place + turn).all()
        assert bool(device.is_feedback.all()) == bool(turn % 2)
        assert [int(slots[0]) for slots in device.slots] == [100, 200]


def test_host_to_device_batch_preserves_each_array() -> None:
    arrays = [
        np.arange(3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.zeros(0, dtype=np.int32),
        np.array([True, False]),
    ]
    transfer = HostToDeviceBatch(on_device())
    items = [transfer.add(array) for array in arrays]
    transfer.send()
    for item, array in zip(items, arrays, strict=True):
        assert item.on_device.device == DEVICE and item.on_device.is_contiguous()
        assert np.array_equal(item.on_device.cpu().numpy(), array)


# --- swap ---


@pytest.mark.parametrize("most_copies", [0, 512], ids=["by a kernel", "by copy engines"])
@pytest.mark.parametrize("staged", [1, 2, 50])
def test_swapped_blocks_are_restored_unchanged(staged: int, most_copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_MOST_COPIES", most_copies)
    layout = KVCacheLayout(
        block_size=16,
        groups=(
            KVCacheGroup(layers=(0, 2), num_blocks=8, num_swap_blocks=9),
            KVCacheGroup(layers=(1,), num_blocks=8, window=16, num_swap_blocks=9),
        ),
    )
    caches = [make_cache(9) for _ in range(3)]
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
    before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
    space = [allocate_swap_space(cache, 9) for cache in caches]
    block_bytes = 4 * sum(part[0].numel() for part in (caches[0].keys, caches[0].values))
    swapper = StagedSwapper(on_device(), layout, caches, space, staging_bytes=2 * 2 * staged * block_bytes)
    out = BlockCopies(sources=[5, 0, 7, 2, 1], targets=[8, 3, 0, 1, 6])
    few = BlockCopies(sources=[4], targets=[2])
    left = swapper.apply(batch(swap_out=(out, few)))
    assert len(left) == -(-5 // min(staged, 9)) + 1 and all(copy.wait() >= 0.0 for copy in left)
    for cache in caches:
        cache.keys.zero_()
        cache.values.zero_()
    # One leaves and another uses its place in the same step.
    caches[0].keys[3] = caches[2].keys[3] = 1.0
    both = batch(
        swap_out=(BlockCopies(sources=[3], targets=[2]), BlockCopies()),
        swap_in=(BlockCopies(sources=[8, 3, 0, 1, 6], targets=[3, 4, 5, 6, 7]), BlockCopies(sources=[2], targets=[0])),
    )
    for copy in swapper.apply(both):
        copy.wait()
    for layer in (0, 2):
        keys, values = before[layer]
        assert torch.equal(caches[layer].keys[3:8], keys[[5, 0, 7, 2, 1]])
        assert torch.equal(caches[layer].values[3:8], values[[5, 0, 7, 2, 1]])
        assert (space[layer].keys[2] == 1.0).all()
    assert torch.equal(caches[1].keys[0], before[1][0][4]) and not caches[1].keys[1:].any()


@pytest.mark.parametrize(
    ("hosts", "runs"),
    [
        ([], []),
        ([4], [(0, 4, 1)]),
        ([0, 1, 2, 3], [(0, 0, 4)]),
        ([0, 2, 3, 7, 8, 9], [(0, 0, 1), (1, 2, 2), (3, 7, 3)]),
    ],
)
def test_adjacent_host_blocks_are_one_run(hosts: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert [(run.staged, run.host, run.count) for run in runs_of(hosts)] == runs


# --- errors of the device ---


def test_out_of_memory_error_names_a_remedy() -> None:
    with (
        pytest.raises(DeviceError, match=r"out of memory while capturing: lower --this \(CUDA out of memory"),
        device_faults("capturing", when_full="lower --this"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has")


@pytest.mark.parametrize(
    "message", ["CUDA error: an illegal memory access was encountered\nmore", "Triton Error [CUDA]: misaligned address"]
)
def test_device_fault_is_reported_in_one_line(message: str) -> None:
    with pytest.raises(DeviceError) as caught, device_faults("running a step", when_full=""):
        raise RuntimeError(message)
    text = str(caught.value)
    assert "the GPU failed while running a step" in text and "QUIRE_KERNELS_CHECK=1" in text and "\n" not in text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "no C compiler: install gcc"),
        (CalledProcessError(1, ["gcc", "main.c"]), r"headers of Python and of the C library \(gcc main.c\)"),
        (OutOfResources(300_000, 232_448, "shared memory"), "Required: 300000, .*QUIRE_KERNEL_CONFIGS"),
    ],
)
def test_kernel_compile_error_is_reported_in_one_line(error: Exception, words: str) -> None:
    with (
        pytest.raises(DeviceError, match=f"Triton could not build a kernel while running a step: .*{words}"),
        device_faults("running a step", when_full=""),
    ):
        raise error


def test_unrelated_runtime_errors_are_not_wrapped() -> None:
    with pytest.raises(RuntimeError, match="ours"), device_faults("running a step", when_full=""):
        raise RuntimeError("ours")


@dataclass(frozen=True, slots=True)
class _LostMark:
    def wait(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class _LostAccelerator(CpuAccelerator):
    def mark(self) -> _LostMark:
        return _LostMark()


def test_a_step_that_failed_on_the_device_gives_no_tokens() -> None:
    runner = make_runner(_LostAccelerator(is_device=True), torch.device("cpu"))
    under_way = runner.execute(two_steps()[0]).sample()
    with pytest.raises(DeviceError, match="running a step of 4 tokens.*illegal memory access"):
        under_way.wait()


# --- never waiting ---


class _Asked(TorchDispatchMode):
    """A mode that rejects operations that wait for a device: reading a number, or a data-dependent shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")), name
        return func(*args, **(kwargs or {}))


@contextmanager
def without_waiting() -> Iterator[None]:
    if DEVICE.type != "cuda":
        with _Asked():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_is_issued_without_waiting_for_the_device() -> None:
    runner = make_runner(on_device(), DEVICE)
    runner.capture_graphs()
    for issue in (nullcontext, without_waiting):  # once to compile
        with issue():
            under_way = [runner.execute(step).sample() for step in two_steps()]
        outputs = [step.wait() for step in under_way]
    assert [len(output.token_ids) for output in outputs] == [2, 2]
    assert outputs[0].logprobs is not None and len(outputs[0].prompt_logprobs[0]) == 2
    assert runner.gpu_seconds > 0.0
    runner.close()


def test_masks_are_applied_on_the_device() -> None:
    runner = make_runner(on_device(), DEVICE)
    first, second = two_steps()
    runner.execute(first).sample().wait()
    bits = (1 << VOCABULARY - 5).to_bytes(mask_bytes(VOCABULARY), "little")
    with without_waiting():
        under_way = runner.execute(second).sample(TokenMasks(places=[1], bits=bits))
    output = under_way.wait()
    assert output.token_ids[1] == VOCABULARY - 5
    # The model's own probabilities are reported, and the mask does not change the other row.
    assert output.logprobs is not None and output.logprobs[0] is None
    assert output.logprobs[1] is not None and output.logprobs[1].logprobs[0] < 0.0
    plain = make_runner(on_device(), DEVICE)
    unmasked = [plain.execute(step).sample().wait() for step in two_steps()][1]
    assert output.token_ids[0] == unmasked.token_ids[0] and unmasked.token_ids[1] != VOCABULARY - 5
    for each in (runner, plain):
        each.close()


class RisingModel:
    """A model whose logits rise with the token id, the more so the later the row."""

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> torch.Tensor:
        return self.logits(self.hidden_states(inputs, caches))

    def hidden_states(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> torch.Tensor:
        return inputs.logits_rows[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, VOCABULARY, device=hidden.device) * hidden


def make_runner(accelerator: Accelerator, device: torch.device) -> ModelRunner:
    return ModelRunner(
        RunnerParts(
            model=RisingModel(),
            caches=(make_cache(9, device),),
            layout=KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=8),)),
            num_heads=4,
            max_rows=2,
            max_tokens=16,
            max_model_len=64,
            accelerator=accelerator,
            graph_sizes=GraphSizes(decode=(1, 2, 8), mixed=(8,)),
        ),
        vocab_size=VOCABULARY,
    )


def two_steps() -> tuple[Batch, Batch]:
    """Return a prompt that asks for everything and one that asks for nothing, then one more token of each."""
    shaped = SamplingParams(
        max_tokens=9, temperature=1.0, top_k=3, presence_penalty=1.0, logprobs=2, logit_bias=((1, 2.0),)
    )
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    first = batch(
        rows=[0, 1],
        num_computed=[0, 0],
        num_scheduled=[3, 1],
        token_ids=[1, 2, 3, 4],
        samples=[True, True],
        admitted=[
            Admission(row=row, prompt_token_ids=prompt, output_token_ids=[], params=params, seed=5, eos_token_ids=())
            for row, prompt, params in ((0, [1, 2, 3], shaped), (1, [4], plain))
        ],
        block_updates=(BlockUpdates(rows=[0, 1], positions=[0, 0], blocks=[3, 4]),),
        prompt_logprobs=[PromptPositions(index=0, first=0, next_token_ids=[2, 3], num_logprobs=1)],
    )
    second = batch(
        step=2,
        rows=[1, 0],
        num_computed=[1, 3],
        num_scheduled=[1, 1],
        token_ids=[0, 0],
        samples=[True, True],
        feedback_tokens=[0, 1],
    )
    return first, second
