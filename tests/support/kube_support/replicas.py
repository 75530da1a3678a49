"""The metrics of an engine for pods in which nothing runs: a page on a loopback address."""

from contextlib import AbstractContextManager
from typing import Final

from page_server import page_server

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


def engines_at(address: str, page: str) -> AbstractContextManager[str]:
    """Answer with this page for all replicas with this address."""
    return page_server(lambda _: (200, page), address=address, port=engine.HTTP_PORT)
