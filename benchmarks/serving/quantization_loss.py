"""What int8 weights (``--quantization int8``) cost a model in accuracy, beside bfloat16 and float32.

The model's linear layers are replaced by the engine's own, as the engine packs them, and all else is transformers'. On
text that the demo models were not trained on: perplexity; and against float32 the error of logits as a share of their
standard deviation, how often the likeliest token is the same, and the divergence of the distributions (KL).

    python benchmarks/serving/quantization_loss.py [MODEL_FOLDER]
"""

import argparse
import math
import pydoc_data.topics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quire_engine.model.linear import LinearBackend, TorchLinearBackend, choose_linear_backend
from quire_engine.model.transformers_backend.checkpoint import pack_linears

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
_HELD_OUT_SHARE = 0.14
"""As the demo models were trained."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Of all texts together; what is against float32 is 0, 1 and 0 for float32 itself."""

    perplexity: float
    logits_error: float
    """Standard deviation of the difference, as a share of that of the logits."""
    same_choice: float
    divergence: float
    """KL from float32's distribution, in nats a token."""


def measure(model: PreTrainedModel, reference: Sequence[Tensor], texts: Sequence[Tensor]) -> Loss:
    """``texts`` are token ids [T], ``reference`` the logits [T - 1, V] that float32 gave for each."""
    nats, divergence, tokens, same = 0.0, 0.0, 0, 0
    squares, spread = 0.0, 0.0
    for ids, expected in zip(texts, reference, strict=True):
        found = logits_of(model, ids)
        nats += functional.cross_entropy(found, ids[1:], reduction="sum").item()
        logs, exact = found.log_softmax(dim=-1), expected.log_softmax(dim=-1)
        divergence += functional.kl_div(logs, exact, reduction="sum", log_target=True).item()
        same += int((found.argmax(dim=-1) == expected.argmax(dim=-1)).sum())
        tokens += len(expected)
        squares += (found - expected).var(dim=-1).sum().item()
        spread += expected.var(dim=-1).sum().item()
    return Loss(
        perplexity=math.exp(nats / tokens),
        logits_error=math.sqrt(squares / spread),
        same_choice=same / tokens,
        divergence=divergence / tokens,
    )


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()  # [T - 1, V]
    return logits


@torch.inference_mode()
def load(folder: Path, dtype: torch.dtype, backend: LinearBackend) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    pack_linears(model, tuple(name for name, module in model.named_modules() if type(module) is nn.Linear), backend)
    return model


def help_texts(folder: Path, count: int, *, seen: bool) -> list[Tensor]:
    sys.path.insert(0, str(MODELS))
    from corpus import build_corpus

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    corpus = build_corpus(pydoc_data.topics.topics, _HELD_OUT_SHARE)
    sections = (corpus.train if seen else corpus.held_out)[:count]
    texts = [torch.tensor(tokenizer(section.text).input_ids[:1024]) for section in sections]
    return [ids for ids in texts if len(ids) > 1]


def random_texts(vocab_size: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (128,), generator=generator) for _ in range(count)]


def variants() -> Iterable[tuple[str, torch.dtype, LinearBackend]]:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield name, dtype, choose_linear_backend(dtype)
        yield f"int8, {name} activations", dtype, choose_linear_backend(dtype, quantization="int8")


def main() -> None:
    parser = argparse.ArgumentParser(description="what int8 weights cost in accuracy")
    parser.add_argument("model", type=Path, nargs="?", default=MODELS / "quire-demo")
    parser.add_argument("--texts", type=int, default=40, help="sections of held-out text")
    parser.add_argument("--seen", action="store_true", help="text the demo models were trained on")
    parser.add_argument("--random", action="store_true", help="random tokens, for a model of random weights")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    exact = load(arguments.model, torch.float32, TorchLinearBackend(torch.float32))
    texts = (
        random_texts(exact.config.vocab_size, arguments.texts)
        if arguments.random
        else help_texts(arguments.model, arguments.texts, seen=arguments.seen)
    )
    reference = [logits_of(exact, ids) for ids in texts]
    del exact
    print(f"{arguments.model.name}: {len(texts)} texts, {sum(map(len, texts)):,} tokens")
    print(f"{'weights':28} {'perplexity':>10} {'logits error':>13} {'same choice':>12} {'KL':>9}")
    for name, dtype, backend in variants():
        loss = measure(load(arguments.model, dtype, backend), reference, texts)
        print(
            f"{name:28} {loss.perplexity:10.3f} {loss.logits_error:12.2%} {loss.same_choice:12.2%}"
            f" {loss.divergence:9.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
