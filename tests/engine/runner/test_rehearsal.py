"""The whole device runner over a stand-in for a GPU's driver: each launch and the order of all work are right.

Kernels are compiled for compute capability 9.0 and not run. The stand-in compares launches with the signatures of their
kernels, and finds accesses that no event orders; the second half of this file shows that it does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fixed_trials import FixedTrials

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from benchmarks.stand_in.cuda import POISON, OrderError, ProductError, RehearsedAccelerator, StandInCuda
from benchmarks.stand_in.runner import batch
from quire_engine.core.batch import BlockCopies
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams, every_parameter
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.core.sequence import Request
from quire_engine.core.speculation.proposers import NgramSettings, OpenProposer, ProposerFactory, ngram_proposers
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stats import Counters
from quire_engine.engine import Engine
from quire_engine.model.adapters.slots import with_adapter_slots
from quire_engine.model.config import ModelConfig, parse_config
from quire_engine.model.decoder import joined_linears
from quire_engine.model.families import FAMILIES
from quire_engine.model.linear import Fp8LinearBackend, LinearBackend, TorchLinearBackend
from quire_engine.model.weightless import build_weightless
from quire_engine.runner.adapter_store import RunnerAdapters
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device.staging import StepStaging
from quire_engine.runner.device.swap import DeviceSwapper
from quire_engine.runner.device_runner import DeviceDraft, DeviceRunner
from quire_engine.runner.device_stage import DeviceStage
from quire_engine.runner.device_steps import DeviceParts
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.fp8 import Fp8Rows
from quire_kernels.fp8_linear import fp8_linear, quantise_weight
from quire_kernels.kv_cache import allocate_kv_cache
from quire_kernels.rms_norm import rms_norm
from quire_kernels.triton_runtime.stand_in import standing_in

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles kernels")

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
SMALLER = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
CPU = torch.device("cpu")
ROWS, TOKENS, LONGEST, BLOCKS = 4, 32, 96, 5
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
# Reported prompts have more lines of logits than a graph.
SAMPLED = replace(every_parameter(top_k=3, logprobs=2), prompt_logprobs=None)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    cuda: StandInCuda
    accelerator: RehearsedAccelerator
    runner: DeviceRunner
    layout: KVCacheLayout

    @property
    def kernels(self) -> set[str]:
        return {launched.kernel for launched in self.cuda.launches}


def config_of_model(**changes: Any) -> ModelConfig:
    problems: list[str] = []
    config = parse_config({**RAW, **changes}, {}, tuple(FAMILIES), problems)
    assert config is not None, problems
    return config


@torch.inference_mode()
def make(
    cuda: StandInCuda,
    *,
    sizes: GraphSizes,
    adapters: bool = False,
    fp8: bool = False,
    most_drafts: int = 0,
    drafts: bool = False,
) -> Rehearsal:
    config = config_of_model()
    backend: LinearBackend | None = Fp8LinearBackend(TorchLinearBackend(torch.bfloat16)) if fp8 else None
    model, pool = build_weightless(config, torch.bfloat16, LONGEST, backend), None
    # A draft model with other heads than the target's.
    draft = None
    if drafts:
        smaller = build_weightless(config_of_model(**SMALLER), torch.bfloat16, LONGEST)
        draft = DeviceDraft(model=smaller, layers=1, max_tokens=3)
    kv_heads = [2, 2, *([1] if drafts else [])]
    group = KVCacheGroup(layers=tuple(range(len(kv_heads))), num_blocks=BLOCKS, window=None, num_swap_blocks=20)
    layout = KVCacheLayout(block_size=16, groups=(group,))
    caches = tuple(
        allocate_kv_cache(
            num_blocks=BLOCKS + 1, block_size=16, kv_heads=count, head_dim=32, dtype=torch.bfloat16, device=CPU
        )
        for count in kv_heads
    )
    if adapters:
        linears = joined_linears(config)
        model, pool = with_adapter_slots(model, linears, slots=2, max_rank=16, dtype=torch.bfloat16, device=CPU)
    accelerator = RehearsedAccelerator(cuda)
    runner = DeviceRunner(
        DeviceParts(
            model=model,
            caches=caches,
            layout=layout,
            num_heads=4,
            max_rows=ROWS,
            max_tokens=TOKENS,
            max_model_len=LONGEST,
            most_drafts=most_drafts,
            device=CPU,
            accelerator=accelerator,
        ),
        vocab_size=config.vocab_size,
        graph_sizes=sizes,
        adapters=None if pool is None else RunnerAdapters(pool, store=None),  # type: ignore[arg-type]
        draft=draft,
    )
    runner.capture_graphs()
    return Rehearsal(cuda, accelerator, runner, layout)


@pytest.fixture
def cuda() -> Iterator[StandInCuda]:
    with standing_in(90) as stand_in:
        cuda = StandInCuda(stand_in)
        with cuda.watching():
            yield cuda


def serve(
    rehearsal: Rehearsal,
    *,
    overlap: bool = True,
    speculation: Speculation | None = None,
    params: SamplingParams = SAMPLED,
) -> tuple[dict[int, list[int]], Counters]:
    """Serve prompts that do not fit into the cache together; return their answers and the engine's counters."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=LONGEST, preemption_mode="swap"
        ),
        rehearsal.layout,
        speculation=speculation,
    )
    engine = Engine(scheduler=scheduler, runner=rehearsal.runner, overlap=overlap)
    for key, (length, sampling) in enumerate(((3, GREEDY), (40, params), (14, GREEDY), (15, params))):
        sampling = replace(sampling, max_tokens=20, ignore_eos=True)
        assert engine.add(Request(key=key, prompt_token_ids=[2] * length, params=sampling, seed=key)) is None
    answers: dict[int, list[int]] = {}
    while engine.has_work:
        step = engine.step()
        if step is not None:
            for key, token in zip(step.keys, step.token_ids, strict=True):
                answers.setdefault(key, []).append(token)
    rehearsal.runner.close()
    return answers, engine.counters


