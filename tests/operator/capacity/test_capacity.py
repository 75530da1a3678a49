"""Memory per token, weights, and what fits; figures that can be checked by hand or in a model's own files."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import LLAMA_3_8B, LLAMA_7B, config_of
from specs import valid_spec

from quire_common import kv_size
from quire_common.kv_size import CacheLimits, kv_bytes_per_token
from quire_operator.api import Spec
from quire_operator.capacity import fit as capacity
from quire_operator.capacity.fit import Fits, Footprint, TooSmall
from quire_operator.capacity.judge import GPUS, find_gpu

GIB = 2**30


def spec_of(**engine: object) -> Spec:
    return valid_spec(engine=engine)


def spec_on_a_gpu(**engine: object) -> Spec:
    return valid_spec(engine=engine, resources={"limits": {"nvidia.com/gpu": 1}})


@pytest.mark.parametrize(
    ("body", "dtype_bytes", "kibibytes"),
    [(LLAMA_7B, 2, 512), (LLAMA_3_8B, 2, 128), (LLAMA_3_8B, 4, 256), ({**LLAMA_3_8B, "head_dim": 64}, 2, 64)],
)
def test_kv_bytes_per_token_count_kv_heads_and_not_heads(
    body: Mapping[str, object], dtype_bytes: int, kibibytes: int
) -> None:
    config = config_of(body)
    per_token = kv_bytes_per_token(
        layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype_bytes=dtype_bytes
    )
    assert per_token == kibibytes * 1024


def llama_on(gpu: str, **engine: object) -> Fits | TooSmall:
    spec, config = spec_of(**engine), config_of(LLAMA_3_8B)
    needs = capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device="gpu")
    found = find_gpu(gpu)
    assert found is not None
    return capacity.fit(spec, needs, capacity.limits(spec, config), memory_bytes=found.memory_bytes)


def test_llama_3_8b_fits_an_h100_with_55_gib_of_cache() -> None:
    outcome = llama_on("H100", maxModelLength=8192)
    assert isinstance(outcome, Fits)
    assert outcome.kv_cache_bytes / GIB == pytest.approx(55, abs=1.5)
    assert outcome.sequences == outcome.kv_tokens // 8192


def test_too_large_model_names_the_smallest_gpu_that_fits() -> None:
    outcome = llama_on("T4", maxModelLength=8192)
    assert isinstance(outcome, TooSmall)
    assert (outcome.longest_sequence_tokens, outcome.kv_cache_bytes) == (0, 0)
    smallest_that_fits = next(gpu for gpu in GPUS if gpu.memory_bytes >= outcome.needed_bytes)
    found = llama_on(smallest_that_fits.name, maxModelLength=8192)
    assert isinstance(found, Fits) and found.sequences == 3


needs_and_limits = st.builds(
    lambda weights, workspace, swap, groups, length, sequences, tokens, block: (
        Footprint(
            dtype="bfloat16",
            parameters=weights // 2,
            weight_bytes=weights,
            workspace_bytes=workspace,
            swap_bytes=swap,
            kv_groups=groups,
        ),
        CacheLimits(sequence_tokens=length, max_sequences=sequences, max_batched_tokens=tokens, block_size=block),
    ),
    st.integers(1, 10**10),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.dictionaries(st.none() | st.integers(1, 5000), st.integers(1, 10**6), min_size=1, max_size=3),
    st.integers(1, 10**6),
    st.integers(1, 1024),
    st.integers(1, 10**4),
    st.sampled_from([8, 16, 128]),
)


@given(needs_and_limits, st.integers(1, 10**11), st.integers(1, 100))
def test_required_memory_is_exactly_enough(drawn: tuple[Footprint, CacheLimits], memory: int, percent: int) -> None:
    needs, limits = drawn
    spec = spec_of(kvCache={"memoryPercent": percent})
    outcome = capacity.fit(spec, needs, limits, memory_bytes=memory)
    if isinstance(outcome, TooSmall):
        assert outcome.needed_bytes > memory
        assert isinstance(capacity.fit(spec, needs, limits, memory_bytes=outcome.needed_bytes), Fits)
        assert isinstance(capacity.fit(spec, needs, limits, memory_bytes=outcome.needed_bytes - 1), TooSmall)
        assert 0 <= outcome.longest_sequence_tokens <= limits.sequence_tokens
    else:
        assert 1 <= outcome.sequences <= limits.max_sequences
        assert needs.base_bytes + outcome.kv_cache_bytes <= memory
        useful = capacity.useful_kv_cache_bytes(outcome, needs, limits)
        assert useful <= outcome.kv_cache_bytes
        # As many sequences fit into the useful size as into all available memory.
        assert kv_size.capacity(useful, needs.cache_groups(limits), limits)[1] == outcome.sequences
        if set(needs.kv_groups) == {None}:
            slots = limits.sequence_blocks * limits.block_size
            assert outcome.sequences * slots <= outcome.kv_tokens
            assert outcome.kv_tokens * needs.kv_bytes_per_token <= outcome.kv_cache_bytes
            assert slots * needs.kv_bytes_per_token <= useful


@given(needs_and_limits, st.integers(1, 10**11))
def test_shorter_sequences_fit_where_longer_ones_do(drawn: tuple[Footprint, CacheLimits], memory: int) -> None:
    needs, limits = drawn
    outcome = capacity.fit(spec_of(), needs, limits, memory_bytes=memory)
    if isinstance(outcome, TooSmall) and outcome.longest_sequence_tokens:
        shorter = replace(limits, sequence_tokens=outcome.longest_sequence_tokens)
        assert isinstance(capacity.fit(spec_of(), needs, shorter, memory_bytes=memory), Fits)


def test_sliding_windows_leave_memory_to_full_attention() -> None:
    """Gemma 3 4B's shape: five of six layers have windows of 1,024 tokens."""
    body = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "vocab_size": 262208,
    }
    outcomes = []
    for shape in (body, {**body, "layer_types": ["full_attention"] * 34}):
        config = config_of(shape)
        spec = spec_of(maxModelLength=32768, maxSequences=8)
        needs = capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device="gpu")
        outcome = capacity.fit(spec, needs, capacity.limits(spec, config), memory_bytes=24 * GIB)
        assert isinstance(outcome, Fits)
        outcomes.append((outcome.sequences, outcome.kv_tokens))
    (windowed, tokens), (full, full_tokens) = outcomes
    assert (windowed, full) == (8, 2)
    assert tokens > 4 * full_tokens


