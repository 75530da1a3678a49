"""A command line written for vLLM works, or each flag that does not is explained."""

from pathlib import Path

import pytest

from quire_common.errors import FlagsError
from quire_engine.flag_table import FLAGS
from quire_engine.flags import parse
from quire_engine.vllm_flags import ALIASES, ALWAYS, REFUSED, SAME
from tools.vllm_flags import document

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert document() == (ROOT / "docs/vllm-flags.md").read_text(), "make vllm-flags"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_flag_is_explained(name: str) -> None:
    for written in (f"--{name}", f"-{name}") if len(name) <= 4 else (f"--{name}",):
        with pytest.raises(FlagsError) as caught:
            parse(["m", written], {})
        assert any(problem.startswith(f"{written} does not exist here: ") for problem in caught.value.problems)


def test_a_flag_of_vllm_has_one_meaning() -> None:
    assert set(FLAGS.flags) >= SAME | set(ALIASES.values())
    aliases = {alias.lstrip("-") for alias in ALIASES}
    assert not set(REFUSED) & {*FLAGS.flags, *ALWAYS, *aliases} and not SAME & {*ALWAYS, *aliases}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--load-format auto", ""),
        ("--dtype half", "--dtype float16"),
        ("--dtype float", "--dtype float32"),
        ("--max-model-len 32k", "--max-model-len 32000"),
        ("--max-model-len 32K", "--max-model-len 32768"),
        ("--max-model-len 1.5k", "--max-model-len 1500"),
        ("--max-model-len auto", ""),
        ("--max-model-len -1", ""),
        ("--max_model_len=100", "--max-model-len 100"),
        ("-tp 1 -pp 1 -dp=1", ""),
        ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8"),
        ("--generation-config vllm", "--generation-config none"),
        ("--model-impl vllm", "--model-impl native"),
        ("--shutdown-timeout 30", "--drain-timeout 30"),
        ("--no-enable-log-requests", "--no-log-requests"),
        ("--disable-log-requests --enable-chunked-prefill", ""),
        ('--allowed-origins ["https://a.example","*"]', "--allowed-origins https://a.example *"),
        (
            "--hf-overrides.rope_scaling.factor 4 --hf-overrides.rope_scaling.rope_type=yarn",
            '--hf-overrides {"rope_scaling":{"factor":4,"rope_type":"yarn"}}',
        ),
        ('--hf-overrides {"a":{"b":1}} --hf_overrides.a.c=2', '--hf-overrides {"a":{"b":1,"c":2}}'),
    ],
)
def test_vllm_flag_spellings_are_accepted(theirs: str, ours: str) -> None:
    assert parse(["m", *theirs.split()], {}) == parse(["m", *ours.split()], {})


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("-tp 2 -n 2 --headless", "--headless does not exist here: only node 0 serves the API"),
        ("--data-parallel-size 4", "spec.replicas"),
        ("--enable-lora --lora-dtype bfloat16", "--lora-dtype does not exist here: adapters have the type"),
        ("--no-enable-chunked-prefill", "long prompts always run in chunks"),
        ("--no-async-scheduling", "--no-async-scheduling does not exist here"),
        ("-sc.method m", "--speculative-config method: m; the methods are"),
        ("-cc.mode 3", "-cc does not exist here"),
        ("--max-model-len 0", "--max-model-len: expected a whole number of at least 1"),
        ("--max-model-len 1.5", "--max-model-len: expected"),
        ("--hf-overrides.a", "--hf-overrides.a: a value is missing"),
        ("--api-key k --api-key-file f", "contradict each other"),
        ("--root-path llm", "--root-path: expected a path such as /llm"),
    ],
)
def test_unsupported_vllm_options_are_refused_by_name(argv: str, part: str) -> None:
    with pytest.raises(FlagsError) as caught:
        parse(["m", *argv.split()], {})
    assert part in caught.value.problems[0]