EAGER = GraphSizes()
CAPTURED = GraphSizes(decode=(1, 4), mixed=(4, 16, 32))
DRAFTS = 12
# Sequences whose logits depend on their answer take no drafts.
UNEDITED: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words_token_ids": (),
    "min_tokens": 0,
}


@pytest.mark.parametrize("sizes", [EAGER, CAPTURED], ids=["launch by launch", "captured, padded"])
def test_serving_with_swapping_is_ordered(cuda: StandInCuda, sizes: GraphSizes) -> None:
    rehearsal = make(cuda, sizes=sizes)
    captured = len(cuda.launches)
    answers, counters = serve(rehearsal)
    assert answers == {key: [0] * 20 for key in range(4)} and +counters.preemptions
    assert {"_swap_blocks_kernel", "_store_kv_kernel", "_draw_kernel", "_largest_kernel"} <= rehearsal.kernels
    assert bool(cuda.replays) == bool(sizes.decode)
    if sizes.decode:
        # All that is still launched one by one is sampling and swapping.
        assert "_rms_norm_kernel" not in {launched.kernel for launched in cuda.launches[captured:]}


def every_draft(proposers: ProposerFactory, *, passes: bool = False) -> Speculation:
    """Return speculation that verifies every draft which is found, three of a sequence."""
    speculation = Speculation(
        proposers, max_tokens=3, most_drafts=DRAFTS, costs=None, seconds_per_pass=1.0 if passes else None
    )
    speculation._choose = lambda candidates, mode, *, others: [len(one.proposal) for one in candidates]  # type: ignore[method-assign]
    speculation._trials = FixedTrials()  # type: ignore[assignment]
    speculation.observe_step = speculation.observe_prompts = lambda *_, **__: None  # type: ignore[method-assign]
    return speculation


@pytest.mark.parametrize("sizes", [EAGER, CAPTURED], ids=["launch by launch", "captured, padded"])
def test_verifying_drafts_with_swapping_is_ordered(cuda: StandInCuda, sizes: GraphSizes) -> None:
    """The stand-in samples token 0 always, so that a draft of prompt lookup is accepted once an answer has two."""
    rehearsal = make(cuda, sizes=sizes, most_drafts=DRAFTS)
    captured, before = len(cuda.launches), cuda.replays
    found = every_draft(ngram_proposers(NgramSettings(shortest=1, longest=2)))
    params = replace(SAMPLED, **UNEDITED)
    answers, counters = serve(rehearsal, overlap=False, speculation=found, params=params)
    assert answers == {key: [0] * 20 for key in range(4)} and +counters.preemptions
    assert counters.draft_tokens == counters.accepted_tokens > 40
    if sizes.decode:
        # Steps with drafts are replayed too: nothing but sampling and swapping is launched one by one.
        assert cuda.replays - before == counters.steps
        assert "_rms_norm_kernel" not in {launched.kernel for launched in cuda.launches[captured:]}


