"""The table of flat KV ids that sparse attention reads, written once from what stands in it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from dsv4_fusions import dispatch
from dsv4_fusions.kv_index import Selection, Span
from dsv4_fusions.ops.kv_index_table import reference


def table_implementation(elements: int, implementation: str | None = None) -> str:
    """The implementation that writes a table of `elements` ids; raises as `dispatch.choose` does."""
    unsupported = dispatch.triton_unsupported()
    if elements >= 2**31:
        unsupported = f"it numbers up to 2^31 ids and the table has {elements}"
    return dispatch.choose(implementation, {"triton": unsupported, "xla": None})


def flat_kv_index_table(
    parts: Sequence[Span | Selection],
    batch: int,
    kv_len: int,
    *,
    multiple: int = 1,
    compact: bool = False,
    implementation: str | None = None,
) -> Int32[Array, "batch*tokens topk"] | tuple[Int32[Array, "batch*tokens topk"], Int32[Array, "batch*tokens"]]:
    """Writes the parts' tables side by side, as ids of the flat KV of the batch.

    The same integers as step by step: `joined` tables, ids outside [0, kv_len) emptied, `local_to_flat_kv_index`,
    `compact`, `pad_topk`. One kernel works out each id, or reads a selected one, and writes it once.

    Args:
      parts: what stands in the table, from the left (`kv_index.window_span`, `compressed_span`, `selection`). Leading
        axes broadcast to [batch, tokens].
      batch: batch entries.
      kv_len: rows of KV per batch entry.
      multiple: the width becomes the next multiple of this, with empty slots at the end.
      compact: move the ids of every row to its front, in the order they stand in, and count them.
      implementation: "triton", "xla", or None for the first of them that runs on the target.

    Returns:
      [batch * tokens, topk] int32, -1 in empty slots; with compact a tuple of that and the number of ids in each row.
      Integers: no gradient flows through.

    Raises:
      ValueError: no parts, parts of different tokens or leading axes that do not fit the batch, batch, kv_len or
        multiple below 1, too many rows for flat int32 ids, or an implementation that is unknown or cannot run here.
    """
    parts = tuple(parts)
    for name, value in {"batch": batch, "kv_len": kv_len, "multiple": multiple}.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    if batch * kv_len >= 2**31:
        raise ValueError(f"kv_len: got {batch} x {kv_len} rows, wanted fewer than 2**31 for flat int32 ids")
    shape = table_shape(parts, batch)
    width = -(-shape[2] // multiple) * multiple
    if table_implementation(shape[0] * shape[1] * width, implementation) == "xla" or 0 in shape:
        table, count = reference.flat_table(parts, batch, kv_len, multiple, compact)
    else:
        from dsv4_fusions.ops.kv_index_table import triton

        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, parts))
        parts = jax.tree.unflatten(structure, dispatch.align_manual_axes(*leaves))
        table, count = triton.flat_table(parts, shape, int(kv_len), width, compact)
    return (table, count) if compact else table


def table_shape(parts: tuple[Span | Selection, ...], batch: int, name: str = "parts") -> tuple[int, int, int]:
    """[batch, tokens, topk] of the table that the parts make, for a number of batch entries.

    Args:
      parts: of the table.
      batch: batch entries.
      name: of the parts in the error.

    Returns:
      The shape.

    Raises:
      ValueError: no parts, or such as do not fit each other or the batch.
    """
    shapes = [part.shape for part in parts]
    if not shapes:
        raise ValueError(f"{name}: got no parts, wanted at least one Span or Selection")
    for shape in shapes:
        if len(shape) < 2 or shape[-2] != shapes[0][-2] or shape[:-2] not in [(), (1,), (batch,)]:
            wanted = f"[tokens, k] or [{batch}, tokens, k] for the batch, with the same tokens"
            raise ValueError(f"{name}: got shapes {', '.join(map(str, shapes))}, wanted {wanted}")
    return batch, shapes[0][-2], sum(shape[-1] for shape in shapes)
