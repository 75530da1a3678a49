"""The choice between generating and pooling, from flags and the model's folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import FlagsError
from quire_engine import flags
from quire_engine.config import PoolingSetup
from quire_engine.errors import ModelFolderError
from quire_engine.pooling_setup import find_pooling

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.base.modules."
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 8}
MEAN = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
CAUSAL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}


def make(folder: Path, config: dict[str, Any] | None = None, **modules: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(CAUSAL | (config or {})))
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{OLD}Transformer"}]
    for kind, content in modules.items():
        path = f"{len(listed)}_{kind}"
        listed.append({"idx": len(listed), "name": str(len(listed)), "path": path, "type": f"{NEW}x.{kind}"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(content))
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def found(folder: Path, *arguments: str) -> PoolingSetup | None:
    return find_pooling(flags.parse(["--model", str(folder), *arguments], {}))


EMBED = PoolingSetup(hidden_size=8)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({}, None),
        ({"Pooling": LAST, "Normalize": {}}, EMBED),
        ({"Pooling": LAST}, replace(EMBED, normalize=False)),
        ({"Pooling": MEAN, "Normalize": {}}, replace(EMBED, mean=True)),
        ({"Pooling": {"pooling_mode": "mean"}, "Normalize": {}}, replace(EMBED, mean=True)),
        ({"Pooling": {"pooling_mode": ["lasttoken"]}, "Normalize": {}}, EMBED),
        (
            {"LogitScore": {"true_token_id": 5, "false_token_id": 3}},
            replace(EMBED, task="score", yes_token=5, no_token=3),
        ),
        ({"LogitScore": {"true_token_id": 5, "false_token_id": None}}, replace(EMBED, task="score", yes_token=5)),
    ],
)
def test_modules_decide(modules: dict[str, Any], expected: PoolingSetup | None, tmp_path: Path) -> None:
    assert found(make(tmp_path, **modules)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Qwen3Model"]}, EMBED),
        ({"architectures": ["Qwen3Model"], "matryoshka_dimensions": [8, 4]}, replace(EMBED, dimensions=(4, 8))),
        ({"classifier_from_token": ["no", "yes"]}, replace(EMBED, task="score", yes_token="yes", no_token="no")),
    ],
)
def test_the_configuration_decides(config: dict[str, Any], expected: PoolingSetup, tmp_path: Path) -> None:
    assert found(make(tmp_path, config)) == expected


def test_models_that_generate_need_no_hidden_size(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "hidden_size": None, "n_embd": 8}
    assert found(make(tmp_path, gpt2)) is None


def test_flags_override_the_folder(tmp_path: Path) -> None:
    folder = make(tmp_path, Pooling=LAST, Normalize={})
    assert found(folder, "--runner", "generate") is None
    config = '{"pooling_type": "MEAN", "normalize": false}'
    assert found(folder, "--pooler-config", config) == replace(EMBED, mean=True, normalize=False)
    (folder / "modules.json").unlink()
    assert found(folder, "--runner", "pooling") == EMBED
    with pytest.raises(ModelFolderError, match="--runner pooling"):
        found(folder, "--pooler-config", config)


def test_overrides_of_vllm_make_a_reranker(tmp_path: Path) -> None:
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    setup = found(make(tmp_path), "--hf-overrides", json.dumps(overrides))
    assert setup is not None and (setup.task, setup.no_token, setup.yes_token) == ("score", "no", "yes")


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ({"Pooling": {"pooling_mode_cls_token": True}}, "pooling_mode_cls_token"),
        ({"Pooling": {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"Pooling": {}}, "none"),
        ({"Pooling": LAST, "Dense": {}}, "Dense"),
        ({"LogitScore": {"true_token_id": "yes"}}, "true_token_id"),
    ],
)
def test_other_modules_are_refused(modules: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=named):
        found(make(tmp_path, **modules))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"classifier_from_token": ["yes"]}, "classifier_from_token"),
        ({"architectures": ["Qwen3Model"], "matryoshka_dimensions": "4"}, "matryoshka_dimensions"),
        ({"architectures": ["Qwen3Model"], "hidden_size": None}, "hidden_size"),
    ],
)
def test_bad_configurations_are_refused(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=named):
        found(make(tmp_path, config))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--runner", "draft"], "--runner"),
        (["--pooler-config", '{"pooling_type": "CLS"}'], "CLS"),
        (["--pooler-config", '{"normalize": 1}'], "normalize"),
        (["--pooler-config", '{"softmax": true}'], "softmax"),
        (["--pooler-config", "{}", "--runner", "generate"], "contradict"),
    ],
)
def test_bad_flags_are_refused(arguments: list[str], named: str) -> None:
    with pytest.raises(FlagsError) as caught:
        flags.parse(["--model", "m", *arguments], {})
    assert any(named in problem for problem in caught.value.problems)
