#!/usr/bin/env python3
"""What prefix caching is worth to multi-turn chat, with a real model in this process.

Conversations begin with one system prompt for all, and grow: each turn sends all that was said so far and a new
message. So many users talk at once; each sends the next turn when the answer is there, and a new user comes when one is
done. The same conversations with caching on and off, by turns; figures are medians. The hit rate is the share of prompt
tokens that were found. Answers have fixed lengths, so both do the same work; how many answers are the same, token for
token, is told as well (16-bit arithmetic rounds differently in batches of other shapes).
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import report
from engines import Bench, add_model_options, ask, load, random_tokens
from report import at_least_one

from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.engine import Step

MESSAGE = (20, 60)
ANSWER = (20, 60)


@dataclass(frozen=True, kw_only=True)
class Turn:
    message: list[int]
    answer_length: int


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Conversations as planned: what users will say, and how long the answers are."""

    system_prompt: list[int]
    conversations: list[list[Turn]]

    @property
    def turns(self) -> int:
        return len(self.conversations[0])


@dataclass
class Talk:
    """A conversation under way."""

    said: list[int]
    number: int = 0
    answer: list[int] = field(default_factory=list)
    sent: float = 0.0


@dataclass
class Run:
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    prompt_tokens: int = 0
    found_tokens: int = 0
    computed_tokens: int = 0
    ttft_by_turn: dict[int, list[float]] = field(default_factory=dict)
    cached_by_turn: dict[int, list[float]] = field(default_factory=dict)
    """Shares of the prompt."""
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class Users:
    """Sends the turns of a chat to an engine, so many conversations at once."""

    def __init__(self, bench: Bench, chat: Chat, *, caching: bool) -> None:
        self._chat = chat
        self._engine = bench.engine(prefix_caching=caching)
        self._talks: dict[int, Talk] = {}
        self._next = 0
        self._run = Run()

    def run(self, at_once: int) -> Run:
        began, began_cpu = perf_counter(), process_time()
        for _ in range(at_once):
            self._begin()
        while self._engine.has_work:
            step = self._engine.step()
            if step is not None:
                self._take(step)
        run, counters = self._run, self._engine.counters
        run.seconds, run.cpu_seconds = perf_counter() - began, process_time() - began_cpu
        run.found_tokens, run.computed_tokens = counters.prefix_cache_hits, counters.scheduled_tokens
        run.prompt_tokens = counters.prompt_tokens
        return run

    def _begin(self) -> None:
        if self._next < len(self._chat.conversations):
            self._talks[self._next] = Talk(said=list(self._chat.system_prompt))
            self._send(self._next)
            self._next += 1

    def _send(self, key: int) -> None:
        talk = self._talks[key]
        turn = self._chat.conversations[key][talk.number]
        talk.said = talk.said + talk.answer + turn.message
        talk.answer, talk.sent = [], perf_counter()
        ask(self._engine, key, talk.said, turn.answer_length)

    def _take(self, step: Step) -> None:
        run, output, now = self._run, step.output, perf_counter()
        for key, token_id in zip(output.keys, output.token_ids, strict=True):
            talk = self._talks[key]
            if not talk.answer:
                run.ttft_by_turn.setdefault(talk.number, []).append(now - talk.sent)
            talk.answer.append(token_id)
        for finished in output.finished:
            talk = self._talks[finished.key]
            cached = finished.num_cached_tokens / len(talk.said)
            run.cached_by_turn.setdefault(talk.number, []).append(cached)
            run.answers[finished.key, talk.number] = talk.answer
            talk.number += 1
            if talk.number < self._chat.turns:
                self._send(finished.key)
            else:
                self._begin()


