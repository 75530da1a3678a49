"""Model folders for `quire-engine --model`: Hugging Face layout, bfloat16 weights, two stop tokens.

This is the last stage of training. It takes a trained model and its tokenizer and writes a folder. It does not depend
on how they were trained.
"""

import json
from pathlib import Path

from learning import TokenIds
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import BOS, EOS, PAD, TURN_END, TURN_START

MODEL_FOLDER = "quire-demo"
DRAFT_FOLDER = "quire-demo-draft"


def save(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, ids: TokenIds) -> None:
    """Write model and tokenizer. The end of a turn stops a chat; the end of the text stops any generation."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=ids.bos,
        eos_token_id=[ids.eos, ids.turn_end],
        pad_token_id=ids.pad,
        do_sample=True,
        temperature=0.3,
        top_p=0.95,
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_special_tokens(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _name_special_tokens(folder: Path) -> None:
    """Name the special tokens so that transformers before 5 reads them; tokenizer.json defines which are special."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("backend", "extra_special_tokens"):
        config.pop(key, None)
    _write_json(path, config | {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True})
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    _write_json(folder / "special_tokens_map.json", names | {"additional_special_tokens": [TURN_START, TURN_END]})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
