"""The demo models in examples/models: the committed pair is complete and generates text, and its script is correct."""

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_scripts import MODELS, example_modules
from fixed_drafts import use_every_draft
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions, SpeculationOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.core.stats import Counters
from quire_engine.engine import make_engine
from quire_engine.runner import load_model

PAIR = ("quire-demo", "quire-demo-draft")
MAX_PAIR_BYTES = 16_000_000


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture(scope="module")
def script() -> Iterator[SimpleNamespace]:
    names = ("corpus", "dialogues", "vocabulary", "learning", "checkpoint", "evaluation", "train")
    with example_modules(*names) as modules:
        yield modules


@pytest.fixture(scope="module")
def pair(script: SimpleNamespace) -> SimpleNamespace:
    target, tokenizer = script.evaluation.load(MODELS / PAIR[0])
    draft, _ = script.evaluation.load(MODELS / PAIR[1])
    return SimpleNamespace(target=target, draft=draft, tokenizer=tokenizer)


def test_pair_fits_in_sixteen_megabytes() -> None:
    sizes = [path.stat().st_size for name in PAIR for path in (MODELS / name).iterdir()]
    assert len(sizes) == 14
    assert sum(sizes) <= MAX_PAIR_BYTES


@pytest.mark.parametrize("name", PAIR)
def test_weights_match_their_record(name: str) -> None:
    record = read_json(MODELS / "training.json")
    weights = (MODELS / name / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["weights_sha256"][name]


@pytest.mark.parametrize("name", PAIR)
def test_tensor_shapes_match_the_config(name: str) -> None:
    config = read_json(MODELS / name / "config.json")
    raw = (MODELS / name / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        expected |= {
            f"{prefix}.input_layernorm.weight": [hidden],
            f"{prefix}.post_attention_layernorm.weight": [hidden],
            f"{prefix}.self_attn.q_proj.weight": [queries, hidden],
            f"{prefix}.self_attn.k_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.v_proj.weight": [keys, hidden],
            f"{prefix}.self_attn.o_proj.weight": [hidden, queries],
            f"{prefix}.mlp.gate_proj.weight": [intermediate, hidden],
            f"{prefix}.mlp.up_proj.weight": [intermediate, hidden],
            f"{prefix}.mlp.down_proj.weight": [hidden, intermediate],
        }
    header.pop("__metadata__", None)
    assert {key: value["shape"] for key, value in header.items()} == expected
    assert {value["dtype"] for value in header.values()} == {"BF16"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True


def test_draft_shares_everything_that_turns_text_into_tokens() -> None:
    target, draft = (MODELS / name for name in PAIR)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / file).read_bytes() == (draft / file).read_bytes(), file


def test_end_of_text_and_end_of_turn_both_stop(script: SimpleNamespace, pair: SimpleNamespace) -> None:
    stops = read_json(MODELS / PAIR[0] / "generation_config.json")["eos_token_id"]
    names = [script.vocabulary.EOS, script.vocabulary.TURN_END]
    assert stops == pair.tokenizer.convert_tokens_to_ids(names)


@given(text=st.text(max_size=80))
def test_any_text_survives_encoding(pair_tokenizer: Any, text: str) -> None:
    ids = pair_tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert pair_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.fixture(scope="module")
def pair_tokenizer(pair: SimpleNamespace) -> Any:
    return pair.tokenizer


def test_chat_template_writes_one_turn_per_message(pair: SimpleNamespace) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is a list?"},
    ]
    assert pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|begin_of_text|>"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nWhat is a list?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "content": "x"}], "role must be system, user or assistant, not tool"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "must be the first message"),
    ],
)
def test_chat_template_rejects_invalid_messages_with_a_reason(
    pair: SimpleNamespace, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(Exception, match=reason):
        pair.tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is a list comprehension?", ("list", "expressions", "brackets")),
        ("Explain the with statement.", ("with", "statement", "context")),
        ("Hello!", ("Hello",)),
    ],
)
def test_target_answers_in_english_about_python_and_stops(
    script: SimpleNamespace, pair: SimpleNamespace, question: str, words: tuple[str, ...]
) -> None:
    answered = script.evaluation.sample(pair.target, pair.tokenizer, question, temperature=0.0)
    assert all(word in answered.answer for word in words), answered.answer
    assert answered.stopped


def test_draft_model_mostly_agrees_with_the_target(script: SimpleNamespace, pair: SimpleNamespace) -> None:
    questions = script.evaluation.SAMPLE_QUESTIONS
    measured = script.evaluation.agreement(
        pair.target, pair.draft, pair.tokenizer, questions, max_new_tokens=48, drafted_tokens=4
    )
    assert measured.positions > 100
    assert measured.share > 0.6
    assert measured.tokens_per_step > 2.0


