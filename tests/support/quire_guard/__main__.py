"""``python -m quire_guard``: measure and print as JSON; ``--update`` writes the bounds instead."""

import argparse
import json
import os

from quire_engine.ipc.process import compute_environment


def measure() -> dict[str, dict[str, float]]:
    """Return the measures by kind, as in ``bounds.ALLOWED``."""
    from benchmarks.models.random_model import SHAPES
    from quire_guard.ratios import measured_ratios
    from quire_guard.scenarios import bench_of, memory_amounts, scheduler_counts, step_counts
    from quire_guard.served import served_counts

    found = {**scheduler_counts(), **step_counts(), **served_counts()}
    exact = {name: value for name, value in found.items() if ": more " in name or "compilations" in name}
    bench = bench_of(SHAPES["5M"])
    return {
        "exact": exact,
        "counts": {name: value for name, value in found.items() if name not in exact},
        "amounts": memory_amounts(bench),
        "ratios": measured_ratios(bench),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m quire_guard", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the bounds")
    arguments = parser.parse_args()
    # Thread pools read it when torch loads: one thread, whose time is then the total.
    os.environ.update(compute_environment(1, os.environ))
    measures = measure()
    if arguments.update:
        from quire_guard import bounds

        bounds.write(measures)
        print(f"{bounds.FILE}: renewed")
    else:
        print(json.dumps(measures, indent=1))


if __name__ == "__main__":
    main()
