"""A draft head over the target's hidden states: its arithmetic, its bookkeeping, and the heads that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixed_trials import FixedTrials
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from quire_common.errors import FlagsError
from quire_engine.config import SchedulerOptions, SpeculationOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.speculation.trials import Mode
from quire_engine.errors import ModelFolderError

PROMPTS = [list(range(3, 40)), [5, 6, 7], [200, 100, 50, 25] * 5, [9]]


class Reference:
    """The same head with transformers' layers, in float32, over whole texts."""

    def __init__(self, target: Path, head: Path) -> None:
        self.target: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        decoder = LlamaModel(LlamaConfig.from_pretrained(head)).eval()
        decoder.layers[0].input_layernorm = decoder.norm = torch.nn.Identity()
        stored = load_file(head / "model.safetensors")
        self.fuse = stored.pop("fc.weight")
        missing = decoder.load_state_dict(stored, strict=False)
        assert missing.missing_keys == ["embed_tokens.weight"] and not missing.unexpected_keys
        self.decoder = decoder

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the greedy drafts after a text, of which the target has computed all tokens but the last."""
        ids = torch.tensor([token_ids])
        states = self.target.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        known = ids[:, 1:]
        for _ in range(count):
            fused = torch.cat((self.target.model.embed_tokens(known), states), dim=-1) @ self.fuse.T
            last = self.decoder(inputs_embeds=fused, use_cache=False).last_hidden_state[:, -1:]
            states = torch.cat((states, last), dim=1)
            known = torch.cat((known, self.target.lm_head(last).argmax(-1)), dim=1)
        return [int(token) for token in known[0, -count:]]


def eager(running: Any, recorded: list[tuple[list[int], list[int]]] | None = None) -> Any:
    """Give each sequence as many drafts as it can have; record each drafted text, and its drafts."""
    speculation = running.engine._scheduler._speculation
    speculation._choose = lambda candidates, mode, *, others: [len(candidate.proposal) for candidate in candidates]
    speculation._trials = FixedTrials()
    speculation.observe_step = speculation.observe_prompts = lambda *_, **__: None
    drafter = running.model.runner._drafter
    if recorded is None:
        return running
    propose = drafter.propose

    def recording(batch: Any, table: np.ndarray, sampler: Any) -> Any:
        proposed = propose(batch, table, sampler)
        place = 0
        for row, computed, scheduled, drafts in zip(
            batch.rows, batch.num_computed, batch.num_scheduled, batch.num_drafts or [0] * len(batch.rows), strict=True
        ):
            place += scheduled
            if drafts:
                text = drafter._rows.history[row, : computed + 1].tolist()
                recorded.append((text, proposed.token_ids[place - drafts : place]))
        return proposed

    drafter.propose = recording
    return running


def generate(running: Any, params: SamplingParams) -> None:
    for key, prompt in enumerate(PROMPTS):
        running.add(key, prompt, params, seed=key)
    running.finish()


@pytest.mark.parametrize(
    ("budget", "changes", "head"),
    [
        (256, {}, {}),
        (21, {}, {"num_hidden_layers": 2, "num_key_value_heads": 4}),
        (256, {"kv_cache_memory_bytes": 9 * 16 * 2 * 4 * (2 * 2 + 1) * 16, "enable_prefix_caching": False}, {}),
    ],
)
def test_drafts_equal_the_reference(
    make_folder: Callable[..., Path],
    make_head: Callable[..., Path],
    start: Callable[..., Any],
    budget: int,
    changes: dict[str, Any],
    head: dict[str, Any],
) -> None:
    """Prompts in one step, in chunks of at most 21 tokens, and computed again after preemptions."""
    folder, over = make_folder(), make_head(**head)
    options = SpeculationOptions(method="eagle", model=over, max_tokens=4)
    recorded: list[tuple[list[int], list[int]]] = []
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=budget, max_generation_stall_seconds=0)
    settings = {"scheduler": scheduler, "max_model_len": 96, **changes}
    plain = start(folder, **settings)
    drafting = eager(start(folder, speculation=options, **settings), recorded)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    generate(plain, params)
    generate(drafting, params)
    assert drafting.tokens == plain.tokens
    reference = Reference(folder, over)
    expected = [reference.drafts(text, len(drafts)) for text, drafts in recorded]
    assert len(expected) > 50
    assert [drafts for _, drafts in recorded] == expected
    assert bool(drafting.engine.counters.preemptions) == ("kv_cache_memory_bytes" in changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_changes_no_answer(
    make_folder: Callable[..., Path], make_head: Callable[..., Path], start: Callable[..., Any], temperature: float
) -> None:
    folder, options = make_folder(), SpeculationOptions(method="eagle", model=make_head(prefix="model."), max_tokens=5)
    plain, drafting = start(folder), eager(start(folder, speculation=options))
    for running in (plain, drafting):
        generate(running, SamplingParams(max_tokens=50, temperature=temperature, ignore_eos=True))
    assert drafting.tokens == plain.tokens
    assert drafting.engine.counters.draft_tokens > drafting.engine.counters.accepted_tokens


def test_drafts_after_skipped_prompts_use_the_kept_states(
    make_folder: Callable[..., Path], make_head: Callable[..., Path], start: Callable[..., Any]
) -> None:
    """Without the pairs of a prompt, the head attends from the first whole block of kept hidden states on."""
    folder, over = make_folder(), make_head()
    options = SpeculationOptions(method="eagle", model=over, max_tokens=3)
    recorded: list[tuple[list[int], list[int]]] = []
    running = eager(start(folder, speculation=options), recorded)
    speculation = running.engine._scheduler._speculation
    speculation._trials = FixedTrials(fixed=Mode.OFF, pays=False)
    running.add(0, PROMPTS[0], SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
    for _ in range(40):
        running.step()
    assert not recorded
    speculation._trials = FixedTrials()
    running.finish()
    assert len(recorded) > 5
    drafter = running.model.runner._drafter
    # The prompt had 37 tokens, and the state of its last one is kept: the first whole block begins at 48.
    assert int(drafter._rows.firsts[0]) == 3


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ({"vocab_size": 300}, "has 300 tokens in its vocabulary, and the target 250"),
        ({"hidden_size": 32}, "reads hidden states of 32 numbers (hidden_size), and the target's have 64"),
        ({"max_position_embeddings": 128}, "context of 128 tokens is shorter than the target's 512"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures is ['LlamaForCausalLMEagle3']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_an_unsuitable_head_stops_the_start_if_required(
    make_folder: Callable[..., Path],
    make_head: Callable[..., Path],
    start: Callable[..., Any],
    head: dict[str, Any],
    part: str,
) -> None:
    options = SpeculationOptions(method="eagle", model=make_head(**head))
    with pytest.raises(FlagsError) as caught:
        start(make_folder(), speculation=options)
    assert part in caught.value.problems[0] and "--no-spec-required" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ("missing folder", "is not a folder"),
        ("no config", "has no config.json"),
        ("no weights", "no *.safetensors"),
        ("damaged", "is not a whole safetensors file"),
        ("no fc", "is not an EAGLE head: it has no tensor fc.weight"),
        ("no tensor", "tensor model.layers.0.mlp.up_proj.weight is missing"),
    ],
)
def test_a_broken_head_stops_the_start_only_if_required(
    make_folder: Callable[..., Path],
    make_head: Callable[..., Path],
    start: Callable[..., Any],
    tmp_path: Path,
    broken: str,
    part: str,
) -> None:
    left_out = {"no fc": ("fc.weight",), "no tensor": ("layers.0.mlp.up_proj.weight",)}.get(broken, ())
    head = tmp_path / "head"
    if broken != "missing folder":
        shutil.copytree(make_head(left_out=left_out), head)
    if broken == "no config":
        (head / "config.json").unlink()
    elif broken == "no weights":
        (head / "model.safetensors").unlink()
    elif broken == "damaged":
        (head / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises((FlagsError, ModelFolderError)) as caught:
        start(make_folder(), speculation=SpeculationOptions(method="eagle", model=head))
    problems = caught.value.problems if isinstance(caught.value, FlagsError) else [str(caught.value)]
    assert part in problems[0]
    running = start(make_folder(), speculation=SpeculationOptions(method="eagle", model=head, required=False))
    running.add(1, [3, 4, 5], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    running.finish()
    assert len(running.tokens[1]) == 9 and running.engine.counters.num_drafts == 0


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "an EAGLE-3 head"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "an EAGLE-3 head"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "an EAGLE-3 head"),
        ({"medusa_num_heads": 5, "model_type": "medusa"}, "Medusa heads"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "an MLP speculator"),
        ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "multi-token prediction"),
    ],
)
def test_other_kinds_of_heads_are_refused_by_name(
    make_folder: Callable[..., Path], start: Callable[..., Any], tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    """They are neither EAGLE-1 heads nor draft models."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
    for method in ("eagle", "draft_model"):
        options = SpeculationOptions(method=method, model=tmp_path)  # type: ignore[arg-type]
        with pytest.raises(FlagsError) as caught:
            start(make_folder(), speculation=options)
        assert kind in caught.value.problems[0], caught.value.problems


