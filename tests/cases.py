"""Shapes by name and the operands that go with them, shared by the tests on a CPU and those on a GPU."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (NumPy learns bfloat16 from it)
import numpy as np

from dsv4_fusions import RopeTables, inv_rope_vha_postmix, postmix_matrix, rotate, vha_postmix
from dsv4_fusions.ops.inv_rope_postmix import grouped_postmix, inv_rope_grouped_postmix, reference


@dataclasses.dataclass(frozen=True)
class Postmix:
    """One call of the postmix: `lead` are batch axes in front of the tokens, `groups` of heads; None: not grouped."""

    tokens: int
    heads: int
    head_dim: int
    rope_dim: int
    dtype: str = "bfloat16"
    rounding: str = "each_product"
    seed: int = 0
    lead: tuple[int, ...] = ()
    groups: int | None = None

    def __str__(self):
        shape = "x".join(map(str, (*self.lead, self.tokens, self.heads, self.head_dim, self.rope_dim)))
        groups = f"-groups{self.groups}" if self.groups else ""
        return f"{shape}{groups}-{self.dtype}-{self.rounding}-seed{self.seed}"

    @property
    def shape(self):
        return (*self.lead, self.tokens, self.heads, self.head_dim)

    @property
    def rank(self):
        return max(1, self.heads // 4)

    def operands(self, scale=0.05):
        """(o, u, v, tables, g): tables random with unequal halves, V off zero so that sums have many terms.

        "once" gets f32 tables, whose low bits the op has to drop.
        """
        rng = np.random.default_rng(self.seed)
        o, g = (self._normal(rng, self.shape) for _ in range(2))
        u, v = (scale * self._normal(rng, (self.heads, self.rank)) for _ in range(2))
        angles = 3 * rng.standard_normal((self.tokens, self.rope_dim), np.float32)
        table_dtype = self.dtype if self.rounding == "each_product" else "float32"
        cos, sin = (jnp.asarray(f(angles).astype(table_dtype)) for f in (np.cos, np.sin))
        return o, u, v, RopeTables(cos, sin, self.rounding), g

    def types(self):
        """Types of (o, u, v, tables, g), for what is traced and not run."""
        o, weight = (jax.ShapeDtypeStruct(shape, self.dtype) for shape in (self.shape, (self.heads, self.rank)))
        table_dtype = self.dtype if self.rounding == "each_product" else "float32"
        table = jax.ShapeDtypeStruct((self.tokens, self.rope_dim), table_dtype)
        return o, weight, weight, RopeTables(table, table, self.rounding), o

    def _normal(self, rng, shape):
        if math.prod(shape) > 2**24:  # on the device, for the host's memory
            return jax.random.normal(jax.random.key(rng.integers(2**31)), shape, self.dtype)
        # NumPy elsewhere: jax.random would compile for every shape.
        return jnp.asarray(rng.standard_normal(shape, np.float32).astype(self.dtype))


# (tokens, heads, head_dim, rope_dim) of PaddleFleet PR #1772's tests that a CPU can run in interpret mode, ...
SMALL = [
    Postmix(128, 4, 64, 32),
    Postmix(128, 4, 64, 16, seed=1),
    Postmix(7, 3, 40, 8),
    Postmix(64, 3, 40, 8, seed=1),
    Postmix(97, 32, 96, 32),
    Postmix(64, 16, 256, 64),
    Postmix(1, 64, 512, 64),
]
# ... those that take seconds there, ...
MEDIUM = [Postmix(1023, 3, 40, 8, seed=2), Postmix(333, 8, 128, 32), Postmix(128, 64, 512, 64)]
# ... those for the GPU, ...
LARGE = [
    Postmix(2048, 64, 512, 64, seed=1),
    Postmix(2048, 64, 512, 64, seed=2),
    Postmix(2048, 64, 512, 64, seed=3),
    Postmix(1023, 64, 512, 64),
]
PRODUCTION = Postmix(16384, 64, 512, 64)
# ... the ten at which splitting a product's channels must change nothing, ...
SPLIT = [
    Postmix(2048, 64, 512, 64),
    PRODUCTION,
    Postmix(1023, 64, 512, 64),
    Postmix(1, 64, 512, 64),
    Postmix(128, 4, 64, 32),
    Postmix(128, 4, 64, 16),
    Postmix(333, 8, 128, 32),
    Postmix(97, 32, 96, 32),
    Postmix(7, 3, 40, 8),
    Postmix(64, 16, 256, 64),
]
# ... and shapes of our own that are odd on purpose.
ODD = [
    Postmix(3, 1, 8, 8),  # one head, every channel rotary
    Postmix(5, 8, 34, 6),  # neither width a power of two
    Postmix(33, 24, 128, 16),
    Postmix(2, 96, 64, 64),
    Postmix(9, 5, 24, 2, lead=(2, 3)),
    Postmix(17, 128, 32, 8),
]
# ... those with more rotary channels than one tile of a kernel holds, ...
WIDE_ROTARY = [Postmix(9, 3, 72, 70), Postmix(3, 4, 200, 130), Postmix(2, 5, 96, 96)]
# ... those in groups of heads (of 3, 1, 8, 32 and all heads), ...
GROUPED = [
    Postmix(7, 6, 40, 8, groups=2),
    Postmix(5, 4, 34, 6, lead=(2,), groups=4),
    Postmix(9, 64, 128, 64, groups=8),
    Postmix(3, 64, 72, 70, groups=2),
    Postmix(17, 5, 24, 24, groups=1),
]
# ... and those for the Mosaic kernel, whose simulator takes a tenth of a second for a token.
MOSAIC = [
    Postmix(9, 64, 128, 64),
    Postmix(3, 64, 256, 50, lead=(2,)),  # the rotary channels start within a block
    Postmix(1, 64, 384, 200),
]


def weights(u, v, groups=None):
    """What a path mixes with: (M,), or (U, V) of groups of heads; u and v are [heads, rank]."""
    if groups is None:
        return (postmix_matrix(u, v),)
    return tuple(w.reshape(groups, w.shape[0] // groups, w.shape[1]) for w in (u, v))


def unfused(o, *weights_and_tables, **options):
    """The rotation, then the postmix with weights (m,), or the grouped one with (u, v)."""
    *mixed_with, tables = weights_and_tables
    postmix = vha_postmix if len(mixed_with) == 1 else grouped_postmix
    return postmix(rotate(o, tables, inverse=True), *mixed_with, **options)


def fused(o, *weights_and_tables, **options):
    """Same with the rotation inside."""
    postmix = inv_rope_vha_postmix if len(weights_and_tables) == 2 else inv_rope_grouped_postmix
    return postmix(o, *weights_and_tables, **options)


def step(path, groups=None, **options):
    """Jitted (o, u, v, tables, g) -> (out, dO, dU, dV) of `unfused` or `fused`; groups: of heads, None: not grouped."""

    def run(o, u, v, tables, g):
        out, vjp = jax.vjp(lambda o, u, v: path(o, *weights(u, v, groups), tables, **options), o, u, v)
        return out, *vjp(g)

    return jax.jit(run)


def splits(case):
    """(M X of all channels, of the leading ones, of the rotary ones from a view, of the same from a copy)."""
    o, u, v, _, _ = case.operands(scale=1.0)
    m, nope = jax.jit(postmix_matrix)(u, v), case.head_dim - case.rope_dim
    mix = jax.jit(lambda m, x: reference.mix((m,), x))
    return (
        mix(m, o),
        jax.jit(lambda m, o: reference.mix((m,), o[..., :nope]))(m, o),
        jax.jit(lambda m, o: reference.mix((m,), o[..., nope:]))(m, o),
        mix(m, jax.jit(lambda o: o[..., nope:])(o)),
    )
