"""Parallel tests start operators at once: each gets its own process, otherwise one would kill another's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from kube_support.operators import Operators

THREADS, EACH = 6, 20
ZYGOTE = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    number = order["argv"][order["argv"].index("--identity") + 1]
    print(json.dumps({"pid": int(number), "log": order["log"]}), flush=True)
"""


def test_each_thread_gets_its_own_operator_process(tmp_path: Path) -> None:
    zygote = tmp_path / "zygote.py"
    zygote.write_text(ZYGOTE)
    operators, together = Operators(tmp_path, zygote=zygote), Barrier(THREADS)

    def start(first: int) -> list[tuple[int, int]]:
        together.wait()
        return [(number, operators.start(identity=str(number)).pid) for number in range(first, first + EACH)]

    with ThreadPoolExecutor(THREADS) as threads:
        started = [pair for pairs in threads.map(start, range(0, THREADS * EACH, EACH)) for pair in pairs]
    operators.stop()
    assert [pid for _, pid in started] == [number for number, _ in started]
