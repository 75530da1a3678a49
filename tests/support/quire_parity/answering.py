"""An engine driven in process, and the answers of its requests."""

from dataclasses import dataclass, field
from typing import Any

from quire_engine.core.batch import TokenLogprobs
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine


@dataclass
class Answering:
    """An engine whose integrity is checked after every step."""

    engine: Engine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def add(self, key: int, prompt: list[int], params: SamplingParams, seed: int = 0, **fields: Any) -> None:
        self.tokens[key], self.logprobs[key] = [], []
        request = Request(key=key, prompt_token_ids=prompt, params=params, seed=seed, **fields)
        refusal = self.engine.add(request)
        assert refusal is None, refusal

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def step(self) -> None:
        step = self.engine.step()
        self.engine.check_integrity()
        if step is None:
            return
        for report in step.prompt_logprobs:
            self.prompt_logprobs.setdefault(report.key, []).extend(report.entries)
        for i, key in enumerate(step.keys):
            self.tokens[key].append(step.token_ids[i])
            if step.logprobs is not None and (entry := step.logprobs[i]) is not None:
                self.logprobs[key].append(entry)
