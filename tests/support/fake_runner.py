"""A runner without tensors, which verifies the scheduler.

A model would store keys and values per slot. This runner stores the token, its position and a running digest of all
tokens up to it, and derives the next token from what it *reads back* through the block table. A block that is reused
too early, a wrong block table or a wrong slot therefore changes the text, as in a real cache, and is usually detected
at once. Sampled tokens depend only on the sequence's tokens. The runner also checks the rules of ``Batch``: rows are
released before they are admitted again, positions are consecutive, and the columns are consistent. Blocks of the swap
space hold copies, so that errors there are visible as well.
"""

from array import array
from dataclasses import dataclass, field
from time import monotonic, sleep

from quire_engine.config import EngineConfig
from quire_engine.core.batch import (
    Admission,
    Batch,
    BlockCopies,
    PooledPositions,
    PromptPositions,
    RunnerOutput,
    TokenLogprobs,
    TokenMasks,
    mask_bytes,
)
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits
from quire_engine.core.ports import LoadedModel

_MODULUS = (1 << 61) - 1


def next_digest(digest: int, token_id: int) -> int:
    return (digest * 6_364_136_223_846_793_005 + token_id + 1) % _MODULUS


def draw(digest: int, vocab_size: int) -> int:
    """Return the token that follows a text with this digest."""
    return (digest >> 7) % vocab_size


@dataclass(slots=True)
class _Row:
    admission: Admission
    num_tokens: int  # written so far
    tables: list[dict[int, int]]  # per group: place -> block
    drawn: int | None = None
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    position: int
    token_id: int
    digest: int