def test_drafting_on_the_device_with_swapping_is_ordered(cuda: StandInCuda) -> None:
    """The passes of a draft model are replayed too, and the host waits for none of them."""
    rehearsal = make(cuda, sizes=CAPTURED, most_drafts=DRAFTS, drafts=True)
    captured, before = len(cuda.launches), cuda.replays
    proposer = OpenProposer()
    found = every_draft(lambda sequence: proposer, passes=True)
    answers, counters = serve(rehearsal, speculation=found, params=replace(SAMPLED, **UNEDITED))
    assert answers == {key: [0] * 20 for key in range(4)} and +counters.preemptions
    assert counters.draft_tokens == counters.accepted_tokens > 40
    launched = [launched.kernel for launched in cuda.launches[captured:]]
    assert "_store_kv_kernel" not in launched and "_swap_blocks_kernel" in launched
    # Each step with drafts has as many passes as drafts of a sequence, and the target's.
    assert cuda.replays - before > 2 * counters.steps


def test_a_step_with_adapters_is_launched_and_captured(cuda: StandInCuda) -> None:
    rehearsal = make(cuda, sizes=GraphSizes(mixed=(32,)), adapters=True)
    assert {"shrink_kernel", "expand_kernel"} <= rehearsal.kernels
    step = batch([9, 1], context=0, params=GREEDY, admits=True)
    admitted = [replace(admission, adapter_slot=slot) for slot, admission in enumerate(step.admitted)]
    output = rehearsal.runner.execute(replace(step, admitted=admitted)).sample().wait()
    assert output.token_ids == [0, 0] and cuda.replays == 1
    rehearsal.runner.close()


FUSED = {"_rms_norm_kernel", "_gated_fp8_kernel"}


@pytest.mark.parametrize("adapters", [False, True], ids=["", "with adapters"])
def test_fp8_layers_are_launched_and_captured(cuda: StandInCuda, adapters: bool) -> None:
    rehearsal = make(cuda, sizes=GraphSizes(mixed=(32,)), adapters=adapters, fp8=True)
    hidden, inner = RAW["hidden_size"], RAW["intermediate_size"]
    layer = [(32, hidden, 2 * hidden), (32, hidden, hidden), (32, hidden, 2 * inner), (32, inner, hidden)]
    # Without adapters, the last layer computes only keys and values of tokens without logits.
    last = [layer[0], *((4, inputs, outputs) for _, inputs, outputs in layer[1:])]
    assert cuda.products[-8:] == [*layer, *(layer if adapters else last)]
    # Adapters read 16 bits, so that norms and activations do not quantize for them.
    quantising = {launched.kernel for launched in cuda.launches if "scales" in launched.arguments}
    assert quantising & FUSED == (set() if adapters else FUSED)
    assert ("_gated_kernel" in rehearsal.kernels) == adapters
    step = batch([9, 1], context=0, params=GREEDY, admits=True)
    output = rehearsal.runner.execute(step).sample().wait()
    assert output.token_ids == [0, 0] and cuda.replays == 1
    assert cuda.products[-1] == (2, hidden, RAW["vocab_size"]), "the LM head, which no graph contains"
    rehearsal.runner.close()


@torch.inference_mode()
def test_steps_of_a_stage_in_flight_are_ordered(cuda: StandInCuda) -> None:
    """Five steps are issued before the host waits for one, and some copy blocks to the swap space."""
    group = KVCacheGroup(layers=(0, 1), num_blocks=BLOCKS, window=None, num_swap_blocks=20)
    layout = KVCacheLayout(block_size=16, groups=(group,))
    caches = tuple(
        allocate_kv_cache(
            num_blocks=BLOCKS + 1, block_size=16, kv_heads=2, head_dim=32, dtype=torch.bfloat16, device=CPU
        )
        for _ in group.layers
    )
    stage = DeviceStage(
        DeviceParts(
            model=build_weightless(config_of_model(), torch.bfloat16, LONGEST),
            caches=caches,
            layout=layout,
            num_heads=4,
            max_rows=ROWS,
            max_tokens=TOKENS,
            max_model_len=LONGEST,
            most_drafts=0,
            in_flight=3,
            device=CPU,
            accelerator=RehearsedAccelerator(cuda),
        )
    )
    steps = [batch([count], context=0, params=GREEDY, admits=True) for count in (1, 2, 3, 4, 5)]
    steps[1::2] = [replace(step, swap_out=(BlockCopies(sources=[1], targets=[2]),)) for step in steps[1::2]]
    issued = [stage.execute(step) for step in steps]
    assert all(one.sample().wait().token_ids == [] for one in issued)
    kernels = {launched.kernel for launched in cuda.launches}
    assert {"_store_kv_kernel", "_swap_blocks_kernel"} <= kernels and "_draw_kernel" not in kernels
    stage.close()


