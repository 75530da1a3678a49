"""The loop of the engine process on a node other than node 0: it serves no requests, and lives as long as its group.

Its API process supervises it like an engine: when the group ends, another process joins the next one.
"""

import os

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineStartError
from quire_engine.ipc.channel import Channel
from quire_engine.ipc.messages import Ping, Ready, Shutdown, StepExpected
from quire_engine.runner.parallel.node import GroupEnded, GroupRuns, Node


def serve_node(config: EngineConfig, channel: Channel) -> None:
    """Join a group and stay in it until a shutdown. Raise EngineStartError when the group ends."""
    node = Node(config, channel.wake)
    try:
        while _answer(channel):
            match node.take():
                case GroupRuns():
                    channel.send(_ready(config))
                case GroupEnded(reason=reason, exit_code=exit_code):
                    raise EngineStartError(reason, exit_code)
                case None:
                    channel.wait()
    finally:
        node.close()


def _answer(channel: Channel) -> bool:
    """Handle all messages that have arrived; return False on a shutdown."""
    while (message := channel.receive()) is not None:
        match message:
            case Ping():
                channel.send(StepExpected(0.0))
            case Shutdown():
                return False
    return True


def _ready(config: EngineConfig) -> Ready:
    """Return the report of a node that has joined; what rank 0 has measured is unknown here."""
    return Ready(
        pid=os.getpid(),
        model_bytes=0,
        kv_cache_bytes=0,
        num_blocks=0,
        block_size=config.cache.block_size,
        max_model_len=0,
        dtype=config.model.dtype,
        weights="",
        phase_seconds={},
    )
