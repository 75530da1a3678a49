"""Figures of `quire-demo-tools` on held-out questions: right calls, answers from results, and refusals.

Training shows none of these pairs of a kind of tool and a value. Further sets have cities and words, wordings, or names
of tools that training never shows. An answer is right only if it is exactly what the dialogue has.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tool_dialogues import HELD_OUT_CITIES, Choice, Exchange, Tool, Values
from tool_vocabulary import encode_answer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TRIALS_PER_PASS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A conversation whose last message is the answer that is right."""

    case: str
    tools: tuple[Tool, ...]
    messages: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A trial, whether the model's greedy answer is the right one, and its choices after each token of that one."""

    trial: Trial
    right: bool
    chosen: str


def held_out_choices(words: Sequence[str], held_out_words: Sequence[str]) -> Mapping[str, Choice]:
    """Return the sets of questions: new pairs of known parts, and those with one kind of new part."""
    pairs = Choice(values=Values(words=words), held_out=True, invented_names=0)
    values = Values(words=held_out_words, cities=HELD_OUT_CITIES)
    return {
        "new combinations": pairs,
        "new cities and words": replace(pairs, values=values, held_out=None),
        "new wordings": replace(pairs, held_out_questions=True),
        "new names of tools": replace(pairs, invented_names=1),
    }


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, choices: Mapping[str, Choice], count: int, seed: int
) -> dict[str, Any]:
    """Return the share of right answers per set and case, of ``count`` questions each, and some failures."""
    shares: dict[str, dict[str, float]] = {}
    failures: list[dict[str, object]] = []
    for name, choice in choices.items():
        found = results(model, tokenizer, list(trials(choice, count, random.Random(f"{seed}/evaluation/{name}"))))
        shares[name] = shares_of(found)
        failed = [result for result in found if not result.right]
        failures += [{"set": name, "messages": result.trial.messages, "chosen": result.chosen} for result in failed[:4]]
    return {"questions_per_case": count, "right": shares, "failures": failures}


def shares_of(found: Sequence[Result]) -> dict[str, float]:
    """Return the share of right answers per case."""
    right: dict[str, list[bool]] = defaultdict(list)
    for result in found:
        right[result.trial.case].append(result.right)
    return {case: round(sum(answers) / len(answers), 3) for case, answers in sorted(right.items())}


def trials(choice: Choice, count: int, rng: random.Random) -> Iterator[Trial]:
    """Yield ``count`` trials of each case."""
    for _ in range(count):
        tools = choice.tools(rng, rng.randint(2, 4))
        yield from _of_exchange("one call", tools, choice.calls(rng.choice(tools), rng, 1))
        tools = choice.tools(rng, 3)
        # Two of the four kinds are joinable, so that one of three tools is.
        joinable = next(tool for tool in tools if tool.kind.joinable)
        yield from _of_exchange("two calls", tools, choice.calls(joinable, rng, 2))
        tools = choice.tools(rng, rng.randint(2, 4))
        yield from _of_exchange("no tool fits", tools, choice.other(rng))
        tools = choice.tools(rng, rng.randint(1, 3))
        yield from _of_exchange("tool not declared", tools, choice.undeclared(tools, rng))


def _of_exchange(case: str, tools: tuple[Tool, ...], exchange: Exchange) -> Iterator[Trial]:
    """Yield a trial of the calls, and one of the answer that follows the right calls."""
    messages = exchange.messages()
    if exchange.calls:
        yield Trial(case=case, tools=tools, messages=messages[:2])
        case += ": answer"
    yield Trial(case=case, tools=tools, messages=messages)


@torch.inference_mode()
def results(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Trial]) -> list[Result]:
    """Judge the greedy answers of a model.

    Greedy decoding gives the right answer exactly if each of its tokens is the most likely one after those before it,
    so that one pass over prompt and answer is enough.
    """
    found = []
    for start in range(0, len(asked), _TRIALS_PER_PASS):
        some = asked[start : start + _TRIALS_PER_PASS]
        examples = [encode_answer(tokenizer, trial.tools, trial.messages) for trial in some]
        longest = max(len(example.tokens) for example in examples)
        padding = [tokenizer.pad_token_id] * longest
        rows = torch.tensor([[*example.tokens, *padding][:longest] for example in examples])  # [trials, longest]
        chosen = model(input_ids=rows, use_cache=False).logits.argmax(-1).tolist()
        for trial, example, choices in zip(some, examples, chosen, strict=True):
            answer = [
                (token, choices[place - 1])
                for place, (token, learned) in enumerate(zip(example.tokens, example.learned, strict=True))
                if learned
            ]
            right = all(token == choice for token, choice in answer)
            text = str(tokenizer.decode([choice for _, choice in answer]))
            found.append(Result(trial=trial, right=right, chosen=text))
    return found
