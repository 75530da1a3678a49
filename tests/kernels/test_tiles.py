"""Kernels that multiply with AMX tiles: that they use them, and the state they leave.

``test_levels`` runs this at the level that has tiles, with an emulator if the CPU has none.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.packed_linear import bfloat16_linear, int8_linear, pack_bfloat16, pack_int8, reference
from quire_kernels.paged_attention import paged_attention, plan_attention
from quire_kernels.paged_attention import reference as attention_reference

pytestmark = pytest.mark.skipif(not multiplies_tiles(), reason="kernels are compiled without tiles in this process")


def _count(name: str) -> int:
    return ctypes.c_long.in_dll(ctypes.CDLL(None), name).value


@pytest.fixture
def emulated() -> None:
    if not hasattr(ctypes.CDLL(None), "amx_tile_loads"):
        pytest.skip("this CPU has tiles, and no emulator counts its instructions")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_linear_layers_use_one_product_per_tile(rows: int, threads: int) -> None:
    outputs, inputs = 96, 128
    weight = torch.randn(outputs, inputs).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    row_tiles, column_tiles = -(-rows // 16), outputs // 16
    before = _count("amx_bfloat16_products"), _count("amx_byte_products")
    bfloat16_linear(x, pack_bfloat16(weight))
    int8_linear(x, pack_int8(weight))
    assert _count("amx_bfloat16_products") - before[0] == row_tiles * column_tiles * (inputs // 32)
    assert _count("amx_byte_products") - before[1] == row_tiles * column_tiles * (inputs // 64)
    assert _count("amx_configured_threads") == 0


@pytest.mark.usefixtures("emulated")
def test_layer_whose_inputs_fill_no_tile_uses_vectors() -> None:
    weight, x = torch.randn(40, 2 * 17).bfloat16(), torch.randn(3, 2 * 17).bfloat16()
    before = _count("amx_tile_loads")
    found = bfloat16_linear(x, pack_bfloat16(weight))
    assert _count("amx_tile_loads") == before
    torch.testing.assert_close(found, reference.bfloat16_linear(x, weight), rtol=2e-2, atol=2e-2)


def test_sums_are_kept_between_the_parts_of_a_long_panel() -> None:
    """It has more inputs than a part of a panel, and more rows than two tiles."""
    weight, bias = (torch.randn(70, 1600) / 40.0).bfloat16(), torch.randn(70).bfloat16()
    x = torch.randn(50, 1600).bfloat16()
    pairs, whole = pack_bfloat16(weight, bias), pack_int8(weight, bias)
    torch.testing.assert_close(
        bfloat16_linear(x, pairs), reference.bfloat16_linear(x, weight, bias), rtol=2e-2, atol=2e-2
    )
    for row in (0, 33, 49):
        assert torch.equal(bfloat16_linear(x[row : row + 1], pairs)[0], bfloat16_linear(x, pairs)[row])
        assert torch.equal(int8_linear(x[row : row + 1], whole)[0], int8_linear(x, whole)[row])


@pytest.mark.parametrize(("rows", "inputs"), [(64, 16), (95, 64), (96, 128), (95, 1600), (290, 1600)])
def test_row_in_a_batch_equals_the_single_row_bitwise(rows: int, inputs: int, threads: int) -> None:
    """Results are stored during the next block. The last panel is not whole, and 290 long rows are two chunks."""
    weight, bias = (torch.randn(70, inputs) / inputs**0.5).bfloat16(), torch.randn(70).bfloat16()
    x = torch.randn(rows, inputs).bfloat16()
    x[40] = torch.nan
    pairs = pack_bfloat16(weight, bias)
    found = bfloat16_linear(x, pairs)
    expected = reference.bfloat16_linear(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
    for row in (0, 31, 32, 63, rows - 1):
        assert torch.equal(bfloat16_linear(x[row : row + 1], pairs)[0], found[row])


@pytest.mark.parametrize(
    ("block_size", "head_dim", "group"),
    [(16, 20, 3), (16, 64, 1), (32, 64, 20), (16, 80, 20), (32, 96, 3), (32, 20, 1)],
)
def test_attention_is_right_for_shapes_of_tiles(
    block_size: int, head_dim: int, group: int, fill_cache: Callable[..., Any], assert_close: Callable[..., None]
) -> None:
    queries, contexts = [1, 19, 3, 1], [17, 40, 270, 333]
    filled = fill_cache(contexts, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, block_size=block_size)
    q = torch.randn(sum(queries), 2 * group, head_dim).bfloat16()
    lengths = {"block_tables": filled.block_tables, "query_lens": queries, "context_lens": contexts}
    found = paged_attention(q, filled.cache, plan_attention(**lengths, block_size=block_size), head_dim**-0.5)
    assert_close(found, attention_reference.paged_attention(q, filled.cache, **lengths, scale=head_dim**-0.5))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("query", [1, 16])
def test_attention_uses_tiles_and_releases_them(query: int, threads: int, fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([48], kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[query], context_lens=[48], block_size=16)
    before = _count("amx_bfloat16_products")
    paged_attention(torch.randn(query, 3, 64).bfloat16(), filled.cache, plan, 0.125)
    row_tiles = -(-3 * query // 16)
    # Three blocks of keys by two tiles of components, and of values by four vectors.
    assert _count("amx_bfloat16_products") - before == row_tiles * (3 * 2 + 3 * 4)
    assert _count("amx_configured_threads") == 0


@pytest.mark.usefixtures("emulated")
def test_error_releases_the_tiles(fill_cache: Callable[..., Any]) -> None:
    filled = fill_cache([600], kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    filled.block_tables[0, 20] = 1 << 30
    plan = plan_attention(block_tables=filled.block_tables, query_lens=[40], context_lens=[600], block_size=16)
    with pytest.raises(ValueError, match="block_tables"):
        paged_attention(torch.randn(40, 3, 64).bfloat16(), filled.cache, plan, 0.125)
    assert _count("amx_configured_threads") == 0
