"""Takes a fresh runner through every kind of step once, so that no request pays for compiling.

A prompt longer than a short query, then one more token drawn with every sampling parameter set, then one greedy token.
"""

from quire_engine.core.batch import Admission, Batch, BlockUpdates
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.ports import Runner
from quire_engine.core.sampling_params import SamplingParams

_PROMPT_TOKENS = 24
_SAMPLED = SamplingParams(
    max_tokens=2, temperature=1.0, top_k=2, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1
)
_GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def warm_up(runner: Runner, layout: KVCacheLayout, max_model_len: int) -> None:
    """Leaves no row taken; what it wrote into the cache lies in blocks that nobody has been given yet."""
    prompt = [0] * max(1, min(_PROMPT_TOKENS, max_model_len - 1))
    for step, params in enumerate((_SAMPLED, _GREEDY)):
        first = _batch(layout, step=2 * step, computed=0, token_ids=prompt, admission=_admission(prompt, params))
        token = runner.execute(first).wait().token_ids[0]
        if max_model_len > len(prompt):
            runner.execute(_batch(layout, step=2 * step + 1, computed=len(prompt), token_ids=[token])).wait()


def _admission(prompt: list[int], params: SamplingParams) -> Admission:
    return Admission(row=0, prompt_token_ids=prompt, output_token_ids=[], params=params, seed=0, eos_token_ids=())


def _batch(
    layout: KVCacheLayout, *, step: int, computed: int, token_ids: list[int], admission: Admission | None = None
) -> Batch:
    blocks = -(-(computed + len(token_ids)) // layout.block_size)
    updates = BlockUpdates(rows=[0] * blocks, positions=list(range(blocks)), blocks=list(range(blocks)))
    return Batch(
        step=step,
        rows=[0],
        num_computed=[computed],
        num_scheduled=[len(token_ids)],
        num_draft=[0],
        token_ids=token_ids,
        samples=[True],
        feedback_tokens=[],
        admitted=[] if admission is None else [admission],
        block_updates=(updates,) * len(layout.groups),
        released_rows=[0] if admission is not None else [],
    )