@dataclass(slots=True)
class FakeRunner:
    """A runner on a fake cache. ``verify`` reads back everything that a query may see; ``step_seconds`` is slept."""

    layout: KVCacheLayout
    vocab_size: int
    verify: bool = True
    step_seconds: float = 0.0
    rows: dict[int, _Row] = field(default_factory=dict)
    cache: list[dict[int, _Slot]] = field(default_factory=list)
    host: list[dict[int, list[_Slot | None]]] = field(default_factory=list)
    """The content of each block of the swap space, by offset."""
    token_seconds: float = 0.0
    """The reported time per token and per copied block; neither is slept."""
    copy_seconds: float = 0.0
    adapters: dict[int, int] = field(default_factory=dict)
    """The adapter in each slot; a row's text starts with a digest that depends on its adapter."""
    tokens_at_once: int = 1
    """The tokens that a step samples for each sequence; the later ones are computed in the next step."""
    wrong_guesses: int | None = None
    """With a number, a draft model fills in the drafts, and is wrong at each position that is a multiple of it."""
    steps: int = 0
    _unsampled: bool = False

    def __post_init__(self) -> None:
        self.cache = [{} for _ in self.layout.groups]
        self.host = [{} for _ in self.layout.groups]

    def execute(self, batch: Batch) -> "FakeForward":
        assert not self._unsampled, "the step before was not sampled"
        self._unsampled = True
        self.steps += 1
        assert batch.step == self.steps, "steps out of order"
        self._check_columns(batch)
        self._swap(batch)
        self.adapters |= {load.slot: load.adapter for load in batch.adapter_loads}
        for row in batch.released_rows:
            del self.rows[row]
        for admission in batch.admitted:
            assert admission.row not in self.rows, f"row {admission.row} is taken"
            self.rows[admission.row] = _Row(admission, 0, [{} for _ in self.layout.groups])
        for group, updates in enumerate(batch.block_updates):
            for row, place, block in zip(updates.rows, updates.positions, updates.blocks, strict=True):
                assert 0 <= block < self.layout.groups[group].num_blocks
                self.rows[row].tables[group][place] = block
        due = monotonic() + self.step_seconds if self.step_seconds else None
        reports = [self._report(batch, asked) for asked in batch.prompt_logprobs]
        pooled = [self._pool(batch, asked) for asked in batch.pooled]
        token_ids, digests = self._run(batch)
        return FakeForward(
            runner=self,
            batch=batch,
            token_ids=token_ids,
            digests=digests,
            reports=reports,
            pooled=pooled,
            due=due,
        )

    def _pool(self, batch: Batch, asked: PooledPositions) -> bytes:
        """Return the number of pooled tokens, their sum, and the sum of their positions."""
        start, count = batch.num_computed[asked.index], batch.num_scheduled[asked.index]
        assert start <= asked.first and asked.first + asked.count <= start + count, "pooled without being computed"
        place = sum(batch.num_scheduled[: asked.index]) + asked.first - start
        tokens = batch.token_ids[place : place + asked.count]
        positions = range(asked.first, asked.first + asked.count)
        return array("f", [asked.count, sum(tokens), sum(positions)]).tobytes()

    def _swap(self, batch: Batch) -> None:
        """Copy blocks out, then in."""
        size = self.layout.block_size
        for group, copies in enumerate(batch.swap_out):
            self._check_copies(copies, copies.sources, copies.targets, group)
            for block, host in zip(copies.sources, copies.targets, strict=True):
                self.host[group][host] = [self.cache[group].get(block * size + offset) for offset in range(size)]
        for group, copies in enumerate(batch.swap_in):
            self._check_copies(copies, copies.targets, copies.sources, group)
            for host, block in zip(copies.sources, copies.targets, strict=True):
                for offset, slot in enumerate(self.host[group][host]):
                    self.cache[group].pop(block * size + offset, None)
                    if slot is not None:
                        self.cache[group][block * size + offset] = slot

    def _check_copies(self, copies: BlockCopies, blocks: list[int], hosts: list[int], group: int) -> None:
        shape = self.layout.groups[group]
        assert len(copies.sources) == len(copies.targets) == len(set(copies.targets)), "copied onto one another"
        assert all(0 <= block < shape.num_blocks for block in blocks), "no such block"
        assert all(0 <= host < shape.num_swap_blocks for host in hosts), "no such block in the swap space"

    def _check_columns(self, batch: Batch) -> None:
        width = len(batch.rows)
        columns = (batch.num_computed, batch.num_scheduled, batch.samples)
        assert width > 0 and all(len(column) == width for column in columns)
        assert len(set(batch.rows)) == width, "a row is scheduled twice"
        assert min(batch.num_scheduled) >= 1 and sum(batch.num_scheduled) == len(batch.token_ids)
        assert len(batch.block_updates) == len(self.layout.groups)
        assert {len(batch.swap_out), len(batch.swap_in)} <= {0, len(self.layout.groups)}

    def _run(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Store the inputs; return all of them, and the digest of each sequence that samples."""
        feedback = set(batch.feedback_tokens)
        all_inputs: list[int] = []
        admitted = {admission.row for admission in batch.admitted}
        digests: list[int] = []
        place = 0
        drafts = batch.num_drafts or [0] * len(batch.rows)
        columns = zip(batch.rows, batch.num_computed, batch.num_scheduled, batch.samples, drafts, strict=True)
        for number, start, count, samples, num_drafts in columns:
            row = self.rows[number]
            assert number in admitted or start == row.num_tokens, (
                f"row {number} goes on at {start}, not {row.num_tokens}"
            )
            inputs = batch.token_ids[place : place + count]
            if place in feedback:
                assert count == 1 and row.drawn is not None, "nothing was drawn to feed back"
                inputs = [row.drawn]
            place += count
            known = len(inputs) - num_drafts
            assert known >= 1 and (samples or not num_drafts), "drafts of a sequence that does not sample"
            digest = self._write(row, start, inputs[:known])
            if self.wrong_guesses is not None:
                inputs = [*inputs[:known], *self._guess(digest, start + known, num_drafts)]
            all_inputs += inputs
            row.drawn = None
            if samples:
                digests.append(digest)
                row.drafts = inputs[known:]
                if row.drafts:
                    self._write(row, start + known, row.drafts)
                    row.num_tokens = start + known
        return all_inputs, digests

    def _guess(self, digest: int, position: int, count: int) -> list[int]:
        """Return the drafts from ``position`` on of a draft model that knows the text, except at some positions."""
        assert self.wrong_guesses is not None
        drafts = []
        for at in range(position, position + count):
            drafts.append((draw(digest, self.vocab_size) + (at % self.wrong_guesses == 0)) % self.vocab_size)
            digest = next_digest(digest, drafts[-1])
        return drafts

    def sample(self, forward: "FakeForward", masks: TokenMasks | None) -> RunnerOutput:
        """Sample the tokens that follow the texts of a step."""
        self._unsampled = False
        batch = forward.batch
        rows = [self.rows[number] for number, samples in zip(batch.rows, batch.samples, strict=True) if samples]
        token_ids: list[int] = []
        counts: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        line = 0
        for row, digest in zip(rows, forward.digests, strict=True):
            count = 0
            while True:
                sampled_from = line + min(count, len(row.drafts))
                row.drawn = _allowed(draw(digest, self.vocab_size), sampled_from, masks, self.vocab_size)
                digest = next_digest(digest, row.drawn)
                token_ids.append(row.drawn)
                logprobs.append(_logprobs(row.admission, row.drawn, self.vocab_size))
                count += 1
                accepted = count <= len(row.drafts) and row.drafts[count - 1] == row.drawn
                row.num_tokens += accepted
                if not accepted and (row.drafts or count == self.tokens_at_once):
                    break
            line += 1 + len(row.drafts)
            row.drafts = []
            counts.append(count)
        wanted = any(entry is not None for entry in logprobs)
        copied = sum(len(copies.sources) for copies in (*batch.swap_out, *batch.swap_in))
        return RunnerOutput(
            token_ids=token_ids,
            counts=None if self.tokens_at_once == 1 and not batch.num_drafts else counts,
            logprobs=logprobs if wanted else None,
            prompt_logprobs=forward.reports,
            pooled=forward.pooled,
            run_seconds=self.token_seconds * batch.num_tokens,
            swap_seconds=self.copy_seconds * copied,
        )

    def _report(self, batch: Batch, asked: PromptPositions) -> list[TokenLogprobs]:
        """Return one entry per position, each of which this step computes."""
        start, count = batch.num_computed[asked.index], batch.num_scheduled[asked.index]
        row = self.rows[batch.rows[asked.index]]
        last = asked.first + len(asked.next_token_ids)
        assert start <= asked.first < last <= start + count, f"positions {asked.first} to {last} are not computed now"
        assert asked.next_token_ids == row.admission.prompt_token_ids[asked.first + 1 : last + 1]
        return [_entry(token_id, asked.num_logprobs, self.vocab_size) for token_id in asked.next_token_ids]

    def _write(self, row: _Row, start: int, inputs: list[int]) -> int:
        """Store the inputs in every group; return the digest after the last one, as read back."""
        digests = []
        for group in range(len(self.layout.groups)):
            digest = self._read(row, group, start)
            for position, token_id in enumerate(inputs, start=start):
                digest = next_digest(digest, token_id)
                slot = self._slot(row, group, position)
                self.cache[group][slot] = _Slot(position=position, token_id=token_id, digest=digest)
            digests.append(digest)
        row.num_tokens = start + len(inputs)
        assert len(set(digests)) == 1, "KV cache groups hold different texts"
        return digests[0]

    def _read(self, row: _Row, group: int, position: int) -> int:
        """Return the digest of all tokens before ``position``, read from the slots that a query there may see."""
        window = self.layout.groups[group].window
        nearest = max(0, position - 1)
        first = max(0, position + 1 - window) if window is not None else 0
        digest = self.adapters[row.admission.adapter_slot] if row.admission.adapter_slot >= 0 else 0
        for past in range(first if self.verify else nearest, position):
            slot = self.cache[group][self._slot(row, group, past)]
            assert slot.position == past, f"position {past} reads what was stored for {slot.position}"
            # The tokens before a window are not visible: the digest of the window's first token is used as stored.
            if self.verify and (past > first or first == 0):
                assert slot.digest == next_digest(digest, slot.token_id), f"position {past} was overwritten"
            digest = slot.digest
        return digest

    def _slot(self, row: _Row, group: int, position: int) -> int:
        place, offset = divmod(position, self.layout.block_size)
        return row.tables[group][place] * self.layout.block_size + offset

    def close(self) -> None:
        self.rows.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeForward:
    """A forward pass of the fake runner, whose tokens are not sampled yet."""

    runner: FakeRunner
    batch: Batch
    token_ids: list[int]
    """The inputs of the step, drafts included."""
    digests: list[int]
    """The digest of the text of each sequence that samples, in the order of the rows."""
    reports: list[list[TokenLogprobs]]
    pooled: list[bytes]
    due: float | None

    def sample(self, masks: TokenMasks | None = None) -> "FakePending":
        """Sample the tokens."""
        return FakePending(self.runner.sample(self, masks), self.due)


@dataclass(frozen=True, slots=True)
class FakePending:
    output: RunnerOutput
    due: float | None

    def wait(self) -> RunnerOutput:
        if self.due is not None:
            sleep(max(0.0, self.due - monotonic()))
        return self.output


def _allowed(token_id: int, place: int, masks: TokenMasks | None, vocab_size: int) -> int:
    """Return the token, or the next one that the mask of its line allows."""
    if masks is None or place not in masks.places:
        return token_id
    width = mask_bytes(vocab_size)
    mask = masks.bits[masks.places.index(place) * width :][:width]
    while not mask[token_id // 8] >> token_id % 8 & 1:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _logprobs(admission: Admission, token_id: int, vocab_size: int) -> TokenLogprobs | None:
    count = admission.params.logprobs
    return None if count is None else _entry(token_id, count, vocab_size)


def _entry(token_id: int, count: int, vocab_size: int) -> TokenLogprobs:
    ids = [token_id, *((token_id + step) % vocab_size for step in range(count))]
    return TokenLogprobs(token_ids=ids, logprobs=[-0.5, *(-0.5 - step for step in range(count))], rank=1)


def load_fake_model(
    config: EngineConfig,
    *,
    num_blocks: int = 4096,
    max_model_len: int = 4096,
    vocab_size: int = 512,
    eos_token_ids: tuple[int, ...] = (0,),
    step_seconds: float = 0.0,
    asynchronous: bool = False,
    verify: bool = False,
) -> LoadedModel:
    """Return a model with a fake runner, in place of ``quire_engine.runner.load_model``, for tests of other parts."""
    layout = KVCacheLayout(
        block_size=config.cache.block_size, groups=(KVCacheGroup(layers=(0,), num_blocks=num_blocks),)
    )
    return LoadedModel(
        runner=FakeRunner(layout=layout, vocab_size=vocab_size, verify=verify, step_seconds=step_seconds),
        layout=layout,
        traits=ModelTraits(
            max_model_len=config.model.max_model_len or max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            pools=config.pooling is not None,
        ),
        vocab_size=vocab_size,
        model_bytes=0,
        kv_cache_bytes=0,
        dtype="float32",
        weights="none",
        phase_seconds={},
        asynchronous=asynchronous,
    )
