"""The postmix and its single-pass gradient in Triton's own language, launched through jax-triton.

The tiles, the order of the sums and the roundings are those of triton.py, and so are the bits. A program works on one
group of heads of one token, or of one chunk of tokens where it sums weight gradients.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dsv4_fusions import numerics, rope, triton_launch
from dsv4_fusions.ops.inv_rope_postmix import tiling

_CHANNELS = tl.constexpr(tiling.CHANNELS)
_BACKWARD_CHANNELS = tl.constexpr(tiling.BACKWARD_CHANNELS)
_block = triton.constexpr_function(tiling.block)


def forward(weights, x, tables: rope.RopeTables | None):
    """The postmix of x, or of inv_rope(x) where tables are given.

    Args:
      weights: (m,) or (u, v), see reference.py.
      x: [..., tokens, heads, head_dim], bfloat16 or float16.
      tables: None, or [..., tokens, rope_dim] with leading axes that broadcast against x's.
    """
    (out,) = _launch(vha_postmix, weights, tables, [x], stages=1)
    return out.reshape(x.shape)


def single_pass_backward(weights, x, tables: rope.RopeTables | None, g, wanted):
    """(dx, dweights) in one pass over x and g; see `xla.single_pass_backward`."""
    if weights is None:  # only its type is used
        weights = (jnp.zeros((g.shape[-2],) * 2, g.dtype),)
    chunk = tiling.CHUNK if wanted.weights else 1
    results = _launch(
        vha_postmix_bwd,
        weights,
        tables,
        [x if wanted.weights else g, g],
        stages=tiling.backward_stages(weights),
        chunk=chunk,
        rows_out=wanted.activation,
        partials_out=wanted.weights,
        CHUNK=chunk,
        WANT_DX=wanted.activation,
        WANT_DW=wanted.weights,
    )
    dx = results.pop(0).reshape(g.shape) if wanted.activation else None
    if not wanted.weights:
        return dx, None
    return dx, tuple(
        numerics.sum_in_order(partials[0])[..., : w.shape[-2], : w.shape[-1]].reshape(w.shape)
        for partials, w in zip(results, weights, strict=True)
    )


def _launch(kernel, weights, tables, streams, stages, chunk=1, rows_out=True, partials_out=False, **constants):
    """[1, tokens, groups, heads, head_dim], then of each weight [1, chunks, groups, block, block] partial gradients."""
    like = streams[-1]
    padded = tiling.padded_weights(weights)
    rows = [x.reshape(1, -1, len(padded[0]), like.shape[-2] // len(padded[0]), like.shape[-1]) for x in streams]
    # Rows of x stand in for tables that a kernel does not read.
    table_rows = [t[None] for t in tiling.table_rows(tables, like)] or [rows[-1]] * 2

    def launch(w0, w1, *rows):
        entries, tokens, groups, heads, head_dim = rows[-1].shape
        chunks = -(-tokens // chunk)
        outputs = [jax.ShapeDtypeStruct(rows[-1].shape, like.dtype)] if rows_out else []
        if partials_out:
            outputs += [jax.ShapeDtypeStruct((entries, chunks, *w0.shape[1:]), jnp.float32)] * len(weights)
        return triton_launch.call(
            kernel,
            [w0, w1, *rows],
            outputs,
            programs=entries * chunks * groups,
            num_warps=4,
            num_stages=stages,
            TOKENS=tokens,
            GROUPS=groups,
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROPE_DIM=0 if tables is None else tables.cos.shape[-1],
            RANKS=w0.shape[-1],
            GROUPED=len(weights) == 2,
            SHARED_WEIGHTS=len(w0) == 1,
            ROUND_ONCE=tables is not None and tables.rounding == "once",
            **constants,
        )

    launch = triton_launch.over_entries(launch, shareable=2)
    return launch(padded[0][None], padded[-1][None], *table_rows, *rows)


# --- kernels: the entries of a mapped axis, if there are any, stand in front of the tokens ---


@triton.jit
def vha_postmix(
    w0_ptr,
    w1_ptr,
    cos_ptr,
    sin_ptr,
    x_ptr,
    out_ptr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
):
    """The forward of one token and group."""
    NOPE: tl.constexpr = HEAD_DIM - ROPE_DIM
    program = tl.program_id(0)  # of [entries, tokens, groups]
    token = program // GROUPS
    group = program % GROUPS
    matrix = group if SHARED_WEIGHTS else token // TOKENS * GROUPS + group
    weights = _load_weights(w0_ptr, w1_ptr, matrix, HEADS, RANKS, GROUPED)
    row = program.to(tl.int64) * (HEADS * HEAD_DIM)
    table_row = token.to(tl.int64) * ROPE_DIM
    tables = (cos_ptr + table_row, sin_ptr + table_row)
    for start in tl.static_range(0, NOPE, _CHANNELS):
        _forward_tile(weights, tables, x_ptr + row, out_ptr + row, start, NOPE, HEADS, HEAD_DIM, ROPE_DIM, ROUND_ONCE)
    for start in tl.static_range(NOPE, HEAD_DIM, _CHANNELS):
        _forward_tile(
            weights, tables, x_ptr + row, out_ptr + row, start, HEAD_DIM, HEADS, HEAD_DIM, ROPE_DIM, ROUND_ONCE
        )


@triton.jit
def vha_postmix_bwd(
    w0_ptr,
    w1_ptr,
    cos_ptr,
    sin_ptr,
    x_ptr,
    g_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_DW: tl.constexpr,
):
    """The gradient of one chunk of tokens and one group. The outputs: what is wanted of dx, dw0 and dw1."""
    CHUNKS: tl.constexpr = (TOKENS + CHUNK - 1) // CHUNK
    program = tl.program_id(0)  # of [entries, chunks, groups]
    group = program % GROUPS
    entry = program // GROUPS // CHUNKS
    first = program // GROUPS % CHUNKS * CHUNK
    tokens = tl.minimum(CHUNK, TOKENS - first)
    matrix = group if SHARED_WEIGHTS else entry * GROUPS + group
    weights = _load_weights(w0_ptr, w1_ptr, matrix, HEADS, RANKS, GROUPED)
    token = entry.to(tl.int64) * TOKENS + first
    row = (token * GROUPS + group) * (HEADS * HEAD_DIM)
    tables = (cos_ptr + token * ROPE_DIM, sin_ptr + token * ROPE_DIM)
    rows = (x_ptr + row, g_ptr + row, out0_ptr + row)
    # The order of the sums must not depend on the rotation: all tiles but the last of one token after the other, then
    # the last ones.
    FULL: tl.constexpr = (HEAD_DIM - 1) // min(_BACKWARD_CHANNELS, _block(HEAD_DIM))
    sums = _no_sums(HEADS, RANKS, GROUPED)
    if FULL > 0:
        for i in range(0, tokens * FULL):
            sums = _backward_tile(
                weights, sums, tables, rows, i, False, GROUPS, HEADS, HEAD_DIM, ROPE_DIM, ROUND_ONCE, WANT_DX, WANT_DW
            )
    for i in range(0, tokens):
        sums = _backward_tile(
            weights, sums, tables, rows, i, True, GROUPS, HEADS, HEAD_DIM, ROPE_DIM, ROUND_ONCE, WANT_DX, WANT_DW
        )
    if WANT_DW:
        partial = program.to(tl.int64) * (_block(HEADS) * RANKS) + _matrix(HEADS, RANKS)
        tl.store((out1_ptr if WANT_DX else out0_ptr) + partial, sums[0])
        if GROUPED:
            tl.store((out2_ptr if WANT_DX else out1_ptr) + partial, sums[1])


@triton.jit
def _forward_tile(
    weights,
    tables,
    x_ptr,
    out_ptr,
    START: tl.constexpr,
    STOP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
):
    """The forward of channels from START on, either none of them rotary or all of them."""
    NOPE: tl.constexpr = HEAD_DIM - ROPE_DIM
    SIZE: tl.constexpr = min(_CHANNELS, _block(STOP - START))
    channel = START + tl.arange(0, SIZE)
    inside = channel < STOP if START + SIZE > STOP else None
    x = _load_tile(x_ptr, channel, inside, HEADS, HEAD_DIM)
    if START >= NOPE:
        partner = _load_tile(x_ptr, _partner(channel, None, NOPE), inside, HEADS, HEAD_DIM)
        x = _rotated(x, partner, tables, channel - NOPE, inside, None, ROPE_DIM, ROUND_ONCE, 0)
    tl.store(_tile(out_ptr, channel, HEADS, HEAD_DIM), _mix(weights, x), _mask(inside, HEADS))


@triton.jit
def _backward_tile(
    weights,
    sums,
    tables,
    rows,
    i,
    LAST: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_DW: tl.constexpr,
):
    """The gradient of tile i of all last ones, or of all others; returns the sums with this tile's added."""
    SIZE: tl.constexpr = min(_BACKWARD_CHANNELS, _block(HEAD_DIM))
    FULL: tl.constexpr = (HEAD_DIM - 1) // SIZE
    REST: tl.constexpr = HEAD_DIM - FULL * SIZE
    NOPE: tl.constexpr = HEAD_DIM - ROPE_DIM
    # Only with more rotary channels than the last tile holds do the others carry code for them.
    ROTARY: tl.constexpr = ROPE_DIM > (0 if LAST else REST)
    token = i if LAST else i // FULL
    channel = (FULL * SIZE if LAST else i % FULL * SIZE) + tl.arange(0, SIZE)
    inside = channel < HEAD_DIM if LAST and REST < SIZE else None
    rotary = channel >= NOPE if not LAST or ROPE_DIM < REST else None  # None: all
    x_ptr, g_ptr, dx_ptr = rows
    offset = token * (GROUPS * HEADS * HEAD_DIM)
    tables = (tables[0] + token * ROPE_DIM, tables[1] + token * ROPE_DIM)
    g = _load_tile(g_ptr + offset, channel, inside, HEADS, HEAD_DIM)
    if WANT_DX:
        dx = _mix_transposed(weights, g)
        if ROTARY:
            partner = _load_tile(g_ptr + offset, _partner(channel, rotary, NOPE), inside, HEADS, HEAD_DIM)
            partner = _mix_transposed(weights, partner)
            dx = _rotated(dx, partner, tables, channel - NOPE, inside, rotary, ROPE_DIM, ROUND_ONCE, 1)
        tl.store(_tile(dx_ptr + offset, channel, HEADS, HEAD_DIM), dx, _mask(inside, HEADS))
    if WANT_DW:
        x = _load_tile(x_ptr + offset, channel, inside, HEADS, HEAD_DIM)
        if ROTARY:
            partner = _load_tile(x_ptr + offset, _partner(channel, rotary, NOPE), inside, HEADS, HEAD_DIM)
            x = _rotated(x, partner, tables, channel - NOPE, inside, rotary, ROPE_DIM, ROUND_ONCE, 0)
        sums = _plus_weight_gradients(sums, weights, x, g)
    return sums


