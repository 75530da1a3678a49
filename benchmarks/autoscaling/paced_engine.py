"""quire-engine whose steps take a given time instead of computing: for validating the simulator where cores are scarce.

    python paced_engine.py '{"step_seconds": 0.02, …}' --model DIR …     the engine, with quire-engine's own flags

Everything but the tensors is real: HTTP, tokenizer, processes, scheduler, blocks, metrics. A step sleeps
``step_seconds`` + prompt tokens / ``prefill_tokens_per_second`` + ``decode_seconds_per_sequence`` a decoding sequence.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, replace

from quire_engine import flags
from quire_engine.config import EngineConfig
from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.fake_runner import FakePending, FakeRunner, load_fake_model
from quire_engine.core.ports import LoadedModel
from quire_engine.ipc.start_up import RunnerFactory
from quire_engine.model_folder import inspect_model_folder
from quire_engine.server.http.listen import listener_of
from quire_engine.server.serve import serve
from quire_engine.text.model_text import load_model_text


@dataclass(slots=True, kw_only=True)
class PacedRunner(FakeRunner):
    prefill_tokens_per_second: float = 1000.0
    fixed_seconds: float = 0.02
    decode_seconds_per_sequence: float = 0.0

    def execute(self, batch: Batch) -> FakePending:
        begun = time.monotonic()
        pending = FakeRunner.execute(self, batch)
        decoding = sum(count == 1 for count in batch.num_scheduled)
        prompts = sum(batch.num_scheduled) - decoding
        seconds = self.fixed_seconds + prompts / self.prefill_tokens_per_second
        seconds += decoding * self.decode_seconds_per_sequence
        return FakePending(timed(pending.output, seconds), begun + seconds)


def timed(output: RunnerOutput, seconds: float) -> RunnerOutput:
    return replace(output, prepare_seconds=0.0, run_seconds=seconds, sample_seconds=0.0)


def load(
    config: EngineConfig,
    *,
    step_seconds: float,
    prefill_tokens_per_second: float,
    decode_seconds_per_sequence: float,
    num_blocks: int,
    load_seconds: float,
) -> LoadedModel:
    """Called in the engine process."""
    time.sleep(load_seconds)
    model = load_fake_model(config, num_blocks=num_blocks, vocab_size=4096)
    runner = PacedRunner(
        layout=model.layout,
        vocab_size=4096,
        verify=False,
        fixed_seconds=step_seconds,
        prefill_tokens_per_second=prefill_tokens_per_second,
        decode_seconds_per_sequence=decode_seconds_per_sequence,
    )
    return replace(model, runner=runner)


def main(argv: list[str]) -> int:
    options, *rest = argv
    config = flags.parse(rest, os.environ)
    folder = inspect_model_folder(config.model.path, weights=False)
    text = load_model_text(config.model.path, config.text)
    factory = RunnerFactory(function="paced_engine:load", options=json.loads(options))
    return serve(config, folder, text, listener_of(config.server), factory=factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
