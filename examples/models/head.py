"""A draft head for the demo model, in the layout of EAGLE: its layers, its training and its checkpoint.

EAGLE (arXiv 2401.15077) predicts hidden states instead of tokens. The head reads the target's hidden state of a token,
as it enters the LM head, and the embedding of the next token. It returns the hidden state of that next token, which the
target's own LM head turns into the token after it. Its own output is its next input, so that it can go on.

Shapes: B rows, T tokens of a row, H hidden size, V vocabulary, P positions that count in the loss.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from learning import IGNORED, Progress, RowStream, Schedule, make_optimizers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

ARCHITECTURE = "EagleLlamaForCausalLM"
INTERMEDIATE_SIZE, KV_HEADS = 256, 2
_FEATURE_WEIGHT = 0.2
_OWN_INPUT_SHARE = 0.6
"""The share of the second pass's inputs that are the head's own outputs: drafts after the first see no others."""


class EagleHead(nn.Module):
    """One decoder layer over hidden states and embeddings; the target's embedding and LM head are not part of it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        decoder = LlamaModel(config)
        decoder.layers[0].input_layernorm = nn.Identity()
        decoder.norm = nn.Identity()
        del decoder.embed_tokens
        self.decoder = decoder

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the predicted hidden states [B, T, H]; ``embedded`` [B, T, H] are the tokens after ``hidden``."""
        fused = self.fc(torch.cat((embedded, hidden), dim=-1))
        predicted: Tensor = self.decoder(inputs_embeds=fused, use_cache=False).last_hidden_state
        return predicted

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint."""
        return {name.removeprefix("decoder."): tensor for name, tensor in self.state_dict().items()}


def head_config(target: LlamaConfig) -> LlamaConfig:
    """Return the configuration of a head: one layer as wide as the target's, with smaller inner sizes."""
    fields = target.to_dict() | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_key_value_heads": KV_HEADS,
    }
    return LlamaConfig.from_dict(fields)


def make_head(target: LlamaForCausalLM, seed: int) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(head_config(target.config))


def train_head(
    head: EagleHead,
    target: LlamaForCausalLM,
    stream: RowStream,
    schedule: Schedule,
    *,
    precision: torch.dtype,
    report: Callable[[Progress], None],
) -> None:
    """Run the schedule; the target does not change."""
    optimizers = make_optimizers(head, schedule)
    head.train()
    generator = torch.Generator().manual_seed(0)
    for step in range(schedule.steps):
        length = schedule.row_length(step)
        inputs, labels = stream.take(schedule.tokens_per_step // length, length)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss = _loss(head, target, inputs, labels, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), schedule.max_gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
        report(Progress(step=step, loss=loss.item()))
    head.eval()


def _loss(
    head: EagleHead, target: LlamaForCausalLM, inputs: Tensor, labels: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the mean loss of two passes: with the target's hidden states, and with some of the head's own."""
    with torch.no_grad():
        hidden = target.model(input_ids=inputs, use_cache=False).last_hidden_state.float()  # [B, T, H]
        embedded = target.model.embed_tokens(inputs)[:, 1:]
    # Pair i has the hidden state of token i and token i + 1; its result should be the hidden state of token i + 1.
    wanted, counted = hidden[:, 1:], labels[:, 1:] != IGNORED
    first = head(embedded, hidden[:, :-1])
    own = first.detach().float()
    shifted = torch.cat((hidden[:, :1], own[:, :-1]), dim=1)
    replaced = torch.rand(shifted.shape[:2], generator=generator) < _OWN_INPUT_SHARE
    second = head(embedded, torch.where(replaced[..., None], shifted, hidden[:, :-1]))
    with torch.no_grad():
        taught = functional.log_softmax(target.lm_head(wanted).float()[counted], dim=-1)  # [P, V]
    losses = []
    for predicted in (first, second):
        chosen = functional.log_softmax(target.lm_head(predicted).float()[counted], dim=-1)
        feature = functional.smooth_l1_loss(predicted.float()[counted], wanted[counted])
        tokens = functional.kl_div(chosen, taught, reduction="batchmean", log_target=True)
        losses.append(tokens + _FEATURE_WEIGHT * feature)
    return 0.5 * (losses[0] + losses[1])


def save_head(folder: Path, head: EagleHead, vocab_size: int) -> None:
    """Write the head in bfloat16, under the names of published EAGLE heads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in head.tensors().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_dict() | {"architectures": [ARCHITECTURE], "dtype": "bfloat16", "vocab_size": vocab_size}
    config = {name: value for name, value in config.items() if name in _CONFIG_NAMES}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)


_CONFIG_NAMES = frozenset(
    (
        *("architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act"),
        *("hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "pad_token_id"),
        *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters"),
        *("tie_word_embeddings", "vocab_size"),
    )
)


def load_head(folder: Path) -> EagleHead:
    """Return the head in a folder, in float32."""
    head = EagleHead(LlamaConfig.from_pretrained(folder))
    stored: Mapping[str, Tensor] = load_file(folder / "model.safetensors")
    own = ("fc.",)
    head.load_state_dict({name if name.startswith(own) else f"decoder.{name}": x.float() for name, x in stored.items()})
    return head.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The drafts after one position of a text, and the tokens of the text that they should be."""

    drafts: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        """The number of drafts before the first that differs from its token."""
        pairs = zip(self.drafts, self.tokens, strict=True)
        return next((number for number, (draft, token) in enumerate(pairs) if draft != token), len(self.drafts))


@torch.inference_mode()
def greedy_steps(
    head: EagleHead,
    target: LlamaForCausalLM,
    token_ids: Sequence[int],
    start: int,
    drafts: int,
    *,
    limit: int | None = None,
) -> list[Chain]:
    """Return the greedy drafts of each step that speculation takes for a text, from token ``start`` on.

    The drafts of a step at position p follow the known tokens up to p, of which the target has computed those before p.
    The next step is at the first token after the accepted drafts and the one that follows them. With the ``limit`` of
    an engine, the text may have ended by itself before it, and drafts end one token before it.
    """
    ids = torch.tensor([list(token_ids)])
    hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
    end = len(token_ids)
    chains: list[Chain] = []
    position = start
    while position < end - 1:
        count = drafts if limit is None else min(drafts, limit - position - 2)
        # A draft after the end of the text is never right.
        following = token_ids[position + 1 : position + 1 + count]
        wanted = (*following, *[-1] * (0 if limit is None else count - len(following)))
        known, states = ids[:, 1 : position + 1], hidden[:, :position]
        found: list[int] = []
        for _ in wanted:
            predicted = head(target.model.embed_tokens(known), states)[:, -1:]
            token = target.lm_head(predicted).argmax(-1)
            found.append(int(token))
            known, states = torch.cat((known, token), dim=1), torch.cat((states, predicted), dim=1)
        chains.append(Chain(drafts=tuple(found), tokens=wanted))
        position += chains[-1].accepted + 1
    return chains
