"""Decoding from a cache gives what a call on the whole sequence gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from layers import loops
from layers.common import INDEXED, make_input, quick, random_layer, randomised, small_config

from dsv4_fusions import linen
from dsv4_fusions.layers import Decoder
from dsv4_fusions.testing import assert_trees_bitwise_equal

KINDS = {
    "window": (0, "dense"),
    "causal": (-1, "dense"),
    "csa-sparse": (4, "sparse"),
    "csa-warm_up": (4, "warm_up"),
    "csa-dense": (4, "dense"),
    "hca": (128, "dense"),
    "latent-sparse": (-2, "sparse"),
    "latent-warm_up": (-2, "warm_up"),
    "latent-dense": (-2, "dense"),
}


def make_kind(kind, **changes):
    ratio, phase = KINDS[kind]
    return random_layer(small_config(**INDEXED | changes, compress_ratios=(ratio,) * 3, indexer_phase=phase))


@functools.partial(quick, static_argnames=("chunk", "max_length"))
def decoded(layer, x, chunk, max_length):
    """All of x, `chunk` tokens at a time, under a scan that carries the cache."""
    batch, tokens, hidden = x.shape
    chunks = x.reshape(batch, tokens // chunk, chunk, hidden).swapaxes(0, 1)
    step = lambda cache, x: layer.decode(x, cache)[::-1]  # noqa: E731
    cache, y = lax.scan(step, layer.init_cache(batch, max_length), chunks)
    return y.swapaxes(0, 1).reshape(x.shape), cache


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_whole_sequences_output(kind):
    """As the NumPy loops have it, which a call agrees with too; chunks end within groups and within the window."""
    layer = make_kind(kind)
    tokens, chunks = (268, (1, 67)) if kind == "hca" else (25, (1, 5))
    x, _ = make_input(layer.cfg, 2, tokens)
    want = loops.layer(layer, x)
    for chunk in chunks if "warm_up" not in kind else chunks[1:]:
        y, cache = decoded(layer, x, chunk, max_length=tokens + 3)
        assert cache.length == tokens
        if cache.compressor is not None:
            used = np.any(cache.compressor.rows, axis=(0, 2))
            np.testing.assert_array_equal(used, np.arange(len(used)) < tokens // layer.core_attention.ratio)
        assert distance(y, want) < 1e-5
        assert max(distance(y[:, t], want[:, t]) for t in range(tokens)) < 1e-4


def test_a_token_alone_in_its_window_does_not_show_its_position():
    """The inverse rotation is that of the token's place in the sequence, not in the call."""
    layer = make_kind("window", sliding_window=1)
    x, _ = make_input(layer.cfg, 2, 1)
    y, cache = decoded(layer, jnp.broadcast_to(x, (2, 25, 24)), 1, max_length=25)
    np.testing.assert_allclose(y, jnp.broadcast_to(y[:, :1], y.shape), rtol=1e-4, atol=1e-5)
    assert cache.kv.shape[1] == 0


@pytest.mark.parametrize("kind", ["causal", "csa-sparse", "latent-sparse"])
def test_tokens_behind_the_capacity(kind):
    """They leave the rows of the others alone, and themselves get finite outputs."""
    layer = make_kind(kind)
    x, _ = make_input(layer.cfg, 2, 25)
    step = quick(lambda layer, x, cache: layer.decode(x, cache))
    cache, outputs, caches = layer.init_cache(2, 10), [], []
    for start in range(0, 25, 5):
        y, cache = step(layer, x[:, start : start + 5], cache)
        outputs.append(y)
        caches.append(cache)
    assert distance(jnp.concatenate(outputs[:2], 1), loops.layer(layer, x[:, :10])) < 1e-5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, cache)))
    rows = {
        "causal": lambda cache: cache.kv,
        "csa-sparse": lambda cache: (cache.compressor.rows, cache.indexer.rows),
        "latent-sparse": lambda cache: (cache.kv, cache.index_keys),
    }[kind]
    assert_trees_bitwise_equal(rows(caches[1]), rows(caches[-1]), names=("full", "behind"))
    assert all(np.all(np.any(leaf, axis=-1)) for leaf in jax.tree.leaves(rows(cache)))


def test_capacity_below_one_group():
    """No compressed row is kept, and for as long as none is due nothing is missing."""
    layer = make_kind("csa-sparse")
    x, _ = make_input(layer.cfg, 2, 6)
    y, cache = decoded(layer, x, 1, max_length=3)
    assert cache.compressor.rows.shape[1] == 0 and np.isfinite(y).all()
    assert distance(y[:, :3], loops.layer(layer, x[:, :3])) < 1e-5


# ---- a whole decoder


@pytest.fixture(scope="module")
def model():
    """All kinds of layers, in bf16."""
    ratios = (0, -1, 4, 128, -2)
    cfg = small_config(**INDEXED | dict(dtype="bfloat16"), compress_ratios=ratios, num_hidden_layers=5)
    return randomised(lambda: Decoder(cfg, rngs=nnx.Rngs(0)))


IDS = np.random.default_rng(0).integers(0, 64, (2, 132)).astype(np.int32)


