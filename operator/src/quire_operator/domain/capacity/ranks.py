"""The division of a model among the ranks of a replica, and of the ranks among its pods. Pure arithmetic.

With tensor parallelism, every rank has a share of each layer, of the embedding table and of the LM head. If there are
fewer KV heads than ranks, several ranks keep the same head. With pipeline parallelism, each stage has as many layers as
the others; the first one has the embedding table, the last one the LM head.
"""

from quire_common.model_memory import ModelConfig
from quire_operator.domain.resource.parallelism import MAX_SIZE, Parallelism


def parallelism_problem(shape: Parallelism, config: ModelConfig) -> str | None:
    """Return why the model cannot be divided as ``spec.parallelism`` says, or None; the engine has the same rules."""
    if config.layers % shape.pipeline:
        fits = max(size for size in range(1, shape.pipeline) if config.layers % size == 0)
        return (
            f"spec.parallelism.pipeline: must divide the {config.layers} layers of the model, got {shape.pipeline}; "
            f"set it to {fits}"
        )
    rule = _broken_rule(config, shape.tensor)
    if rule is None:
        return None
    fits = max(size for size in range(1, min(shape.tensor, MAX_SIZE)) if _broken_rule(config, size) is None)
    return f"spec.parallelism.tensor: must {rule}, got {shape.tensor}; set it to {fits}"


def _broken_rule(config: ModelConfig, tensor: int) -> str | None:
    if config.heads % tensor:
        return f"divide the {config.heads} attention heads of the model"
    if config.kv_heads % tensor and tensor % config.kv_heads:
        return f"divide the {config.kv_heads} KV heads of the model or be a multiple of them"
    if config.intermediate_size % tensor:
        return f"divide the intermediate size {config.intermediate_size} of the model"
    return None


def kv_copies(config: ModelConfig, shape: Parallelism) -> int:
    """Return the number of ranks that keep the same KV head."""
    return max(1, shape.tensor // config.kv_heads)


def table_bytes(config: ModelConfig, width: int) -> int:
    """Return the size of the embedding table with numbers of ``width`` bytes; the LM head has the same size."""
    return config.vocab_size * config.hidden_size * width


def uneven_bytes(shape: Parallelism, config: ModelConfig, width: int, *, parts: int) -> int:
    """Return by how much the weights of the largest of ``parts`` exceed their mean: the pods of a group, or the GPUs.

    Layers are divided evenly; the two tables are in the first and in the last stage.
    """
    if shape.pipeline == 1 or parts == 1:
        return 0
    table = table_bytes(config, width)
    largest = table * min(shape.ranks // parts, shape.tensor) // shape.tensor
    return max(0, largest - 2 * table // parts)
