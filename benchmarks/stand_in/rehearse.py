#!/usr/bin/env python3
"""Rehearse a part of on_gpu.sh without a GPU, over a stand-in for its driver.

    python -m benchmarks.stand_in.rehearse {kernels,serving,tune} [--capability 90] [--op OP ...]

Everything on the host is real: cases, checks, Triton's compilation for the GPU, the arguments of each launch, the
search of the tuner, the scheduler and the runner with graphs. Nothing runs on a device, so that there are neither times
nor results. Each part says what it leaves out. The exit status is 1 if anything failed.
"""

import argparse
import sys
from collections.abc import Callable

import torch

from benchmarks.kernels.kernel_cases import Case
from benchmarks.kernels.run import chosen_cases
from benchmarks.kernels.tuning import Parameters, search
from benchmarks.report import show_table
from benchmarks.serving.in_process import Clients, Load
from benchmarks.stand_in.cuda import RehearsedAccelerator, StandInCuda
from benchmarks.stand_in.runner import MODELS, make_layout, make_runner, model_config
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.engine import Engine
from quire_engine.runner.device.graphs import GraphSizes
from quire_kernels.triton_runtime.config import config_for, launch_config, op_tables, override, recorded
from quire_kernels.triton_runtime.device import target_of
from quire_kernels.triton_runtime.stand_in import StandIn, standing_in

CPU = torch.device("cpu")
SMALLEST_MODEL = "Llama-3.2-1B"
TUNED = "rms_norm"
ROWS, TOKENS, LONGEST = 4, 128, 256


def rehearse_kernels(arguments: argparse.Namespace, stand_in: StandIn) -> list[str]:
    """Launch every small case of run.py; return the failures."""
    rows, failures = [], []
    for case in chosen_cases(arguments, tiny=True):
        before = stand_in.launches
        problem = _launch(case)
        rows.append([str(case), str(stand_in.launches - before), "failed" if problem else "launched"])
        failures += [problem] if problem else []
    show_table(
        "Small cases over the stand-in, bfloat16",
        ["case", "launches", ""],
        rows,
        ["Left out: times, comparison with references and other libraries' kernels, the large cases."],
    )
    return failures


def _launch(case: Case) -> str | None:
    """Return why a case cannot be launched, or None."""
    try:
        case.prepare(CPU, torch.bfloat16).call()
    # As in run.py, a case must not affect those after it.
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}"
    return None


def rehearse_tune(arguments: argparse.Namespace, stand_in: StandIn) -> list[str]:
    """Compile and launch the configurations that the tuner tries first for small cases; return the failures."""
    arguments.op = arguments.op or [TUNED]
    calls: dict[tuple[str, str], list[Callable[[], object]]] = {}
    for case in chosen_cases(arguments, tiny=True):
        prepared = case.prepare(CPU, torch.bfloat16)
        with recorded() as asked:
            prepared.call()
        for pair in asked:
            calls.setdefault(pair, []).append(prepared.call)
    rows: list[list[str]] = []
    failures: list[str] = []
    for (kernel, key), of_key in sorted(calls.items()):
        tried = 0

        def score(parameters: Parameters, kernel: str = kernel, key: str = key, of_key=of_key) -> float:  # type: ignore[no-untyped-def]
            nonlocal tried
            tried += 1
            try:
                with override(kernel, key, launch_config(parameters)):
                    for call in of_key:
                        call()
            except Exception as error:
                failures.append(f"{kernel} [{key}] {dict(parameters)}: {type(error).__name__}: {error}")
            return 1.0  # no configuration is better than the default here

        op, _, name = kernel.partition(".")
        default = config_for(kernel, target_of(CPU), key).options
        found = search(op_tables(op)[name].space, default, score, lambda: False)
        assert not found.worth_writing
        rows.append([f"{kernel} [{key}]", str(tried)])
    show_table(
        f"Configurations over the stand-in: {', '.join(arguments.op)}",
        ["kernel [key]", "compiled and launched"],
        rows,
        ["Left out: times, and so the choice and the table; other ops (--op names them)."],
    )
    return failures


@torch.inference_mode()
def rehearse_serving(arguments: argparse.Namespace, stand_in: StandIn) -> list[str]:
    """Serve prompts by the device runner with captured graphs; return the failures."""
    cuda = StandInCuda(stand_in)
    with cuda.watching():
        config = model_config(arguments.model)
        sizes = GraphSizes(decode=(1, ROWS), mixed=(TOKENS,))
        runner = make_runner(
            config,
            max_rows=ROWS,
            max_tokens=TOKENS,
            max_model_len=LONGEST,
            graph_sizes=sizes,
            accelerator=RehearsedAccelerator(cuda),
        )
        runner.capture_graphs()
        layout = make_layout(config, max_rows=ROWS, max_model_len=LONGEST)
        limits = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=LONGEST)
        scheduler = Scheduler(limits, layout)
        engine = Engine(scheduler=scheduler, runner=runner, overlap=True)
        clients = Clients(engine, vocab_size=config.vocab_size, max_model_len=LONGEST)
        load = Load(concurrency=ROWS, requests=2 * ROWS, prompt=100, output=8)
        served = clients.serve(load)
        runner.close()
    counts = [
        ["requests answered", str(served.requests)],
        ["output tokens", str(served.output_tokens)],
        ["graphs captured", str(len(sizes.in_order()))],
        ["graphs replayed", str(cuda.replays)],
        ["launches", str(stand_in.launches)],
    ]
    show_table(
        f"Serving over the stand-in: {arguments.model}'s shape",
        ["", ""],
        counts,
        ["Left out: tokens/s, TTFT, ITL, the floor, the measurement of memory, reading of weights."],
    )
    wanted = load.requests * load.output
    failures = [] if cuda.replays else ["no graph was replayed"]
    if served.output_tokens != wanted:
        failures.append(f"{served.output_tokens} output tokens instead of {wanted}")
    return failures


PARTS = {"kernels": rehearse_kernels, "serving": rehearse_serving, "tune": rehearse_tune}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, help="the part of on_gpu.sh")
    parser.add_argument("--capability", type=int, default=90, help="the compute capability, such as 90 (default)")
    parser.add_argument("--op", nargs="+", help=f"kernels: only these ops; tune: these ops (default {TUNED})")
    parser.add_argument("--model", choices=MODELS, default=SMALLEST_MODEL, help=f"serving (default {SMALLEST_MODEL})")
    parsed = parser.parse_args()
    parsed.quick = False
    return parsed


def main() -> None:
    arguments = parse_arguments()
    with standing_in(arguments.capability) as stand_in:
        failures = PARTS[arguments.part](arguments, stand_in)
    for failure in failures:
        print(failure, file=sys.stderr)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