def test_a_head_named_as_a_draft_model_is_refused_with_the_remedy(
    make_folder: Callable[..., Path], make_head: Callable[..., Path], start: Callable[..., Any]
) -> None:
    with pytest.raises(FlagsError, match="--spec-method eagle"):
        start(make_folder(), speculation=SpeculationOptions(method="draft_model", model=make_head()))


def test_a_head_needs_a_native_target(
    make_folder: Callable[..., Path], make_head: Callable[..., Path], start: Callable[..., Any]
) -> None:
    options = SpeculationOptions(method="eagle", model=make_head())
    with pytest.raises(FlagsError, match="heads are for quire's own model families"):
        start(make_folder(), speculation=options, model_impl="transformers")


def test_published_heads_may_contain_copies_of_the_target(make_head: Callable[..., Path], tmp_path: Path) -> None:
    """Embedding and LM head are the target's, and a norm of the first layer's input is not used."""
    from safetensors.torch import save_file

    from quire_engine.model.candidate import BuildOptions
    from quire_engine.model.eagle import find_head
    from quire_engine.model.linear import choose_linear_backend

    folder = tmp_path / "head"
    shutil.copytree(make_head(architectures=["LlamaForCausalLM"]), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "embed_tokens.weight": torch.zeros(250, 64),
        "lm_head.weight": torch.zeros(250, 64),
        "layers.0.input_layernorm.weight": torch.ones(64),
        "fc.bias": torch.full((64,), 2.0),
    }
    save_file(tensors, folder / "model.safetensors")
    options = BuildOptions(
        load_format="safetensors",
        seed=0,
        dtype=torch.float32,
        backend=choose_linear_backend(torch.float32, "cpu", deterministic=True, quantization="none"),
    )
    built = find_head(folder).build(options, SimpleNamespace())  # type: ignore[arg-type]
    assert built.head.fuse(torch.zeros(1, 128)).tolist() == [[2.0] * 64]
    numbers = sum(tensor.numel() for name, tensor in tensors.items() if "fc" in name or "layers.0" in name) - 64
    assert built.weight_bytes == 4 * numbers
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
