"""Recorded steps of a decoder compute the same bits as steps whose launches are prepared for them."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from quire_engine.model import layers
from quire_engine.model.layers import (
    Attention,
    DecoderLayer,
    DecoderStack,
    GatedMlp,
    GroupInputs,
    ModelInputs,
    Norm,
    rows_with_logits,
)
from quire_engine.model.linear import FloatLinearBackend
from quire_engine.model.recordings import passes_at_once
from quire_kernels.errors import ArgumentError
from quire_kernels.kv_cache import KVCache, allocate_kv_cache
from quire_kernels.paged_attention import plan_attention

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, VOCABULARY = 32, 48, 4, 2, 16, 50
POSITIONS, BLOCK, BLOCKS, LAYERS = 1024, 16, 160, 3
Step = tuple[list[int], list[int]]
"""The tokens of each sequence in the step, and with those before it."""


def decoder() -> DecoderStack:
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def linear(outputs: int, inputs: int) -> Any:
        return FloatLinearBackend().pack(weight(outputs, inputs), None)

    def layer() -> DecoderLayer:
        attention = Attention(
            qkv=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            out=linear(HIDDEN, HEADS * DIM),
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            cos_sin=weight(POSITIONS, DIM),
            q_norm=None,
            k_norm=Norm(weight=weight(DIM), eps=1e-6),
            group=0,
            scale=0.3,
            soft_cap=None,
        )
        return DecoderLayer(
            attention_norm=Norm(weight=weight(HIDDEN), eps=1e-6),
            attention=attention,
            attention_out_norm=None,
            mlp_norm=Norm(weight=weight(HIDDEN), eps=1e-6),
            mlp=GatedMlp(gate_up=linear(2 * INTERMEDIATE, HIDDEN), down=linear(HIDDEN, INTERMEDIATE), gelu=False),
            mlp_out_norm=Norm(weight=weight(HIDDEN), eps=1e-6),
        )

    return DecoderStack(
        embedding=weight(VOCABULARY, HIDDEN),
        layers=tuple(layer() for _ in range(LAYERS)),
        norm=Norm(weight=weight(HIDDEN), eps=1e-6),
        lm_head=linear(VOCABULARY, HIDDEN),
        embedding_scale=None,
        logit_soft_cap=None,
    )


def empty_caches() -> tuple[KVCache, ...]:
    def cache() -> KVCache:
        return allocate_kv_cache(
            num_blocks=BLOCKS,
            block_size=BLOCK,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    return tuple(cache() for _ in range(LAYERS))


def inputs_of(step: Step, seed: int, *, is_wrong: bool = False) -> ModelInputs:
    """Return the inputs of a step with random tokens, whose sequences have their blocks in a random order.

    If it ``is_wrong``, the last block of the longest sequence does not exist.
    """
    queries, contexts = step
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
    width = -(-max(contexts) // BLOCK)
    tables = torch.stack([order[index * width :][:width] for index in range(len(queries))])
    positions = [torch.arange(context - query, context) for query, context in zip(queries, contexts, strict=True)]
    slots = [tables[index].long()[own // BLOCK] * BLOCK + own % BLOCK for index, own in enumerate(positions)]
    if is_wrong:
        tables[:, -1] = BLOCKS
    plan = plan_attention(block_tables=tables, query_lens=queries, context_lens=contexts, block_size=BLOCK)
    return ModelInputs(
        token_ids=torch.randint(VOCABULARY, (sum(queries),), generator=generator),
        positions=torch.cat(positions),
        groups=(GroupInputs(slots=torch.cat(slots), plan=plan),),
        logits_rows=torch.arange(sum(queries)),
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a step of a decoder without a recording."""

    def run(model: DecoderStack, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(layers, "MOST_RECORDED_TOKENS", 0)
            return model(inputs, caches)

    return run


STEPS: list[Step] = [
    ([1, 1, 1, 1], [3, 17, 40, 9]),
    ([1, 1, 1, 1], [300, 600, 18, 257]),  # several items of a sequence
    ([4], [700]),
    ([2, 2], [512, 2]),
    ([1, 3], [1, 3]),
    ([1, 1, 1, 1], [4, 18, 41, 10]),
]


@pytest.fixture
def shared_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several threads share attention however small it is."""
    monkeypatch.setattr(import_module("quire_kernels.paged_attention.cpu"), "_PARALLEL_PRODUCTS", 1)


@pytest.mark.usefixtures("shared_work")
def test_recorded_steps_compute_the_bits_of_others(threads: int, eager: Any) -> None:
    model, plain = decoder(), decoder()
    caches, others = empty_caches(), empty_caches()
    for seed, step in enumerate(STEPS):
        logits = model(inputs_of(step, seed), caches)
        assert torch.equal(logits, eager(plain, inputs_of(step, seed), others)), step
        for cache, other in zip(caches, others, strict=True):
            assert torch.equal(cache.keys, other.keys) and torch.equal(cache.values, other.values)


def test_numbers_of_tokens_and_of_threads_may_alternate(eager: Any) -> None:
    before, model, caches, others = torch.get_num_threads(), decoder(), empty_caches(), empty_caches()
    steps: list[Step] = [([1, 1], [300, 400]), ([1, 1, 1], [9, 8, 7]), ([1], [90])]
    try:
        for seed, threads in enumerate((2, 1, 2, 1)):
            torch.set_num_threads(threads)
            for step in steps:
                expected = eager(model, inputs_of(step, seed), others)
                assert torch.equal(model(inputs_of(step, seed), caches), expected)
    finally:
        torch.set_num_threads(before)


def test_other_caches_may_follow(eager: Any) -> None:
    model, step = decoder(), ([1, 1], [30, 60])
    for seed in (1, 2):
        caches = empty_caches()
        assert torch.equal(model(inputs_of(step, seed), caches), eager(model, inputs_of(step, seed), empty_caches()))
        assert caches[-1].keys.any()


def test_only_some_rows_have_logits(eager: Any) -> None:
    model, caches = decoder(), empty_caches()
    inputs = replace(inputs_of(([3, 1], [3, 20]), 1), logits_rows=torch.tensor([2, 3]))
    assert rows_with_logits(inputs) is not None
    expected = eager(model, inputs, empty_caches())
    assert expected.shape == (2, VOCABULARY)
    for _ in range(2):
        assert torch.equal(model(inputs, caches), expected)


def test_step_after_one_with_a_wrong_block_is_right(threads: int, eager: Any) -> None:
    model, caches, step = decoder(), empty_caches(), ([1, 1], [300, 600])
    wrong = inputs_of(step, 1, is_wrong=True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="block_tables name a block outside the cache"):
            model(wrong, caches)
        for cache in caches:
            cache.keys.zero_()
            cache.values.zero_()
        expected = eager(model, inputs_of(step, 2), empty_caches())
        assert torch.equal(model(inputs_of(step, 2), caches), expected)


def test_recordings_survive_the_mode_in_which_they_began(eager: Any) -> None:
    model, caches, step = decoder(), empty_caches(), ([1, 1], [30, 60])
    expected = eager(model, inputs_of(step, 1), empty_caches())
    with torch.inference_mode():
        model(inputs_of(step, 1), caches)
    assert torch.equal(model(inputs_of(step, 1), caches), expected)


def slots_of(inputs: ModelInputs, tables: torch.Tensor, passes: int) -> np.ndarray:
    positions = inputs.positions + torch.arange(passes)[:, None]  # [P, R]
    rows = torch.arange(positions.shape[1])
    return (tables[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK).numpy()


@pytest.mark.usefixtures("shared_work")
@pytest.mark.parametrize(("contexts", "passes"), [([30], 5), ([3, 47, 255], 2), ([300, 600, 18], 5)])
def test_passes_go_on_with_their_own_tokens(threads: int, eager: Any, contexts: list[int], passes: int) -> None:
    """They end where a sequence gets one more piece of its context."""
    model, plain, caches, others = decoder(), decoder(), empty_caches(), empty_caches()
    rows = len(contexts)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    tables = order[: BLOCKS // rows * rows].view(rows, -1)

    def inputs_at(number: int, token_ids: torch.Tensor) -> ModelInputs:
        lengths = np.array(contexts) + number
        positions = torch.from_numpy(lengths - 1)
        slots = tables[torch.arange(rows), positions // BLOCK].long() * BLOCK + positions % BLOCK
        plan = plan_attention(block_tables=tables, query_lens=[1] * rows, context_lens=lengths, block_size=BLOCK)
        groups = (GroupInputs(slots=slots, plan=plan),)
        return ModelInputs(token_ids=token_ids, positions=positions, groups=groups, logits_rows=torch.arange(rows))

    first = inputs_at(0, torch.arange(7, 7 + rows))
    assert model.records_logits(first)
    assert min(5, passes_at_once(first)) == passes
    for _ in range(2):
        guesses = model.guess(first, slots_of(first, tables, passes), caches)
        first = inputs_at(0, torch.arange(7, 7 + rows))  # the passes moved the plan's tiles
        token_ids = first.token_ids
        for number in range(passes):
            logits = eager(plain, inputs_at(number, token_ids), others)
            token_ids = logits.argmax(dim=1)
            assert guesses[number].tolist() == token_ids.tolist()
        for cache, other in zip(caches, others, strict=True):
            assert torch.equal(cache.keys, other.keys) and torch.equal(cache.values, other.values)


def test_passes_end_with_the_first_that_fails() -> None:
    model, caches = decoder(), empty_caches()
    inputs = inputs_of(([1, 1], [30, 60]), 1)
    slots = np.array([[0, 16], [1, BLOCKS * BLOCK], [2, 17]])
    with pytest.raises(ArgumentError, match="slots leave the cache"):
        model.guess(inputs, slots, caches)
    assert not caches[0].keys[0, :, :, 2].any()


def test_unknown_token_is_refused_by_a_recorded_step() -> None:
    model, caches = decoder(), empty_caches()
    inputs = inputs_of(([1, 1], [30, 60]), 1)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="token_ids leave the table of 50 tokens"):
            model(replace(inputs, token_ids=torch.tensor([3, VOCABULARY])), caches)
