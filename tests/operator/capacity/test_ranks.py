"""The division of a model among ranks, and the memory of a replica that consists of several."""

import pytest
from model_configs import config_of
from specs import valid_spec

from quire_operator.api import Parallelism
from quire_operator.capacity import fit as capacity
from quire_operator.capacity.fit import Footprint, kv_copies, parallelism_problem, table_bytes, uneven_bytes


def needs_of(
    tensor: int, *, shape: dict[str, int] | None = None, device: capacity.Device = "cpu", **engine: object
) -> Footprint:
    spec = valid_spec(model={"source": "hf://a/b"}, parallelism=shape or {"tensor": tensor}, engine=engine)
    config = config_of()
    return capacity.footprint(spec, config, parameters=config.parameters, dtype="bfloat16", device=device)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16, 32])
def test_sizes_that_divide_a_model(tensor: int) -> None:
    assert parallelism_problem(Parallelism(tensor=tensor), config_of()) is None


@pytest.mark.parametrize(
    ("tensor", "changes", "words"),
    [
        (3, {}, "must divide the 32 attention heads of the model, got 3; set it to 2"),
        (64, {}, "must divide the 32 attention heads of the model, got 64; set it to 32"),
        (
            4,
            {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128},
            "must divide the 6 KV heads of the model or be a multiple of them, got 4; set it to 2",
        ),
        (8, {"intermediate_size": 4004}, "must divide the intermediate size 4004 of the model, got 8; set it to 4"),
        (
            8,
            {"num_local_experts": 4, "moe_intermediate_size": 100},
            "must divide the intermediate size 100 of the model, got 8; set it to 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_a_model(tensor: int, changes: dict[str, object], words: str) -> None:
    problem = parallelism_problem(Parallelism(tensor=tensor), config_of(**changes))
    assert problem == f"spec.parallelism.tensor: {words}"


@pytest.mark.parametrize(("tensor", "copies"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_ranks_beyond_the_kv_heads_keep_copies(tensor: int, copies: int) -> None:
    assert kv_copies(config_of(), Parallelism(tensor=tensor)) == copies
    assert needs_of(tensor).kv_bytes_per_token == copies * 131072


def test_ranks_count_as_processes_and_share_weights() -> None:
    one, four = needs_of(1), needs_of(4)
    assert four.workspace_bytes == 4 * one.workspace_bytes
    assert four.weight_bytes == one.weight_bytes


def test_feed_forward_layers_are_divided_among_gpus() -> None:
    """Each GPU has its own runtime and all logits, and gathers them from a second copy."""
    one, four = (needs_of(tensor, device="gpu", maxBatchedTokens=1000, maxSequences=10) for tensor in (1, 4))
    inner, hidden, vocabulary = 14336, 4096, 128256
    sampling = 10 * vocabulary * 4 * 2
    assert one.workspace_bytes == 2**30 + sampling + 1000 * 2 * (3 * inner + 2 * hidden + vocabulary)
    per_gpu = 3 * inner // 4 + 2 * hidden + 2 * vocabulary
    assert four.workspace_bytes == 4 * (2**30 + sampling + 1000 * 2 * per_gpu)
    assert four.weight_bytes == one.weight_bytes


@pytest.mark.parametrize(("pipeline", "fits"), [(2, None), (32, None), (3, 2), (33, 32), (24, 16)])
def test_pipeline_size_must_divide_the_layers(pipeline: int, fits: int | None) -> None:
    problem = parallelism_problem(Parallelism(pipeline=pipeline), config_of())
    if fits is None:
        assert problem is None
    else:
        words = f"must divide the 32 layers of the model, got {pipeline}; set it to {fits}"
        assert problem == f"spec.parallelism.pipeline: {words}"


def test_each_rank_of_each_stage_is_a_process() -> None:
    one, four = needs_of(1), needs_of(1, shape={"tensor": 2, "pipeline": 2})
    assert four.workspace_bytes == 4 * one.workspace_bytes
    assert four.weight_bytes == one.weight_bytes and four.kv_groups == one.kv_groups


def test_last_stage_has_a_copy_of_a_tied_table() -> None:
    tied = config_of(tie_word_embeddings=True)

    def weights(**shape: int) -> int:
        spec = valid_spec(model={"source": "hf://a/b"}, parallelism=shape)
        needs = capacity.footprint(spec, tied, parameters=tied.parameters, dtype="bfloat16", device="cpu")
        return needs.weight_bytes

    assert weights(pipeline=2) - weights(tensor=2) == table_bytes(tied, 2)


@pytest.mark.parametrize(
    ("shape", "tables"),
    [
        ({"tensor": 2, "nodes": 2}, 0.0),  # every pod has half of both tables
        ({"pipeline": 2, "nodes": 2}, 0.0),  # each pod has one of them
        ({"pipeline": 2}, 0.0),  # one pod has all
        ({"pipeline": 4, "nodes": 4}, 0.5),  # two of four pods have one
        ({"tensor": 2, "pipeline": 2, "nodes": 4}, 0.0),
        ({"tensor": 2, "pipeline": 4, "nodes": 4}, 0.5),
    ],
)
def test_largest_pod_of_a_group(shape: dict[str, int], tables: float) -> None:
    config, parallelism = config_of(), Parallelism(**shape)
    assert uneven_bytes(parallelism, config, 2, parts=parallelism.nodes) == tables * table_bytes(config, 2)


@pytest.mark.parametrize(
    ("shape", "tables"),
    [
        ({"tensor": 4}, 0.0),
        ({"pipeline": 2}, 0.0),
        ({"pipeline": 4}, 0.5),
        ({"tensor": 2, "pipeline": 4, "nodes": 2}, 0.25),  # half of a table, and the mean is a quarter
    ],
)
def test_largest_gpu_of_a_replica(shape: dict[str, int], tables: float) -> None:
    config, parallelism = config_of(), Parallelism(**shape)
    assert uneven_bytes(parallelism, config, 2, parts=parallelism.ranks) == tables * table_bytes(config, 2)


def test_stages_on_gpus_have_feed_forward_layers_each() -> None:
    inner, hidden, vocabulary = 14336, 4096, 128256
    needs = needs_of(
        1, shape={"tensor": 2, "pipeline": 2, "nodes": 2}, device="gpu", maxBatchedTokens=1000, maxSequences=10
    )
    per_gpu = 3 * inner // 2 + 2 * hidden + 2 * vocabulary
    assert needs.workspace_bytes == 4 * (2**30 + 10 * vocabulary * 4 * 2 + 1000 * 2 * per_gpu)
