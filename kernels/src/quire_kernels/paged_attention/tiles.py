"""The tiles of the attention kernel for one shape of layers on one GPU.

Each of the three lists of a schedule has tiles and programs of its own. The launches and the rules of the schedule
follow from them.
"""

from dataclasses import dataclass
from typing import Any

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.paged_attention.schedule import LONG, MAX_SHORT_QUERIES, ONE, SHORT, Rule
from quire_kernels.triton_runtime.config import LaunchConfig, config_for
from quire_kernels.triton_runtime.launch import next_power_of_2
from quire_kernels.triton_runtime.target import Target

# The least tokens of a split. A shorter one writes more partial results than 2 % of what it reads, or in a tile of many
# queries 10 %, and mostly waits for its first tile.
_LEAST_SPLIT = {ONE: 256, SHORT: 512, LONG: 512}
_REGISTERS = 1 << 16  # of a multiprocessor
_LOWEST_FREE = 160
"""From this many registers per thread on, the compiler is left free: a limit made it spill where it had not before."""
_MOST_SPLITS = {ONE: 64, SHORT: 32, LONG: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemList:
    """The launch of a list's items for one shape of layers."""

    kind: int
    config: LaunchConfig
    rows: int
    """BLOCK_M, the rows of a query tile."""
    group: int
    visits: bool

    @property
    def per_processor(self) -> int:
        """Return how many programs one multiprocessor is to run at once."""
        return _programs_per_processor(self.config, self.rows)

    def rule(self, processors: int, kv_heads: int, split_tokens: int | None) -> Rule:
        return Rule(
            tile=self.config.blocks["TILE"],
            queries=self.rows // self.group,
            fill=max(1, processors * self.per_processor // kv_heads),
            least=split_tokens or _LEAST_SPLIT[self.kind],
            most=_MOST_SPLITS[self.kind],
        )

    def options(self, target: Target) -> dict[str, Any]:
        limit = register_limit(target, self.per_processor, self.config.num_warps)
        return {
            "LIST": self.kind,
            "BLOCK_M": self.rows,
            "TILE": self.config.blocks["TILE"],
            "VISITS": self.visits,
            "PLAIN": self.kind == LONG,
            "INTERPRETED": INTERPRETED,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
            **({} if limit is None else {"maxnreg": limit}),
        }


def list_rules(
    lists: tuple[ItemList, ItemList, ItemList], processors: int, kv_heads: int, split_tokens: int | None
) -> tuple[Rule, Rule, Rule]:
    one, short, long = (each.rule(processors, kv_heads, split_tokens) for each in lists)
    return one, short, long


def item_lists(
    shape: dict[str, int], cache_bytes: int, query_bytes: int, split_tokens: int | None, target: Target
) -> tuple[ItemList, ItemList, ItemList]:
    """Return the launches of the three lists; with fixed splits only the first has items."""
    head_dim, group = shape["HEAD_DIM"], shape["GROUP"]
    key = config_key(head_dim, cache_bytes)
    split, long = (config_for(f"paged_attention.{name}", target, key) for name in ("split", "attend"))
    one, rows_of_one = split, short_rows(1, group, head_dim, query_bytes)
    if split_tokens is not None:
        one = config_for("paged_attention.fixed", target, key)
        rows_of_one = max(one.blocks["BLOCK_M"], next_power_of_2(group))
    rows_of_short = short_rows(MAX_SHORT_QUERIES, group, head_dim, query_bytes)
    rows_of_long = max(long.blocks["BLOCK_M"], next_power_of_2(group))
    return (
        ItemList(kind=ONE, config=one, rows=rows_of_one, group=group, visits=True),
        ItemList(kind=SHORT, config=split, rows=rows_of_short, group=group, visits=False),
        ItemList(kind=LONG, config=long, rows=rows_of_long, group=group, visits=False),
    )


def config_key(head_dim: int, cache_bytes: int) -> str:
    """Return the key of the best tiles: the padded head dim, and the bytes of an element of the cache."""
    return f"head_dim={padded_head_dim(head_dim)} bytes={cache_bytes}"


def short_rows(max_queries: int, group: int, head_dim: int, query_bytes: int) -> int:
    """Return the rows of a query tile of the split kernel: whole tokens, at least those of a matrix instruction.

    query_bytes  bytes of an element of the queries
    """
    wanted = next_power_of_2(max_queries * group)
    # More rows of wide heads do not fit into registers, nor with the cache's tiles into 99 KiB of shared memory.
    most = 64 if padded_head_dim(head_dim) * query_bytes**2 <= 512 else 32
    return max(16, min(most, wanted), next_power_of_2(group))


def _programs_per_processor(config: LaunchConfig, rows: int) -> int:
    """Return how many programs of a persistent launch one multiprocessor is to run at once.

    The table is for the rows of one decoded token. Tiles of more rows, which verify drafts, need twice the registers
    and more shared memory.
    """
    most: int = config.blocks["PROGRAMS_PER_SM"]
    return most if rows <= max(16, config.blocks.get("BLOCK_M", 16)) else max(1, min(most - 1, 2))


def layer_shape(kv_heads: int, group: int, head_dim: int, block_size: int) -> dict[str, int]:
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
    }


def padded_head_dim(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def register_limit(target: Target, programs: int, num_warps: int) -> int | None:
    """Return the registers per thread with which ``programs`` of ``num_warps`` warps fit on a multiprocessor.

    None: the compiler needs no limit, or takes none (in the interpreter and for AMD).
    """
    if target.is_interpreter or target.amd:
        return None
    limit = _REGISTERS // (programs * num_warps * target.warp_size) // 8 * 8
    return limit if limit < _LOWEST_FREE else None