def test_fp8_kv_cache_is_half_of_sixteen_bits() -> None:
    config = config_of(LLAMA_3_8B)
    plain, fp8 = (
        capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device="gpu")
        for spec in (spec_of(), spec_on_a_gpu(extraArgs=["--kv-cache-dtype", "fp8"]))
    )
    assert (plain.kv_dtype, plain.kv_width, fp8.kv_dtype, fp8.kv_width) == ("bfloat16", 2, "fp8", 1)
    assert fp8.kv_bytes_per_token * 2 == plain.kv_bytes_per_token == 128 * 1024
    assert fp8.base_bytes == plain.base_bytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("quantization", "device", "spec_on"), [("int8", "cpu", spec_of), ("fp8", "gpu", spec_on_a_gpu)]
)
def test_quantized_weights_take_a_byte_except_embeddings(
    quantization: str, device: capacity.Device, spec_on: Callable[..., Spec], tied: bool
) -> None:
    config = config_of({**LLAMA_3_8B, "tie_word_embeddings": tied})
    table, parameters = config.vocab_size * config.hidden_size, config.parameters
    plain, quantized = (
        capacity.footprint(spec, config, parameters=parameters, dtype="bfloat16", device=device)
        for spec in (spec_on(), spec_on(extraArgs=["--quantization", quantization]))
    )
    assert (plain.weight_bytes, plain.weight_dtype) == (2 * parameters, "bfloat16")
    assert (quantized.weight_bytes, quantized.weight_dtype) == (parameters + (2 if tied else 1) * table, quantization)
    assert quantized.kv_bytes_per_token == plain.kv_bytes_per_token


def test_swap_space_reduces_host_memory_and_no_gpu_memory() -> None:
    config = config_of(LLAMA_3_8B)
    spec = spec_of(swapSpace="4Gi", maxModelLength=8192)
    for device, swap in (("cpu", 4 * GIB), ("gpu", 0)):
        needs = capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device=device)  # type: ignore[arg-type]
        assert needs.swap_bytes == swap
        outcome = capacity.fit(spec, needs, capacity.limits(spec, config), memory_bytes=32 * GIB)
        assert isinstance(outcome, Fits)
        assert outcome.kv_cache_bytes == 32 * GIB * 90 // 100 - needs.weight_bytes - needs.workspace_bytes - swap


def test_a_cache_of_a_given_size_must_hold_one_sequence() -> None:
    config = config_of(LLAMA_3_8B)
    for size, fits in (("1Gi", True), ("1023Mi", False)):
        spec = spec_of(kvCache={"size": size}, maxModelLength=8192)
        needs = capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device="gpu")
        outcome = capacity.fit(spec, needs, capacity.limits(spec, config), memory_bytes=80 * GIB)
        assert isinstance(outcome, Fits) is fits


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100 80GB", "H100 80GB"),
        ("h100", "H100 80GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100 80GB"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("Tesla T4 16GB", "T4 16GB"),
        ("l40s", "L40S 48GB"),
        ("NVIDIA-A10G", "A10G 24GB"),
        ("Tesla-T4", "T4 16GB"),
        ("NVIDIA-L4", "L4 24GB"),
        ("NVIDIA-H100-PCIe", "H100 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"),
        ("AMD_Instinct_MI300X_OAM", "MI300X 192GB"),
    ],
)
def test_gpus_are_found_by_common_names(text: str, name: str) -> None:
    found = find_gpu(text)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "text",
    [
        "A100",
        "NVIDIA-A100-PCIe",
        "NVIDIA-H100-NVL",
        "NVIDIA-A10",
        "NVIDIA",
        "24GB",
        "",
        "Voodoo 2",
        "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
    ],
)
def test_no_single_gpu(text: str) -> None:
    assert find_gpu(text) is None
