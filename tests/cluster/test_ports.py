"""Ports for servers that restart on the same port."""

import socket

import pytest

from quire_cluster import ports


def test_ports_differ_and_are_not_ephemeral() -> None:
    chosen = ports.free_ports(50)
    assert len(set(chosen)) == 50
    assert max(chosen) < 32_768


def test_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy, socket.socket() as free:
        for holder in (busy, free):
            holder.bind(("127.0.0.1", 0))
        busy_port, free_port = busy.getsockname()[1], free.getsockname()[1]
        free.close()
        monkeypatch.setattr(ports, "CANDIDATES", (busy_port, free_port))
        assert ports.free_ports(1) == (free_port,)


def test_consecutive_ports_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.consecutive_free_ports(4)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", first + 1))
        monkeypatch.setattr(ports, "CANDIDATES", (first, first + 2))
        assert ports.consecutive_free_ports(2) == first + 2
