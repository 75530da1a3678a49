"""Data between ranks over sockets: sums with the bits of shared memory, and sends that never wait."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire_engine.runner.parallel.streams import RankConnection, StreamGroup, StreamLost
from quire_kernels.all_reduce.reference import all_reduce

Pair = Callable[[], tuple[RankConnection, RankConnection]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a function that connects two ranks."""
    opened: list[RankConnection] = []

    def make() -> tuple[RankConnection, RankConnection]:
        here, there = socket.socketpair()
        opened.extend((RankConnection(here, 1), RankConnection(there, 0)))
        return opened[-2], opened[-1]

    yield make
    for stream in opened:
        stream.close()


def groups(ranks: int, pair: Pair) -> list[StreamGroup]:
    streams: list[list[RankConnection | None]] = [[None] * ranks for _ in range(ranks)]
    for rank in range(ranks):
        for other in range(rank):
            streams[rank][other], streams[other][rank] = pair()
    return [StreamGroup(own) for own in streams]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3000])  # the largest does not fit into a socket's buffer
def test_all_ranks_get_the_sum_of_shared_memory(ranks: int, dtype: torch.dtype, rows: int, pair: Pair) -> None:
    torch.manual_seed(rows)
    tensors = [torch.randn(rows, 128).to(dtype) for _ in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda group, x: group.all_reduce(x), groups(ranks, pair), tensors))
    expected = all_reduce(tensors)
    assert all(torch.equal(one, expected) for one in found)


def test_the_first_rank_gets_the_columns_of_all(pair: Pair) -> None:
    tensors = [torch.randn(5, width) for width in (3, 4, 1)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda group, x: group.gather(x, (3, 4, 1)), groups(3, pair), tensors))
    assert torch.equal(found[0], torch.cat(tensors, dim=1))


def test_a_sender_does_not_wait_and_the_order_is_kept(pair: Pair) -> None:
    here, there = pair()
    sent = [torch.full((rows, 1024), float(rows)) for rows in (900, 1, 700, 2)]
    for x in sent:
        here.send(x)  # nothing is received yet
    for x in sent:
        assert torch.equal(there.receive(len(x), 1024, x.dtype), x)
    assert there.waited_seconds > 0.0


def test_a_lost_peer_is_reported(pair: Pair) -> None:
    here, there = pair()
    there.close()
    with pytest.raises(StreamLost, match="lost another rank of its group: rank 1: the stream was closed"):
        here.receive(1, 1, torch.float32)
    with pytest.raises(StreamLost, match="lost another rank of its group: rank 1"):
        here.send(torch.zeros(1, 1))
