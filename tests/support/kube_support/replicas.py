"""The metrics of an engine for pods in which nothing runs: a page on a loopback address."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from quire_common.contract import engine

IDLE: Final = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:kv_cache_usage_perc 0.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
"""
BUSY: Final = """\
vllm:num_requests_running 4
vllm:num_requests_waiting 40
vllm:kv_cache_usage_perc 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
"""


@contextmanager
def engines_at(address: str, page: str) -> Iterator[None]:
    """Answer with this page for all replicas with this address."""

    class Replica(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((address, engine.HTTP_PORT), Replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
