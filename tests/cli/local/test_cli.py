"""The command line for users: help, and one screen with exit code 2 for each mistake."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from run_quire import run_quire

from quire_cli.local import plan
from quire_cli.local.machine import Machine

DOCUMENT = """\
apiVersion: quire.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: "file://./model"}
  engine: {extraArgs: [--load-format, dummy]%s}
  %s
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

Quire = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Quire:
    """Return a function that runs the command in an empty folder and returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))

    return partial(run_quire, capfd)


def write(text: str, name: str = "f.yaml") -> None:
    Path(name).write_text(text)
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text(json.dumps(MODEL))


@pytest.mark.parametrize(
    "args",
    [(), ("up",), ("plan",), *((command, "--help") for command in ("up", "plan", "explain", "top"))],
)
def test_help_shows_a_command_to_copy(quire: Quire, args: tuple[str, ...]) -> None:
    _, out, err = quire(*args)
    assert "quire " + (args[0] if args else "up") + " " in out + err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("command", ["up", "plan", "explain", "top", "simulate"])
def test_list_of_commands_has_the_first_sentence_of_each(quire: Quire, command: str) -> None:
    _, listed, _ = quire("--help")
    _, own, _ = quire(command, "--help")
    words = " ".join(listed.replace("│", " ").split())
    summary = words.split(f" {command} ")[-1].split(". ")[0].split(", ")[0]
    assert summary in " ".join(own.split())


def test_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys, quire_cli.app; print([name for name in ('aiohttp', 'httpx', 'kubernetes') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_version(quire: Quire) -> None:
    assert quire("--version") == (0, "quire 0.1.0\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("up", "-f", "nowhere.yaml"), "nowhere.yaml does not exist"),
        (("up", "-f", "."), ". is a folder"),
        (("up", "-f", "bad.yaml"), "bad.yaml is not YAML, line 2"),
        (("up", "-f", "wrong.yaml"), "wrong.yaml: 2 problems"),
        (("up", "-f", "f.yaml", "--prt", "1"), "No such option"),
        (("up", "-f", "f.yaml", "--port", "0"), "--port"),
        (("up", "-f", "f.yaml", "--port", "x"), "--port"),
        (("up", "-f", "f.yaml", "--exit-after", "soon"), "is not a duration"),
        (("up", "-f", "huge.yaml"), "chat does not fit"),
        (("up", "-f", "absent.yaml"), "does not exist"),
        (("up", "-f", "claim.yaml"), "is a volume of a cluster"),
        (("down",), "No such command"),
        (("bench", "--base-url", "http://x/v1"), "quire bench was removed Use `vllm bench serve"),
        (("plan", "-f", "nowhere.yaml"), "nowhere.yaml does not exist"),
        (("plan", "-f", "f.yaml", "--gpu", "Voodoo"), '"Voodoo" does not name one known GPU'),
        (("plan", "-f", "f.yaml", "--memory", "lots"), "is not an amount of memory"),
        (("plan", "-f", "f.yaml", "--gpu", "H100", "--memory", "1Gi"), "not both"),
    ],
)
def test_user_error_fits_one_screen_with_exit_code_2(quire: Quire, args: tuple[str, ...], message: str) -> None:
    write(DOCUMENT % ("", ""))
    write("a: b\n c: d\n", "bad.yaml")
    write(DOCUMENT % (", dtype: int3", "replicas: many"), "wrong.yaml")
    write(DOCUMENT % (", kvCache: {size: 900Ti}", ""), "huge.yaml")
    write((DOCUMENT % ("", "")).replace("./model", "./absent"), "absent.yaml")
    write((DOCUMENT % ("", "")).replace("file://./model", "pvc://models"), "claim.yaml")
    code, out, err = quire(*args)
    assert code == 2
    assert out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 24


def test_port_in_use_error_suggests_a_free_port(quire: Quire) -> None:
    write((DOCUMENT % (", maxModelLength: 64, kvCache: {size: 64Mi}", "")).replace("./model", "./tiny"))
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text(json.dumps({**MODEL, "hidden_size": 64, "num_hidden_layers": 1}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = quire("up", "-f", "f.yaml", "--port", str(port))
    assert (code, out) == (2, "")
    assert f"port {port} is in use" in err
    assert "use another port: --port " in err


def test_a_state_folder_that_cannot_be_written_is_named(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    write(DOCUMENT % ("", ""))
    Path("taken").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(Path("taken").resolve()))
    code, out, err = quire("up", "-f", "f.yaml")
    assert (code, out) == (2, "")
    assert "cannot be written: Not a directory" in err and "XDG_STATE_HOME" in err


def test_problems_beyond_one_screen_are_counted(quire: Quire) -> None:
    fields = "".join(f", field{i}: 1" for i in range(50))
    write(DOCUMENT % (fields, ""))
    code, _, err = quire("up", "-f", "f.yaml")
    assert code == 2
    assert "… and 20 more" in err


def test_plan_computes_what_fits_on_a_gpu(quire: Quire) -> None:
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", "resources: {limits: {nvidia.com/gpu: 1}}"))
    code, out, _ = quire("plan", "-f", "f.yaml", "--gpu", "H100 80GB")
    assert code == 0
    assert "128 KiB = 2 × 32 layers × 8 KV heads × 128 × 2 bytes" in out
    assert "15 GiB = 8.03 B parameters × 2 bytes" in out
    assert "fits" in out


def test_plan_counts_the_ranks_of_a_cpu(quire: Quire) -> None:
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", "parallelism: {tensor: 16}"))
    code, out, _ = quire("plan", "-f", "f.yaml", "--memory", "64Gi")
    assert code == 0
    assert "16, each with 957 MiB of the weights" in out
    assert "256 KiB = 2 × 32 layers × 16 KV heads × 128 × 2 bytes" in out
    assert "about 13.4 GiB" in out


def test_plan_counts_the_gpus_of_a_replica(quire: Quire) -> None:
    gpus = "parallelism: {tensor: 2}\n  resources: {limits: {nvidia.com/gpu: 2}}"
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", gpus))
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert code == 0
    assert "2, each with 7.48 GiB of the weights, on a GPU of its own; together they use the memory below" in out
    assert "2 × T4 16GB" in out and "2 × H100 80GB" in out
    code, out, _ = quire("plan", "-f", "f.yaml", "--gpu", "H200 141GB")
    assert code == 0 and "2 × H200 141GB" in out
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", "parallelism: {pipeline: 2}"))
    code, out, _ = quire("plan", "-f", "f.yaml", "--gpu", "H100 80GB")
    assert code == 0 and "2 × H100 80GB" in out
    assert "2 in 2 stages of 1, each with about 7.48 GiB of the weights, on a GPU of its own; together" in out
    gpus = "parallelism: {tensor: 2, pipeline: 2, nodes: 2}\n  resources: {limits: {nvidia.com/gpu: 2}}"
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", gpus))
    code, out, _ = quire("plan", "-f", "f.yaml", "--gpu", "H100 80GB")
    assert code == 0 and "4 × H100 80GB" in out and "in 2 pods of 2 GPUs; together" in " ".join(out.split())


def test_plan_uses_the_memory_of_a_mig_slice(quire: Quire) -> None:
    mig = "resources: {limits: {nvidia.com/mig-%s: 1, memory: 4Gi}}"
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", mig % "3g.40gb"))
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert code == 0 and "MIG slice 3g.40gb" in out and "40 GiB" in out
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", mig % "1g.10gb"))
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert code == 1 and "spec.parallelism.tensor" not in out
    write(DOCUMENT % (", maxModelLength: 8192, dtype: BFloat16", mig % "new"))
    code, _, err = quire("plan", "-f", "f.yaml")
    assert code == 2 and "the memory of a MIG slice new is not known" in err


def test_plan_refuses_a_tensor_size_that_does_not_divide(quire: Quire) -> None:
    write(DOCUMENT % (", maxModelLength: 8192", "parallelism: {tensor: 5}"))
    code, _, err = quire("plan", "-f", "f.yaml", "--memory", "64Gi")
    assert code == 2
    assert "spec.parallelism.tensor: must divide the 32 attention heads of the model, got 5; set it to 4" in err


def test_plan_counts_int8_on_a_cpu_and_refuses_it_on_a_gpu(quire: Quire) -> None:
    in_int8 = DOCUMENT.replace("[--load-format, dummy]", "[--load-format, dummy, --quantization, int8]")
    write(in_int8 % (", maxModelLength: 512, dtype: BFloat16", ""))
    code, out, _ = quire("plan", "-f", "f.yaml", "--memory", "32Gi")
    assert code == 0
    assert "8.03 B parameters in int8, with embeddings in bfloat16" in out
    code, _, err = quire("plan", "-f", "f.yaml", "--gpu", "H100 80GB")
    assert code != 0
    assert "--quantization int8 is for CPUs" in err


def test_plan_counts_fp8_on_gpus_that_have_it(quire: Quire) -> None:
    in_fp8 = DOCUMENT.replace("[--load-format, dummy]", "[--load-format, dummy, --quantization, fp8]")
    write(in_fp8 % (", maxModelLength: 512", "resources: {limits: {nvidia.com/gpu: 1}}"))
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert code == 0
    assert "8.03 B parameters in fp8, with embeddings in bfloat16" in out
    assert "L4 24GB" in out and "A100" not in out and "A10G" not in out
    code, _, err = quire("plan", "-f", "f.yaml", "--gpu", "A100 80GB")
    assert code != 0
    assert "--quantization fp8 needs compute capability 8.9, and A100 80GB has less" in err


def test_plan_counts_the_draft_model(quire: Quire) -> None:
    speculation = ", speculation: {method: DraftModel, draft: {source: 'file://./small'}%s}"
    write(DOCUMENT % (", maxModelLength: 512, dtype: BFloat16" + speculation % "", ""))
    small = Path("small")
    small.mkdir()
    config = json.loads(Path("model/config.json").read_text()) | {"num_hidden_layers": 4}
    (small / "config.json").write_text(json.dumps(config))
    code, out, _ = quire("plan", "-f", "f.yaml", "--memory", "32Gi")
    assert code == 0
    assert "16 KiB per token in the KV cache: file://./small" in out
    assert "128 KiB = 2 × 32 layers" in out
    code, out, _ = quire("plan", "-f", "f.yaml", "--memory", "18Gi")
    assert code == 1
    assert "remove spec.engine.speculation" in out
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    code, _, err = quire("plan", "-f", "f.yaml", "--memory", "32Gi")
    assert code == 2
    assert "its vocabulary has 5 tokens" in err


def test_plan_divides_this_machine_as_up_would(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is divided among the replicas of all LLMDeployments of the file."""
    machine = Machine(memory_bytes=24 * 2**30, cpus=2, gpu_memory_bytes=(), multiplies_bfloat16=True)
    monkeypatch.setattr(plan, "this_machine", lambda: machine)
    one = DOCUMENT % (", maxModelLength: 512, dtype: BFloat16", "")
    write(one)
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert code == 0 and "│ this machine " in out
    write(one + "---\n" + one.replace("chat", "other").replace("engine:", "replicas: 2\n  engine:"))
    code, out, _ = quire("plan", "-f", "f.yaml")
    assert (code, out.count("this machine ÷ 3 replicas"), out.count("8 GiB")) == (1, 2, 2)


def test_plan_exits_with_1_and_a_remedy_if_nothing_fits(quire: Quire) -> None:
    write(DOCUMENT % (", maxModelLength: 8192", "resources: {limits: {nvidia.com/gpu: 1}}"))
    code, out, _ = quire("plan", "-f", "f.yaml", "--gpu", "T4")
    assert code == 1
    remedies = (
        "give a replica 19.9 GiB; use a GPU such as A10G 24GB; set spec.parallelism.tensor and the GPUs in "
        "spec.resources to 2."
    )
    assert f"It does not fit. Possible remedies: {remedies}" in " ".join(out.split())
    code, out, _ = quire("plan", "-f", "f.yaml", "--memory", "19Gi")
    assert code == 1
    assert "set spec.engine.maxModelLength to 1744 or less" in out