# --- device functions ---


@triton.jit
def _load_weights(w0_ptr, w1_ptr, index, HEADS: tl.constexpr, RANKS: tl.constexpr, GROUPED: tl.constexpr):
    offsets = index.to(tl.int64) * (_block(HEADS) * RANKS) + _matrix(HEADS, RANKS)
    w0 = tl.load(w0_ptr + offsets)
    if GROUPED:
        return w0, tl.load(w1_ptr + offsets)
    else:
        return (w0,)


@triton.jit
def _no_sums(HEADS: tl.constexpr, RANKS: tl.constexpr, GROUPED: tl.constexpr):
    zeros = tl.zeros((_block(HEADS), RANKS), tl.float32)
    if GROUPED:
        return zeros, zeros
    else:
        return (zeros,)


@triton.jit
def _matrix(HEADS: tl.constexpr, RANKS: tl.constexpr):
    """Offsets of the elements of a padded weight."""
    return tl.arange(0, _block(HEADS))[:, None] * RANKS + tl.arange(0, RANKS)[None, :]


@triton.jit
def _tile(pointer, channel, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Pointers to the channels of all heads, whose number is rounded up to a power of two."""
    return pointer + tl.arange(0, _block(HEADS))[:, None] * HEAD_DIM + channel[None, :]


@triton.jit
def _mask(inside, HEADS: tl.constexpr):
    """The elements of a tile that exist, None for all. `inside`: channels that do, None for all."""
    head = tl.arange(0, _block(HEADS))[:, None]
    if HEADS < _block(HEADS):
        return head < HEADS if inside is None else (head < HEADS) & inside[None, :]
    elif inside is not None:
        return inside[None, :]


@triton.jit
def _load_tile(pointer, channel, inside, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    return _load(_tile(pointer, channel, HEADS, HEAD_DIM), _mask(inside, HEADS))


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask, 0.0)


@triton.jit
def _partner(channel, rotary, NOPE: tl.constexpr):
    """The channels' pair partners, those of other than rotary channels themselves. `rotary`: None for all."""
    partner = NOPE + ((channel - NOPE) ^ 1)
    return partner if rotary is None else tl.where(rotary, partner, channel)


@triton.jit
def _rotated(
    x,
    partner,
    tables,
    channel,
    inside,
    rotary,
    ROPE_DIM: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """x rotated back, see `rope.combine` and `rope.coefficients`; `channel` counts from the first rotary one."""
    known = inside
    if rotary is not None:
        known = rotary if inside is None else rotary & inside
    cos = _load(tables[0] + _table_entry(channel, ROPE_DIM), known).to(tl.float32)
    sin = _load(tables[1] + _table_entry(channel ^ TRANSPOSED, ROPE_DIM), known).to(tl.float32)
    sin *= tl.where((channel & 1) == TRANSPOSED, 1.0, -1.0)  # -sin would be 0 - sin, which makes -0 of no zero
    first = x.to(tl.float32) * cos[None, :]
    second = partner.to(tl.float32) * sin[None, :]
    if not ROUND_ONCE:
        first = _round_to(first, x.dtype)
        second = _round_to(second, x.dtype)
    y = _round_to(first + second, x.dtype).to(x.dtype)
    return y if rotary is None else tl.where(rotary[None, :], y, x)


@triton.jit
def _table_entry(channel, ROPE_DIM: tl.constexpr):
    """First channels of all pairs stand in the left half, second ones in the right half."""
    return (channel >> 1) + (channel & 1) * (ROPE_DIM // 2)


@triton.jit
def _mix(weights, x):
    if len(weights) == 1:
        return tl.dot(weights[0], x).to(x.dtype)
    else:
        return _add(x, tl.dot(weights[1], _hidden(weights[0], x)))


@triton.jit
def _mix_transposed(weights, g):
    if len(weights) == 1:
        return _hidden(weights[0], g)
    else:
        return _add(g, tl.dot(weights[0], _hidden(weights[1], g)))


@triton.jit
def _plus_weight_gradients(sums, weights, x, g):
    if len(weights) == 1:
        return (sums[0] + tl.dot(g, tl.trans(x)),)
    else:
        dz = _hidden(weights[1], g)
        z = _hidden(weights[0], x)
        return sums[0] + tl.dot(x, tl.trans(dz)), sums[1] + tl.dot(g, tl.trans(z))


@triton.jit
def _hidden(weight, x):
    return tl.dot(tl.trans(weight), x).to(x.dtype)


@triton.jit
def _add(x, product):
    """x + round(product), rounded."""
    return (x.to(tl.float32) + _round_to(product, x.dtype)).to(x.dtype)


@triton.jit
def _round_to(x, DTYPE: tl.constexpr):
    """`numerics.round_to_in_kernel`."""
    DROP: tl.constexpr = 16 if DTYPE == tl.bfloat16 else 13  # bits of the significand
    bits = x.to(tl.uint32, bitcast=True)
    bits += ((bits >> DROP) & 1) + ((1 << (DROP - 1)) - 1)  # ties to even
    y = ((bits >> DROP) << DROP).to(tl.float32, bitcast=True)
    if DTYPE == tl.float16:
        magnitude = tl.abs(x)
        y = tl.where(magnitude < 2.0**-14, _float16_subnormal(x), y)
        y = tl.where(magnitude >= 65520.0, x * float("inf"), y)
    return tl.where(x != x, x, y)  # the carry turns some NaN patterns into zeros


@triton.jit
def _float16_subnormal(x):
    """Nearest multiple of 2**-24, for |x| < 2**-14."""
    bits = x.to(tl.int32, bitcast=True)
    shift = tl.minimum(tl.maximum(126 - ((bits >> 23) & 0xFF), 1), 25)
    significand = (bits & 0x7FFFFF) | 0x800000
    half_minus_one = (1 << (shift - 1)) - 1
    quotient = (significand + half_minus_one + ((significand >> shift) & 1)) >> shift
    magnitude = (quotient.to(tl.float32) * 2.0**-24).to(tl.int32, bitcast=True)
    return (magnitude | (bits & -0x80000000)).to(tl.float32, bitcast=True)