TOPICS = ("slicings", "lambda expressions", "dictionaries", "the assert statement", "exceptions", "sequence types")


def test_engine_accepts_as_many_drafts_as_evaluation_predicts(script: SimpleNamespace, pair: SimpleNamespace) -> None:
    """The models' choices along the target's answers predict how many of four drafts a step are accepted."""
    evaluation, drafts, longest = script.evaluation, 4, 64
    questions = [*evaluation.SAMPLE_QUESTIONS, *(f"What are {topic}?" for topic in TOPICS)]
    predicted = [0, 0]
    for question in questions:
        matches = evaluation.greedy_matches(pair.target, pair.draft, pair.tokenizer, question, max_new_tokens=longest)
        position = 1  # the first token comes from the prompt's step, without drafts
        while position < len(matches):
            proposed = min(drafts, longest - position - 1)
            accepted = next((n for n, match in enumerate(matches[position:]) if not match), proposed)
            predicted = [predicted[0] + min(accepted, proposed), predicted[1] + proposed]
            position += min(accepted, proposed) + 1
    prompts = [evaluation.prompt_ids(pair.tokenizer, question)[0].tolist() for question in questions]
    options = SpeculationOptions(method="draft_model", model=MODELS / PAIR[1], max_tokens=drafts)
    counters = answer_with_drafts(options, prompts, longest)
    assert counters.draft_tokens > 500
    assert counters.accepted_tokens / counters.draft_tokens == pytest.approx(predicted[0] / predicted[1], rel=0.03)


def answer_with_drafts(options: SpeculationOptions, prompts: list[list[int]], longest: int) -> Counters:
    """Answer greedily in float32 with as many drafts as possible, and return the engine's counters."""
    config = EngineConfig(
        model=ModelOptions(path=MODELS / PAIR[0], dtype="float32", max_model_len=512),
        cache=CacheOptions(kv_cache_memory_bytes=2**27),
        scheduler=SchedulerOptions(max_num_seqs=16),
        server=ServerOptions(),
        speculation=options,
        threads=2,
    )
    engine = make_engine(load_model(config), scheduler=config.scheduler, speculation=options)
    use_every_draft(engine._scheduler._speculation)
    params = SamplingParams(max_tokens=longest, temperature=0.0)
    for key, prompt in enumerate(prompts):
        assert engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0)) is None
    while engine.has_work:
        engine.step()
    return engine.counters


def test_held_out_text_is_not_in_the_training_text(script: SimpleNamespace) -> None:
    corpus = script.corpus.build_corpus(script.train.topics, script.train.HELD_OUT_SHARE)
    held_out = {block.text for section in corpus.held_out for block in section.blocks}
    trained = [block.text for section in corpus.train for block in section.blocks]
    assert held_out
    assert held_out.isdisjoint(trained)


def test_sections_are_cut_at_headings_and_code_keeps_its_lines(script: SimpleNamespace) -> None:
    text = (
        "Loops\n*****\n\nA loop is comma-\nseparated by the\nreader.\n\n   for x in y:\n       go()\n\n"
        "Methods\n=======\n\nx.go(a, b)\n\n   Go to the place.\n"
    )
    loops, methods = script.corpus.parse_sections("topic", text)
    assert (loops.title, methods.title) == ("Loops", "Methods")
    assert [(block.kind, block.text) for block in loops.blocks] == [
        ("prose", "A loop is comma-separated by the reader."),
        ("code", "    for x in y:\n        go()"),
    ]
    assert [(block.kind, block.indent, block.text) for block in methods.blocks] == [
        ("entry", 0, "x.go(a, b)"),
        ("prose", 3, "Go to the place."),
    ]


def test_every_subject_name_has_one_answer(script: SimpleNamespace) -> None:
    corpus = script.corpus.build_corpus(script.train.topics, 0.0)
    subjects = script.dialogues.build_subjects(corpus.train)
    names = [name for subject in subjects for name in subject.names]
    assert len(set(names)) == len(names) > 400
    for subject in subjects:
        assert subject.answer == subject.answer.strip()
        assert not subject.answer.endswith(":")


