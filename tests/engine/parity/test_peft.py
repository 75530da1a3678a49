"""Adapters that peft writes: the engine answers as peft does, and as the model that peft merges."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_support.engines import answers, started
from peft import LoraConfig, PeftModel, get_peft_model
from quire_parity import cases
from quire_parity.cases import Case
from quire_parity.reference import Answer, Tally, compare, generate, load_reference
from transformers import PreTrainedModel

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft calls it

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = cases.prompts((1, 17, 40))
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{kind} alone": {"target_modules": [kind], "r": 6} for kind in ALL},
    "all layers": {"target_modules": list(ALL), "r": 8, "lora_alpha": 24},
    "every linear layer by name": {"target_modules": "all-linear", "r": 4},
    "rsLoRA": {"target_modules": list(ALL), "r": 16, "use_rslora": True},
    "patterns of ranks": {
        "target_modules": list(ALL),
        "r": 8,
        "rank_pattern": {"down_proj": 3, "layers.0.*q_proj": 12},
    },
    "patterns of alphas": {
        "target_modules": list(ALL),
        "alpha_pattern": {"o_proj": 40, "^model.layers.1.mlp.up_proj": 1},
    },
    "both patterns with rsLoRA": {
        "target_modules": list(ALL),
        "r": 8,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 2, "down_proj": 16},
        "alpha_pattern": {"k_proj": 5, "up_proj": 30},
    },
    "some layers": {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]},
    "a regular expression": {"target_modules": r".*\.(0|1)\.self_attn\.(q|o)_proj"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The answers to ``PROMPTS``."""

    base: list[Answer]
    peft: list[Answer]
    merged: list[Answer]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "base"
    cases.save(Case(family="llama", fields={"attention_bias": True, "mlp_bias": True}), folder)
    return folder


def write_adapter(model: PreTrainedModel, settings: Mapping[str, Any], folder: Path) -> PeftModel:
    """Return the model with a random adapter, which peft also writes to the folder."""
    torch.manual_seed(3)
    given = {"lora_dropout": 0.0, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    adapted = get_peft_model(model, LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    adapted.save_pretrained(str(folder))
    return adapted


def expected_answers(base: Path, settings: Mapping[str, Any], folder: Path) -> Expected:
    model = load_reference(base, "eager")
    unadapted = [generate(model, prompt) for prompt in PROMPTS]
    write_adapter(model, settings, folder)
    # Both are read from the files, so that they are compared with what the engine reads.
    adapted = PeftModel.from_pretrained(load_reference(base, "eager"), str(folder)).eval()
    by_peft = [generate(adapted, prompt) for prompt in PROMPTS]
    merged = adapted.merge_and_unload()
    return Expected(base=unadapted, peft=by_peft, merged=[generate(merged, prompt) for prompt in PROMPTS])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_answers_equal_pefts_and_the_merged_models(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = expected_answers(base, settings, tmp_path)
    assert [answer.logprobs for answer in expected.peft] != [answer.logprobs for answer in expected.base]
    engine = started(base, adapters=[tmp_path])
    heard = answers(engine, {key: (prompt, 1) for key, prompt in enumerate(PROMPTS)})
    engine.close()
    for key, one in heard.items():
        compare(expected.peft[key], one.token_ids, one.logprobs, Tally(), f"peft, prompt {key}")
        compare(expected.merged[key], one.token_ids, one.logprobs, Tally(), f"merged, prompt {key}")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "bias"),
        ({"target_modules": ["q_proj"], "r": 32}, "--max-lora-rank is 16"),
    ],
)
def test_unsupported_peft_adapters_are_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    write_adapter(load_reference(base, "eager"), settings, tmp_path)
    with pytest.raises(AssertionError, match=named):
        started(base, adapters=[tmp_path])
