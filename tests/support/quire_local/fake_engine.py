"""A process that behaves like an engine towards its supervisor, in milliseconds and without torch. Run as a file.

Variables control it: FAKE_LOAD_SECONDS; FAKE_EXIT (a code to end with at once, after a message); FAKE_DRAIN_SECONDS
(the time from SIGTERM to its end, "never" ignores it); FAKE_CHILD (a file for the number of a child that it starts, as
an engine starts its step loop). POST /crash ends it with exit code 3.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
arguments, _ = parser.parse_known_args()
load_seconds = float(os.environ.get("FAKE_LOAD_SECONDS", "0"))
drain_seconds = os.environ.get("FAKE_DRAIN_SECONDS", "0")
started = time.monotonic()
draining = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = time.monotonic() - started >= load_seconds and not draining.is_set()
        match self.path:
            case "/readyz":
                self._answer(200 if ready else 503, "")
            case "/livez":
                self._answer(200, "")
            case "/metrics":
                self._answer(200, 'vllm:num_requests_running{model_name="m"} 2\n')
            case _:
                self._answer(404, "")

    def do_POST(self) -> None:
        print("CUDA error: out of \x1b[31mcookies\x1b[0m", flush=True)
        os._exit(3)

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None: ...


def drain() -> None:
    if drain_seconds == "never":
        return
    time.sleep(float(drain_seconds))
    os._exit(0)


def on_sigterm(*_: object) -> None:
    draining.set()
    threading.Thread(target=drain).start()


def main() -> None:
    if "FAKE_EXIT" in os.environ:
        print("the model folder holds no tokenizer", flush=True)
        sys.exit(int(os.environ["FAKE_EXIT"]))
    signal.signal(signal.SIGTERM, on_sigterm)
    if "FAKE_CHILD" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with Path(os.environ["FAKE_CHILD"]).open("a") as file:
            file.write(f"{child.pid}\n")
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


main()