def in_two_calls(step, model):
    """Logits and caches, the caches of the first call given away to the second."""
    cache = model.init_cache(2, 140)
    first, cache = step(model, IDS[:, :66], cache)
    second, last = step(model, IDS[:, 66:], cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    return first, second, last


decode_donated = quick(lambda model, ids, cache: model.decode(ids, cache), donate_argnums=2)


@pytest.fixture(scope="module")
def unfused(model):
    return in_two_calls(decode_donated, model)


def test_decoder_decodes_what_it_gives_for_the_whole_sequence(model, unfused):
    """Up to bf16's rounding, with which a few tokens select another row than in the other program."""
    logits, _ = quick(lambda model: model(IDS))(model)
    got = jnp.concatenate(unfused[:2], axis=1)
    assert got.dtype == jnp.float32
    errors = [distance(got[i, t], logits[i, t]) for i, t in np.ndindex(IDS.shape)]
    assert np.median(errors) < 0.01 and np.quantile(errors, 0.9) < 0.1


def test_fusions_change_no_bit_of_decoding(model, unfused):
    assert_trees_bitwise_equal(unfused, in_two_calls(decode_donated, model), names=("unfused", "unfused again"))
    fused = nnx.with_attributes(model, fuse_inv_rope=True, fuse_kv_index_remap=True)
    told = fused.explain_fusions(IDS[:, :66])
    assert [status.active for layer in told.values() for status in layer.values()] == [True] * 8 + [False, True]
    assert_trees_bitwise_equal(unfused, in_two_calls(decode_donated, fused), names=("unfused", "fused"))


@pytest.mark.parametrize("kind", ["csa-sparse", "latent-sparse", "window"])
def test_what_does_not_fit_the_cache_is_named(kind):
    ratio, phase = KINDS[kind]
    layer = random_layer(small_config(**INDEXED | dict(indexer_phase=phase), compress_ratios=(ratio,) * 3))
    x, _ = make_input(layer.cfg, 2, 1)
    with pytest.raises(ValueError, match="cache: got one for a batch of 3, wanted 2"):
        layer.decode(x, layer.init_cache(3, 8))
    if ratio == 4:
        core, kv = layer.core_attention, jnp.zeros((2, 1, layer.cfg.head_dim))
        with pytest.raises(ValueError, match="latent: got None"):
            core.decode(
                jnp.zeros((2, 1, layer.cfg.num_attention_heads, layer.cfg.head_dim)), kv, x, core.init_cache(2, 8)
            )


@pytest.mark.parametrize(
    "kind, changes, match",
    [
        ((-1,), (0,), "got length, kv of ratio 0, wanted the fields that are not None and the ratio of this layer's, "),
        ((0,), (-1,), "of ratio -1, wanted .* of ratio 0"),
        ((4,), (5,), "of ratio 5, wanted .* of ratio 4"),
        ((4,), (0,), "got length, kv of ratio 0, wanted .*length, kv, compressor, indexer of ratio 4"),
        (
            (0, dict(sliding_window=5)),
            (0, dict(sliding_window=7)),
            r"cache.kv: got float32\[2, 6, .*wanted float32\[2, 4,",
        ),
        ((-2,), (-2, dict(dtype="bfloat16")), r"cache.kv: got bfloat16.*wanted float32"),
    ],
    ids=str,
)
def test_the_cache_of_another_layer_is_named(kind, changes, match):
    """Their arrays may have the same shapes and mean something else."""

    def layer(ratio, changes=None):
        changes = INDEXED | dict(dtype="float32") | (changes or {})
        return random_layer(small_config(**changes, compress_ratios=(ratio,) * 3))

    mine, other = layer(*kind), layer(*changes)
    x, _ = make_input(mine.cfg, 2, 3)
    mine.decode(x, mine.init_cache(2, 12))
    with pytest.raises(ValueError, match=match):
        mine.decode(x, other.init_cache(2, 12))
    with pytest.raises(TypeError, match="cache: got NoneType, wanted an AttentionCache"):
        mine.decode(x, None)


def test_decoder_names_what_is_wrong(model):
    cache = model.init_cache(2, 140)
    with pytest.raises(ValueError, match=f"cache: got 2 caches, wanted {len(cache)}"):
        model.decode(IDS[:, :1], cache[:2])
    with pytest.raises(TypeError, match="token_ids: got dtype float32, wanted integers"):
        model.decode(jnp.ones((2, 1)), cache)
    with pytest.raises(ValueError, match=r"token_ids: got shape \(2,\), wanted \[batch, tokens\]"):
        model.decode(IDS[:, 0], cache)
    with pytest.raises(ValueError, match="token_ids: got int64 values from 4294967297"):
        model(np.full((1, 2), 2**32 + 1, np.int64))


def test_twin_decodes_the_same_bits(model, unfused):
    twin, params = linen.Decoder(model.cfg), linen.params_from_nnx(model)
    assert_trees_bitwise_equal(model.init_cache(2, 140), twin.init_cache(2, 140), names=("nnx", "linen"))

    class Step:
        init_cache = staticmethod(twin.init_cache)

    decode = quick(
        lambda params, ids, cache: twin.apply({"params": params}, ids, cache, method="decode"), donate_argnums=2
    )
    step = lambda _, ids, cache: decode(params, ids, cache)  # noqa: E731
    assert_trees_bitwise_equal(unfused, in_two_calls(step, Step), names=("nnx", "linen"))


@pytest.mark.parametrize("ratio", [-2, -1, 0, 4, 128])
def test_sizes_of_a_cache_are_checked(ratio):
    layer = random_layer(small_config(compress_ratios=(ratio,) * 3))
    for sizes, error, message in (
        ((-1, 8), ValueError, "batch: got -1, wanted at least 0"),
        ((2, -5), ValueError, "max_length: got -5, wanted at least 0"),
        ((2, 8.0), TypeError, "max_length: got float, wanted an integer"),
        ((True, 8), TypeError, "batch: got bool, wanted an integer"),
    ):
        with pytest.raises(error, match=message):
            layer.init_cache(*sizes)
    assert layer.init_cache(0, 0).kv.shape[0] == 0