# --- what the stand-in finds ---


def test_a_product_that_a_gpu_refuses_is_found(cuda: StandInCuda) -> None:
    weights = quantise_weight(torch.ones(32, 64))
    rows = Fp8Rows(torch.zeros(3, 64, dtype=torch.float8_e4m3fn), torch.ones(3, 1))
    assert fp8_linear(rows, weights).shape == (3, 32) and cuda.products == [(3, 64, 32)]
    for wrong, words in (
        (replace(weights, transposed=weights.transposed.contiguous()), "dense columns"),
        (replace(weights, scales=weights.scales.double()), "scale_b is torch.float64"),
        (replace(weights, bias=torch.zeros(32)), "the bias must be bfloat16"),
        (replace(weights, transposed=weights.transposed[:, :24]), "24 outputs are no multiples of 16"),
    ):
        with pytest.raises(ProductError, match=words):
            fp8_linear(rows, wrong)


def test_a_download_is_unreadable_before_the_host_waits(cuda: StandInCuda) -> None:
    rehearsal = make(cuda, sizes=CAPTURED)
    pending = rehearsal.runner.execute(batch([3], context=0, params=GREEDY, admits=True)).sample()
    assert pending.token_ids is not None
    assert pending.token_ids.view(torch.uint8).tolist() == [POISON] * 8
    assert pending.wait().token_ids == [0]
    rehearsal.runner.close()


def test_streams_without_synchronization_are_detected(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = make(cuda, sizes=CAPTURED)
    monkeypatch.setattr(RehearsedAccelerator, "follow", lambda self, mark: None)
    with pytest.raises(OrderError, match="(_swap_blocks_kernel|copy engine) on stream .* before stream"):
        serve(rehearsal)


def test_missing_wait_for_the_staging_area_is_detected(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = make(cuda, sizes=CAPTURED)
    monkeypatch.setattr(DeviceSwapper, "_main_waits_for_staging", lambda self: None)
    step = batch([3], context=0, params=GREEDY, admits=True)
    step = replace(step, swap_out=(BlockCopies(sources=[1], targets=[2]),))
    rehearsal.runner.execute(step).sample()
    with pytest.raises(OrderError, match="_swap_blocks_kernel on stream 0 may write"):
        rehearsal.runner.execute(step)


def test_input_memory_reused_too_early_is_detected(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = make(cuda, sizes=CAPTURED)
    begin = StepStaging.begin

    def begin_at_once(staging: StepStaging, sizes: Any) -> Any:
        staging._copied = [None, None]
        return begin(staging, sizes)

    monkeypatch.setattr(StepStaging, "begin", begin_at_once)
    steps = [batch([count], context=0, params=GREEDY, admits=True) for count in (1, 2, 3, 4)]
    pending = [rehearsal.runner.execute(step).sample() for step in steps]
    with pytest.raises(OrderError, match="changed pinned memory"):
        pending[0].wait()


def test_wait_within_a_graph_capture_is_detected(cuda: StandInCuda) -> None:
    accelerator = RehearsedAccelerator(cuda)

    def work() -> None:
        if cuda.capturing is not None:
            accelerator.mark().wait()

    with pytest.raises(OrderError, match="waits for the device while a graph is captured"):
        accelerator.capture(work)


def test_graph_with_freed_memory_is_detected(cuda: StandInCuda) -> None:
    accelerator = RehearsedAccelerator(cuda)
    weight = torch.ones(64)
    x = [torch.zeros(2, 64)]

    def work() -> None:
        rms_norm(x[0], weight, 1e-5)

    graph = accelerator.capture(work)
    graph.replay()
    x.clear()
    with pytest.raises(OrderError, match="memory .* was freed"):
        graph.replay()
