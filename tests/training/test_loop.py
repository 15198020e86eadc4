import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_fusions.config import DSv4Config, TrainConfig
from dsv4_fusions.layers import Decoder
from dsv4_fusions.testing import assert_trees_bitwise_equal
from dsv4_fusions.training import loop, text

CFG = DSv4Config(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=8,
    compress_ratios=(0,),
    vocab_size=256,
    intermediate_size=32,
)
TRAIN = TrainConfig(batch_size=2, sequence_length=32, steps=8, warmup_steps=1, learning_rate=0.01, eval_interval=4)
ROWS = text.pack([b"to be or not to be, that is the question", b"abababababab", b"x"], TRAIN.sequence_length)


def make_model():
    return Decoder(CFG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def runs():
    """Two runs from one seed, and what the first one reported."""
    reported = []
    first = loop.train(make_model(), TRAIN, ROWS, ROWS, lambda *report: reported.append(report))
    return first, loop.train(make_model(), TRAIN, ROWS, ROWS), reported


def test_one_seed_gives_one_run(runs):
    first, second, _ = runs
    assert_trees_bitwise_equal(first.losses, second.losses)
    assert_trees_bitwise_equal(first.params, second.params)
    assert (first.training_loss, first.held_out_loss) == (second.training_loss, second.held_out_loss)


def test_training_lowers_the_loss(runs):
    first, _, _ = runs
    assert first.losses.shape == (TRAIN.steps,) and first.losses.dtype == np.float32
    assert first.losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert first.held_out_loss < first.losses[0] - 0.5
    assert first.training_loss == first.held_out_loss  # the same rows


def test_every_step_is_reported_and_every_eval_interval_evaluated(runs):
    first, _, reported = runs
    states, losses, _, held_out_losses, seconds = zip(*reported, strict=True)
    assert [state.step for state in states] == list(range(1, TRAIN.steps + 1))
    assert_trees_bitwise_equal(np.stack(losses), first.losses)
    assert [i for i, loss in enumerate(held_out_losses, start=1) if loss is not None] == [4, TRAIN.steps]
    assert held_out_losses[-1] == first.held_out_loss and min(seconds) > 0


def test_a_run_goes_on_from_any_state(runs):
    first, _, _ = runs
    copies = []

    def keep(state, *_):
        copies.append(jax.tree.map(np.array, (state.params, state.opt_state)))

    loop.train(make_model(), TRAIN, ROWS, ROWS, keep)
    for step in (1, 5, TRAIN.steps):
        start = loop.State(step, *jax.tree.map(jnp.asarray, copies[step - 1]))
        rest = loop.train(make_model(), TRAIN, ROWS, ROWS, start=start)
        assert_trees_bitwise_equal(rest.losses, first.losses[step:])
        assert_trees_bitwise_equal(rest.params, first.params)
        assert (rest.training_loss, rest.held_out_loss) == (first.training_loss, first.held_out_loss)


def test_the_indexer_alone():
    """Its parameters move under its own loss; every other one keeps its bits."""
    csa = dict(compress_ratios=(4,), index_n_heads=2, index_head_dim=16, index_topk=4, indexer_loss_coeff=1.0)
    cfg = dataclasses.replace(CFG, indexer_phase="warm_up", **csa)
    config = dataclasses.replace(TRAIN, steps=3, warmup_steps=0, train_only="indexer")
    model = Decoder(cfg, rngs=nnx.Rngs(0))
    before = dict(nnx.to_flat_state(jax.tree.map(np.array, nnx.state(model, nnx.Param))))
    aux = []
    run = loop.train(model, config, ROWS, ROWS, lambda state, loss, losses, *_: aux.append(losses))
    moved = {path for path, leaf in nnx.to_flat_state(run.params) if np.any(leaf[...] != before[path][...])}
    assert moved == {path for path in before if "indexer" in path} and len(moved) > 4
    assert run.losses[0] == run.losses[-1]  # the cross entropy: the attention does not see the indexer yet
    assert len(aux) == 3 and {tuple(losses) for losses in aux} == {("indexer_loss",)}
    assert aux[-1]["indexer_loss"] < aux[0]["indexer_loss"]


@pytest.mark.parametrize("changes", [{}, {"compress_ratios": (4,)}, {"indexer_loss_coeff": 1.0}])
def test_the_indexer_alone_needs_one_that_is_taught(changes):
    model = nnx.eval_shape(lambda: Decoder(dataclasses.replace(CFG, index_head_dim=16, **changes), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="train_only: got 'indexer', wanted a model with an indexer"):
        loop.initial_state(model, dataclasses.replace(TRAIN, train_only="indexer"))


def test_evaluation_is_the_mean_over_the_predicted_bytes():
    model = make_model()
    graphdef, params = nnx.split(model, nnx.Param)
    logits = np.asarray(jax.jit(lambda model, rows: model(rows.tokens, rows.segment_ids)[0])(model, ROWS), np.float64)
    log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    nats = log_sum - np.take_along_axis(logits, ROWS.targets[..., None], -1)[..., 0]
    wanted = nats[ROWS.has_target].mean()
    assert loop.evaluate(graphdef, params, ROWS, len(ROWS)) == pytest.approx(wanted, rel=1e-5)
    filled_up = len(ROWS) + 1
    assert loop.evaluate(graphdef, params, ROWS, filled_up) == pytest.approx(wanted, rel=1e-5)


def test_learning_rate_warms_up_and_decays_to_zero():
    """The first step's rate is zero with a warm-up, and not without one; the last update is the smallest."""

    def moved(config, count):
        optimizer = loop.make_optimizer(config)
        params = {"w": np.ones((2, 2), np.float32)}
        state = optimizer.init(params)
        sizes = []
        for _ in range(count):
            updates, state = optimizer.update({"w": np.ones((2, 2), np.float32)}, state, params)
            sizes.append(float(abs(updates["w"]).max()))
        return sizes

    config = TrainConfig(steps=6, warmup_steps=2, weight_decay=0.0)
    sizes = moved(config, 6)
    assert sizes[0] == 0 and sizes[2] == max(sizes) == pytest.approx(config.learning_rate, rel=1e-3)
    assert sizes[2] > sizes[3] > sizes[4] > sizes[5] > 0
    assert moved(dataclasses.replace(config, warmup_steps=0), 1)[0] == pytest.approx(config.learning_rate, rel=1e-3)


def test_only_matrices_decay():
    optimizer = loop.make_optimizer(TrainConfig(warmup_steps=0, weight_decay=1.0))
    params = {"matrix": np.ones((2, 2), np.float32), "vector": np.ones(2, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert abs(updates["matrix"]).min() > 0 and not abs(updates["vector"]).any()
