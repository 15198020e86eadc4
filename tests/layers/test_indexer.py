"""The indexer alone: what it selects, its loss, who learns from it, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
from flax import nnx
from layers import loops
from layers.common import (
    INDEXED,
    SEGMENTS,
    make_input,
    pulled_back,
    quick,
    quick_apply,
    random_layer,
    randomised,
    small_config,
)

from dsv4_fusions.documents import compressed_groups, from_segment_ids
from dsv4_fusions.kv_index import latent_candidates, visible_slots
from dsv4_fusions.layers import Indexer, indexer
from dsv4_fusions.layers.indexer import indexer_loss
from dsv4_fusions.layers.rotary import hadamard, layer_tables

CFG = small_config(**INDEXED)
HEADS, HEAD_DIM, TOPK, SCALE = 3, 8, 3, 0.6  # of the attention that the indexer is to predict
POSITIONS = np.random.default_rng(1).integers(0, 200, SEGMENTS.shape).astype(np.int32)


@functools.cache
def make_case(ratio):
    """Arguments of `run`. Candidates: groups of two tokens, or the tokens before a window of two."""
    module = randomised(lambda: Indexer(CFG, ratio, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    shapes = (3, 24, CFG.hidden_size), (3, 24, CFG.q_lora_rank), (3, 24, HEADS, HEAD_DIM), (3, 24 // ratio, HEAD_DIM)
    x, latent, q, rows = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)

    @quick
    def candidates(module, x):
        boundaries = from_segment_ids(SEGMENTS)
        if ratio == 1:
            return module.token_keys(x, POSITIONS), *latent_candidates(24, 2, boundaries)
        groups = compressed_groups(boundaries, ratio)
        return module.compressor(x, groups, POSITIONS), *visible_slots(24, ratio, groups)

    keys, start, count = candidates(module, x)
    return module, x, latent, keys, q, rows, start, count


def select(module, x, latent, keys, q, rows, start, count, topk=TOPK):
    """Selected rows, divergences, and the gradients of a weighted sum of those to all but the last two arguments."""

    def learn(module, x, latent, keys, q, rows):
        tables = layer_tables(CFG, module.rope, jnp.asarray(POSITIONS))
        selected, divergence = module(x, latent, tables, keys, start, count, topk, (q, rows, SCALE))
        return jnp.sum(divergence * jnp.arange(24)), (selected, divergence)

    gradients, (selected, divergence) = jax.grad(learn, argnums=tuple(range(6)), has_aux=True)(
        module, x, latent, keys, q, rows
    )
    return selected, divergence, gradients


run = quick(select, static_argnames="topk")


def by_loops(module, x, latent, keys, q, rows, start, count, topk=TOPK):
    """Selected rows and divergences, token by token."""
    x, latent, keys, q, rows = (np.asarray(a, np.float64) for a in (x, latent, keys, q, rows))
    selected, divergence = np.full((3, 24, topk), -1), np.zeros((3, 24))
    for i, t in np.ndindex(3, 24):
        those = np.arange(start[i, t], start[i, t] + count[i, t])
        scores = loops.index_scores(module, x[i, t], latent[i, t], POSITIONS[i, t], keys[i, those], module.rope[0])
        chosen = loops.best(scores, topk)
        selected[i, t, : len(chosen)] = those[chosen]
        logits = SCALE * q[i, t] @ rows[i, those[chosen]].T
        divergence[i, t] = loops.divergence(scores[chosen], logits)
    return selected, divergence


# ---- what is selected


@pytest.mark.parametrize("ratio", [1, 2])
def test_selection_and_divergence_are_the_oracles(ratio):
    case = make_case(ratio)
    selected, divergence, _ = run(*case)
    want, want_divergence = by_loops(*case)
    np.testing.assert_array_equal(selected, want)
    np.testing.assert_allclose(divergence, want_divergence, rtol=1e-4, atol=1e-6)
    # Not by chance: queries of one document have picks of their own, and some have fewer candidates than picks.
    assert len({tuple(sorted(row)) for row in want[2]}) > 5 and (want[:, :, 0] >= 0).any() and (want == -1).any()


@pytest.mark.parametrize("ratio", [1, 2])
def test_candidates_are_of_the_tokens_document_and_not_in_its_future(ratio):
    """Counted from the segment ids, token by token (transformers#45820)."""
    *_, start, count = case = make_case(ratio)
    selected = np.asarray(run(*case)[0])
    for i, segments in enumerate(SEGMENTS):
        assert (selected[i][segments == 0] == -1).all()
        slots = 0
        for first, length in loops.documents(segments):
            for t in range(first, first + length):
                number = max(t - first + 1 - 2, 0) if ratio == 1 else (t - first + 1) // 2
                allowed = range(first, first + number) if ratio == 1 else range(slots, slots + number)
                picks = selected[i, t][selected[i, t] >= 0]
                assert set(picks) <= set(allowed) and len(set(picks)) == len(picks) == min(number, TOPK)
            slots += length // 2


@pytest.mark.parametrize("ratio", [1, 2])
def test_keys_are_the_oracles(ratio):
    module, x, _, keys, *_ = make_case(ratio)
    if ratio == 2:
        want = loops.packed(module.compressor, x, SEGMENTS, POSITIONS)
    else:
        wide = np.asarray(x, np.float64)
        want = [loops.index_keys(module, row, p, module.rope[0]) for row, p in zip(wide, POSITIONS, strict=True)]
    np.testing.assert_allclose(keys, want, rtol=1e-4, atol=1e-5)


def test_of_equal_scores_the_earlier_is_taken():
    """Exactly equal ones: every candidate with the same key, then every second."""
    module, x, latent, keys, q, rows, start, count = make_case(1)
    keys = jnp.broadcast_to(keys[:, :1], keys.shape)
    selected, *_ = run(module, x, latent, keys, q, rows, start, count)
    want = np.where(np.arange(TOPK) < count[..., None], start[..., None] + np.arange(TOPK), -1)
    np.testing.assert_array_equal(selected, want)
    keys = keys.at[:, ::2].multiply(-1.0)
    selected, *_ = run(module, x, latent, keys, q, rows, start, count)
    np.testing.assert_array_equal(selected, by_loops(module, x, latent, keys, q, rows, start, count)[0])


def test_more_wanted_than_there_are():
    """All candidates, each in the column of its own number."""
    module, x, latent, keys, _, _, start, count = make_case(2)

    @quick
    def run(module, x, latent, keys):
        tables = layer_tables(CFG, module.rope, jnp.asarray(POSITIONS))
        return module(x, latent, tables, keys, start, count, 40, None)

    selected, divergence = run(module, x, latent, keys)
    row = np.arange(12)
    is_candidate = (row >= start[..., None]) & (row < (start + count)[..., None])
    np.testing.assert_array_equal(selected, np.where(is_candidate, row, -1))
    assert divergence is None


# ---- who learns


def test_the_loss_teaches_the_indexer_alone():
    case = make_case(2)
    _, _, (d_module, dx, d_latent, d_keys, dq, d_rows) = run(*case)
    for name in ("q_proj", "weights_proj"):
        assert np.any(getattr(d_module, name).kernel)
    assert np.any(d_keys)
    assert not any(np.any(leaf) for leaf in (dx, d_latent, dq, d_rows))


@pytest.mark.parametrize("ratio", [2, -2])
def test_loss_and_output_share_no_parameter(ratio):
    """Through a whole layer: exact zeros, in the gradient of x too."""
    layer, (x, g) = random_layer(small_config(**INDEXED, compress_ratios=(ratio,) * 3)), make_input(CFG, 3, 24)
    ones = np.ones(SEGMENTS.shape, np.float32)
    for g_output, g_loss in ((g, 0.0), (jnp.zeros_like(g), 1.0)):
        *_, d_layer, dx = pulled_back(layer, x, g_output, g_loss, SEGMENTS, POSITIONS, ones)
        assert np.any(dx) == (g_loss == 0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(d_layer):
            assert np.any(leaf) == (("indexer" in jax.tree_util.keystr(path)) == (g_loss == 1)), path


@pytest.mark.parametrize("ratio", [2, -2])
def test_no_coefficient_no_loss_and_the_same_output(ratio):
    results = []
    for coefficient in (0.0, 0.5):
        cfg = small_config(**INDEXED | dict(indexer_loss_coeff=coefficient), compress_ratios=(ratio,) * 3)
        layer, (x, _) = random_layer(cfg), make_input(cfg, 2, 23)
        results.append(quick_apply(layer, x))
    (without, no_aux), (with_loss, aux) = results
    assert no_aux == {} and list(aux) == ["indexer_loss"]
    np.testing.assert_array_equal(without, with_loss)


# ---- the loss


def test_loss_is_the_mean_over_the_tokens_that_count():
    rng = np.random.default_rng(0)
    divergence = jnp.asarray(rng.random((3, 24), np.float32))
    weights, flags = rng.random((3, 24), np.float32), rng.random((3, 24)) < 0.5
    is_valid = SEGMENTS > 0
    for valid, mask in (
        (None, None),
        (is_valid, None),
        (None, flags),
        (is_valid, flags),
        (is_valid, 5 * weights),
        (None, 0.01 * weights),
    ):
        counts = np.ones((3, 24)) * (1 if valid is None else valid) * (1 if mask is None else mask)
        want = 0.5 * np.sum(counts * divergence) / np.sum(counts)
        got = indexer_loss(CFG, divergence, *(None if a is None else jnp.asarray(a) for a in (valid, mask)))
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_tokens_that_do_not_count_may_be_nan():
    divergence = jnp.where(SEGMENTS > 0, 1.0, jnp.nan)
    loss = functools.partial(indexer_loss, CFG, is_valid=jnp.asarray(SEGMENTS > 0), loss_mask=None)
    assert loss(divergence) == 0.5
    assert np.isfinite(jax.grad(loss)(divergence)).all()
    assert indexer_loss(CFG, jnp.full((3, 24), jnp.nan), jnp.zeros((3, 24), bool), None) == 0


def test_a_loss_mask_below_0_is_0():
    """It counts neither in the sum nor in what the sum is divided by."""
    divergence = jnp.array([[1.0, 2.0, 4.0]])
    for mask in ([1.0, -3.0, 0.5], [1.0, 0.0, 0.5]):
        loss = indexer_loss(CFG, divergence, None, jnp.array([mask]))
        np.testing.assert_allclose(loss, CFG.indexer_loss_coeff * (1.0 + 0.5 * 4.0) / 1.5, rtol=1e-6)


@pytest.mark.parametrize("ratio", [4, -2])
@pytest.mark.parametrize("shape", [(2, 7), (8,), (2, 8, 1)], ids=str)
def test_loss_mask_of_another_shape_is_refused(ratio, shape):
    layer = random_layer(small_config(compress_ratios=(ratio,) * 3))
    with pytest.raises(ValueError, match="loss_mask: got shape .*, wanted \\(2, 8\\), one weight per token"):
        layer(make_input(layer.cfg, 2, 8)[0], loss_mask=jnp.ones(shape))


# ---- blocks and memory


def test_blocks_of_queries(monkeypatch):
    """Five of them, the last one padded: the same rows, and the same loss and gradients up to rounding."""
    case = make_case(1)
    selected, divergence, gradients = run(*case)
    row_bytes = 4 * 24 * (CFG.index_n_heads + 2) + 4 * TOPK * (HEADS + HEAD_DIM)
    monkeypatch.setattr(indexer, "BLOCK_BYTES", 5 * row_bytes)
    anew = lambda *case: select(*case)  # noqa: E731  (a function whose trace JAX does not have yet)
    blocks = [e for e in program.equations(jax.make_jaxpr(anew)(*case)) if e.primitive.name == "top_k"]
    assert blocks and all(e.invars[0].aval.shape == (5, 24) for e in blocks)
    in_blocks = quick(anew)(*case)
    np.testing.assert_array_equal(selected, in_blocks[0])
    np.testing.assert_allclose(divergence, in_blocks[1], rtol=1e-5, atol=1e-7)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(in_blocks[2]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_keys_gradient_is_summed_in_f32(monkeypatch):
    """Over blocks of one query: a sum in bf16 would be off by more the more blocks there are."""
    module, x, latent, _, q, rows, _, _ = make_case(1)
    rng = np.random.default_rng(3)
    tokens, candidates = 768, 16
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)  # noqa: E731
    x, latent, q = (draw(1, tokens, *a.shape[2:]) for a in (x, latent, q))
    keys, rows = draw(1, candidates, CFG.index_head_dim), draw(1, candidates, HEAD_DIM)
    count = jnp.full((tokens,), candidates)
    tables = layer_tables(CFG, module.rope, jnp.arange(tokens))

    def gradient(keys):
        loss = lambda keys: jnp.sum(  # noqa: E731
            module(x, latent, tables, keys, 0 * count, count, candidates, (q, rows, SCALE))[1]
        )
        return np.asarray(quick(jax.grad(loss))(keys), np.float64)

    at_once = gradient(keys.astype(jnp.float32))
    monkeypatch.setattr(indexer, "BLOCK_BYTES", 1)
    one_by_one = gradient(keys)
    assert np.linalg.norm(one_by_one - at_once) < 2**-7 * np.linalg.norm(at_once)


@pytest.mark.parametrize(
    "ratio, phase", [*[(ratio, "dense") for ratio in (0, -1, 4, 128)], (4, "sparse"), (-2, "sparse"), (-2, "warm_up")]
)
@pytest.mark.parametrize("shape", [(2, 0), (0, 9)], ids=str)
def test_nothing_to_attend_to(ratio, phase, shape):
    layer = random_layer(small_config(compress_ratios=(ratio,) * 3, indexer_phase=phase, indexer_loss_coeff=1.0))
    x = jnp.zeros((*shape, layer.cfg.hidden_size), layer.cfg.dtype)
    y, aux = layer(x)
    assert y.shape == x.shape and all(loss == 0 for loss in aux.values())
    y, cache = layer.decode(x, layer.init_cache(shape[0], 0))
    assert y.shape == x.shape and cache.length == shape[1]


def largest_value(jaxpr):
    """Elements of the largest array that a program makes, what its loops carry and stack included."""
    sizes = []
    for eqn in program.equations(jaxpr, whole=("scan",)):
        sizes += [v.aval.size for v in eqn.outvars]
        if eqn.primitive.name == "scan":
            sizes.append(largest_value(eqn.params["jaxpr"]))
    return max(sizes)


@pytest.mark.parametrize("phase", ["sparse", "warm_up"])
def test_memory_is_that_of_a_block(phase):
    """16384 tokens, 4096 compressed rows, forward and backward: never a score of every head, nor of every token."""
    tokens, heads = 16384, 64
    cfg = small_config(**INDEXED | dict(index_topk=512), index_n_heads=heads, compress_ratios=(4,) * 3)
    module = nnx.eval_shape(lambda: Indexer(cfg, 4, rngs=nnx.Rngs(0)))
    topk = cfg.index_topk if phase == "sparse" else tokens // 4

    def learn(module, x, latent, keys, q, rows):
        tables = layer_tables(cfg, module.rope, jnp.arange(tokens))
        start, count = visible_slots(tokens, 4)
        selected, divergence = module(x, latent, tables, keys, start, count, topk, (q, rows, SCALE))
        return jnp.sum(divergence), selected

    shapes = (1, tokens, 24), (1, tokens, 16), (1, tokens // 4, 16), (1, tokens, HEADS, HEAD_DIM), (1, tokens // 4, 8)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    jaxpr = jax.make_jaxpr(jax.grad(learn, has_aux=True))(module, *arrays)
    # Its output, its queries, or a block; and the tokens that fill the last block.
    wanted = max(tokens * topk, tokens * heads * cfg.index_head_dim, indexer.BLOCK_BYTES // 4)
    assert largest_value(jaxpr.jaxpr) <= 1.01 * wanted < tokens * (tokens // 4) * heads / 50


# ---- the rotation


@pytest.mark.parametrize("channels", [1, 2, 16, 128])
def test_hadamard(channels):
    matrix = np.asarray(hadamard(jnp.eye(channels)))
    np.testing.assert_allclose(matrix, loops.sylvester(channels) / np.sqrt(channels), rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(channels), atol=1e-6)


def test_hadamard_rounds_once():
    """After the scale, which is no power of two here."""
    x = jax.random.normal(jax.random.key(0), (64, 8)).astype(jnp.bfloat16)
    got, exact = hadamard(x), np.asarray(x, np.float64) @ loops.sylvester(8) / np.sqrt(8)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=1.001 * 2**-8, atol=1e-6)