def test_dialogues_follow_the_seed_and_train_on_answers_only(script: SimpleNamespace, pair: SimpleNamespace) -> None:
    corpus = script.corpus.build_corpus(script.train.topics, 0.0)
    subjects = script.dialogues.build_subjects(corpus.train)
    for number in range(40):
        first, again = (script.dialogues.dialogue(subjects[number], subjects, random.Random(number)) for _ in range(2))
        assert first == again
        example = script.vocabulary.encode_dialogue(pair.tokenizer, first)
        assert len(example.tokens) == len(example.learned)
        said = pair.tokenizer.decode([t for t, learned in zip(example.tokens, example.learned, strict=True) if learned])
        answers = [message["content"] for message in first if message["role"] == "assistant"]
        assert said == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def test_labels_are_one_position_ahead_in_whole_examples(script: SimpleNamespace) -> None:
    ignored = script.learning.IGNORED
    example = script.vocabulary.Example(tokens=(1, 2, 3, 4, 5), learned=(False, False, True, True, True))
    stream = script.learning.RowStream(lambda epoch, row_tokens: [example], pad=0, seed=0)
    inputs, labels = stream.take(rows=2, length=7)
    assert inputs.tolist() == [[1, 2, 3, 4, 5, 0, 0]] * 2
    assert labels.tolist() == [[ignored, 3, 4, 5, ignored, ignored, ignored]] * 2


@given(sizes=st.lists(st.integers(1, 10), max_size=30))
def test_packing_keeps_every_example_whole(packing: Any, sizes: list[int]) -> None:
    learning, example = packing
    examples = [example(tokens=(number,) * size, learned=(True,) * size) for number, size in enumerate(sizes)]
    rows = learning.pack(examples, 10)
    assert all(0 < len(row.tokens) == len(row.learned) <= 10 for row in rows)
    packed = [list(run) for row in rows for _, run in itertools.groupby(row.tokens)]
    assert sorted(packed) == [list(example.tokens) for example in examples]


@pytest.fixture(scope="module")
def packing(script: SimpleNamespace) -> tuple[Any, Any]:
    return script.learning, script.vocabulary.Example


@pytest.mark.parametrize("first", [1, 3, 4, 9])
def test_split_text_is_complete_and_each_piece_has_the_bos(script: SimpleNamespace, first: int) -> None:
    text = script.vocabulary.Example(tokens=tuple(range(10, 24)), learned=(False, *[True] * 13))
    pieces = list(script.vocabulary.split_text(text, max_tokens=5, first_tokens=first))
    assert all(piece.tokens[0] == 10 and not piece.learned[0] and len(piece.tokens) <= 5 for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens[1:]] == list(text.tokens[1:])


def test_learning_rate_rises_then_falls(script: SimpleNamespace) -> None:
    schedule = script.learning.Schedule(steps=100, learning_rate=1.0)
    rates = [schedule.rate(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == 1.0
    assert 0 < rates[-1] < 0.05


def test_training_reduces_the_loss_and_is_deterministic(script: SimpleNamespace) -> None:
    import torch

    learning = script.learning
    shape = learning.Shape(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    ids = learning.TokenIds(bos=0, eos=1, pad=2, turn_end=3)
    tokens = tuple(range(4, 20))
    example = script.vocabulary.Example(tokens=tokens, learned=(True,) * len(tokens))

    def trained(teacher: Any = None) -> tuple[list[float], Any]:
        model = learning.build_model(shape, 32, 128, ids, seed=1)
        losses: list[float] = []
        learning.train(
            model,
            learning.RowStream(lambda epoch, row_tokens: [example], pad=ids.pad, seed=1),
            learning.Schedule(steps=30, learning_rate=0.02, tokens_per_step=64, row_tokens=16, long_row_tokens=32),
            precision=torch.float32,
            report=lambda progress: losses.append(progress.loss),
            teacher=teacher,
        )
        return losses, model

    losses, model = trained()
    repeated, _ = trained()
    assert losses == repeated
    assert losses[-1] < 0.3 * losses[0]
    distilled, _ = trained(teacher=model)
    assert distilled[-1] < 0.3 * distilled[0]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--precision", "int4"], ["--nonsense"]])
def test_wrong_arguments_are_refused_in_a_few_lines(
    script: SimpleNamespace, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.train.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_check_names_the_missing_file(
    script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.train.main(["--check", str(tmp_path)]) == 2
    assert "model.safetensors" in capsys.readouterr().out.replace("\n", "")


def test_check_names_the_folder_that_cannot_be_loaded(
    script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODELS / PAIR[1], tmp_path / PAIR[0])
    weights = tmp_path / PAIR[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert script.train.main(["--check", str(tmp_path)]) == 2
    assert f"cannot load {tmp_path / PAIR[0]}" in capsys.readouterr().out.replace("\n", "")


def test_out_that_is_a_file_is_refused(
    script: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    assert script.train.main(["--out", str(tmp_path / "taken")]) == 2
    assert "--out" in capsys.readouterr().err


def test_speculative_steps_count_accepted_and_own_tokens(script: SimpleNamespace) -> None:
    steps = script.evaluation._speculative_steps
    assert steps([True] * 10, 4) == 2
    assert steps([False] * 10, 4) == 10
    assert steps([True, True, False, True], 4) == 2
