"""A model with known answers: each token is followed by its successor, whatever came before.

Its embeddings are random, its output layer compares with the embedding of each token's predecessor, and its layers add
nothing: their last products are zero. A step costs what it costs a trained model of the same shape. So a benchmark
decides what the answers are: text that copies the prompt, text that never repeats, or text that misleads a look-up.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.models.random_model import SILENT, LlamaShape, random_weights, write_description


def write_successor_model(folder: Path, shape: LlamaShape, successors: Sequence[int], *, seed: int = 0) -> None:
    """Write a checkpoint in which token i is followed by ``successors[i]``, a permutation of the vocabulary.

    The shape must not have tied embeddings.
    """
    import torch
    from safetensors.torch import save_file

    if shape.tied_embeddings or sorted(successors) != list(range(shape.vocabulary)):
        raise ValueError("a successor model has untied embeddings and one successor for each token")
    tensors = random_weights(shape, seed=seed, silent=SILENT)
    embeddings = tensors["model.embed_tokens.weight"]
    output = torch.empty_like(embeddings)
    output[torch.tensor(successors)] = embeddings
    tensors["lm_head.weight"] = output
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_description(folder, shape)
