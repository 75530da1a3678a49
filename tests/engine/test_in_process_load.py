"""The clients with which benchmarks/serving/on_device.py drives an engine, with a runner without tensors."""

import pytest
from fake_runner import FakeRunner

from benchmarks.serving.in_process import Clients, Load, percentiles
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.engine import Engine

LAYOUT = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=64),))


def clients() -> Clients:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, eos_token_ids=(2,))
    engine = Engine(scheduler=Scheduler(config, LAYOUT), runner=FakeRunner(layout=LAYOUT, vocab_size=100))
    return Clients(engine, vocab_size=100, max_model_len=256)


def test_every_request_is_answered_whole_and_counted_once() -> None:
    served = clients().serve(Load(concurrency=3, requests=7, prompt=20, output=5))
    assert (served.requests, served.prompt_tokens, served.output_tokens) == (7, 140, 35)
    assert served.ttft.median <= served.ttft.p99 and 0.0 < served.itl.median <= served.seconds
    assert served.total_tokens_per_second == pytest.approx(5 * served.output_tokens_per_second)


def test_concurrent_requests_never_exceed_clients() -> None:
    driven = clients()
    most = 0
    step = driven._engine.step

    def counted() -> object:
        nonlocal most
        gauges = driven._engine.gauges()
        most = max(most, gauges.num_running + gauges.num_waiting)
        return step()

    driven._engine.step = counted  # type: ignore[method-assign, assignment]
    driven.serve(Load(concurrency=2, requests=6, prompt=20, output=5))
    assert most == 2


def test_decoding_counts_the_tokens_that_attention_reads() -> None:
    gpu = iter([0.0, 0.0])
    decoded = clients().decode(3, 40, 10, warm_up=2, gpu_seconds=lambda: next(gpu))
    # 3 sequences of 40 tokens; each has one token from its prompt or the others' prompts, 2 of warm-up, 5 at half time.
    assert 3 * 40 + 3 * (1 + 2 + 5) <= decoded.context_tokens <= 3 * 40 + 3 * (3 + 2 + 5)
    assert decoded.steps == 10 and decoded.step_seconds > 0.0 and decoded.gpu_share == 0.0


@pytest.mark.parametrize(
    ("sequences", "context", "words"),
    [(4, 240, "[0-9]+ tokens in 12 steps of 4 sequences"), (5, 40, "5 sequences of 40 tokens never ran together")],
)
def test_sequences_that_do_not_fit_together_are_not_measured(sequences: int, context: int, words: str) -> None:
    with pytest.raises(SystemExit, match=f"({words}): the KV cache, or the model's length, is too small"):
        clients().decode(sequences, context, 12, warm_up=2, gpu_seconds=None)


def test_percentiles_are_of_the_values_given() -> None:
    found = percentiles([float(value) for value in range(1, 101)])
    assert (found.median, found.p99) == (50.5, 100.0)