def plan_chat(arguments: argparse.Namespace, vocab_size: int) -> Chat:
    chance = random.Random(1)
    return Chat(
        system_prompt=random_tokens(chance, arguments.system_prompt, vocab_size),
        conversations=[
            [
                Turn(
                    message=random_tokens(chance, chance.randint(*MESSAGE), vocab_size),
                    answer_length=chance.randint(*ANSWER),
                )
                for _ in range(arguments.turns)
            ]
            for _ in range(arguments.conversations)
        ],
    )


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--conversations", type=at_least_one, default=16, help="in all (default 16)")
    parser.add_argument("--users", type=at_least_one, default=4, help="who talk at once (default 4)")
    parser.add_argument("--turns", type=at_least_one, default=6, help="of each conversation (default 6)")
    parser.add_argument("--system-prompt", type=at_least_one, default=400, help="tokens (default 400)")
    parser.add_argument("--runs", type=at_least_one, default=3, help="with and without, by turns (default 3)")
    parser.add_argument("--kv-cache-mib", type=at_least_one, default=256)
    add_model_options(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bench = load(
        arguments,
        cache=CacheOptions(kv_cache_memory_bytes=arguments.kv_cache_mib * 2**20),
        scheduler=SchedulerOptions(max_num_seqs=max(16, arguments.users)),
        max_model_len=arguments.system_prompt + arguments.turns * (MESSAGE[1] + ANSWER[1]),
    )
    chat = plan_chat(arguments, bench.model.vocab_size)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    with report.progress() as progress:
        task = progress.add_task("runs", total=2 * arguments.runs)
        first = Chat(system_prompt=chat.system_prompt, conversations=chat.conversations[:1])
        Users(bench, first, caching=True).run(1)  # warm-up
        for _ in range(arguments.runs):
            for caching, measured in runs.items():
                measured.append(Users(bench, chat, caching=caching).run(arguments.users))
                progress.advance(task)
    present(arguments, str(bench), runs)


def summarize(runs: Sequence[Run], caching: bool) -> dict[str, Any]:
    def by_turn(values: Sequence[dict[int, list[float]]]) -> list[float]:
        return [statistics.median(value for of_run in values for value in of_run[turn]) for turn in sorted(values[0])]

    seconds, last = statistics.median(run.seconds for run in runs), runs[-1]
    answered = sum(map(len, last.answers.values()))
    return {
        "caching": caching,
        "seconds": seconds,
        "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
        "prompt_tokens": last.prompt_tokens,
        "answer_tokens": answered,
        "found_tokens": last.found_tokens,
        "computed_tokens": last.computed_tokens,
        "hit_rate": last.found_tokens / last.prompt_tokens,
        "answer_tokens_per_second": answered / seconds,
        "median_ttft_seconds": statistics.median(
            value for run in runs for values in run.ttft_by_turn.values() for value in values
        ),
        "ttft_seconds_by_turn": by_turn([run.ttft_by_turn for run in runs]),
        "cached_share_by_turn": by_turn([run.cached_by_turn for run in runs]),
    }


def present(arguments: argparse.Namespace, model: str, runs: dict[bool, list[Run]]) -> None:
    rows = [summarize(measured, caching) for caching, measured in runs.items()]
    on, off = rows
    with_cache, without = runs[True][-1].answers, runs[False][-1].answers
    same = sum(without[place] == answer for place, answer in with_cache.items())
    report.show(
        "Multi-turn chat with and without prefix caching",
        ["caching", "hit rate", "tokens computed", "seconds", "CPU s", "answer tokens/s", "median TTFT"],
        [
            [
                "on" if row["caching"] else "off",
                f"{row['hit_rate']:.1%}",
                f"{row['computed_tokens']:,}",
                f"{row['seconds']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{row['answer_tokens_per_second']:,.0f}",
                f"{row['median_ttft_seconds'] * 1e3:,.0f} ms",
            ]
            for row in rows
        ],
        notes=[
            f"{model}: {arguments.conversations} conversations of {arguments.turns} turns, {arguments.users} at once,"
            f" system prompt {arguments.system_prompt} tokens; {on['prompt_tokens']:,} prompt and"
            f" {on['answer_tokens']:,} answer tokens; medians of {arguments.runs} runs by turns",
            f"on against off: {off['seconds'] / on['seconds']:.2f}× the tokens/s,"
            f" {off['cpu_seconds'] / on['cpu_seconds']:.2f}× per CPU second;"
            f" {same} of {len(with_cache)} answers the same",
        ],
    )
    report.save(arguments.json, rows)
    if arguments.plot:
        draw(arguments.plot, model, rows)


def draw(path: Path, model: str, rows: Sequence[dict[str, Any]]) -> None:
    figure = report.new_figure(f"Multi-turn chat: {model}")
    ttft_axes, hit_axes = figure.subplots(1, 2)
    for row in rows:
        turns = range(1, len(row["ttft_seconds_by_turn"]) + 1)
        label = "caching on" if row["caching"] else "caching off"
        ttft_axes.plot(turns, [value * 1e3 for value in row["ttft_seconds_by_turn"]], "o-", label=label)
        hit_axes.plot(turns, [value * 100 for value in row["cached_share_by_turn"]], "o-", label=label)
    ttft_axes.set(xlabel="turn", ylabel="median time to first token (ms)", ylim=(0, None))
    hit_axes.set(xlabel="turn", ylabel="% of the prompt found, median", ylim=(-2, 102))
    ttft_axes.legend()
    hit_axes.legend(loc="center right")
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
