import dataclasses
import errno
import logging
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_fusions.config import DSv4Config, TrainConfig
from dsv4_fusions.layers import Decoder, linen
from dsv4_fusions.testing import assert_trees_bitwise_equal
from dsv4_fusions.training import checkpoint, loop

CFG = DSv4Config(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=8,
    qk_rope_head_dim=4,
    q_lora_rank=8,
    o_groups=1,
    o_lora_rank=8,
    sliding_window=4,
    compress_ratios=(0,),
    vocab_size=256,
    intermediate_size=16,
)
TRAIN = TrainConfig(steps=8, warmup_steps=1)
DOCUMENTS = [b"to be or not to be", b"that is the question"]
DESCRIPTION = checkpoint.describe_run(CFG, TRAIN, DOCUMENTS)


class Tower(nnx.Module):
    """Twelve layers, so that the orders of integer and string keys differ, and a parameter of another type."""

    def __init__(self, seed, layers=12, width=3, dtype=jnp.float32):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(
            [nnx.Linear(2, width, use_bias=False, param_dtype=dtype, rngs=rngs) for _ in range(layers)]
        )
        self.sink = nnx.Param(jax.random.normal(rngs.params(), (4,), jnp.bfloat16))


def params(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def make_decoder(seed=0, **switches):
    return Decoder(CFG, rngs=nnx.Rngs(seed), **switches)


def state_at(step, seed=0):
    """A state whose arrays all differ, integers aside."""
    state = loop.initial_state(make_decoder(seed), TRAIN)
    key = iter(jax.random.split(jax.random.key(seed), 1000))

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full_like(leaf, step)
        return jax.random.normal(next(key), leaf.shape, leaf.dtype)

    return loop.State(step, *jax.tree.map(fill, (state.params, state.opt_state)))


def test_params_keep_their_bits(tmp_path):
    saved, other = Tower(0), Tower(1)
    checkpoint.save_params(tmp_path / "params", saved)
    assert checkpoint.load_params(tmp_path / "params", other) is other
    assert_trees_bitwise_equal(params(saved), params(other))


def test_linen_and_nnx_read_each_other(tmp_path):
    module, token_ids = make_decoder(), jnp.zeros((1, 4), jnp.int32)
    twin = linen.Decoder(CFG)
    tree = twin.init(jax.random.key(7), token_ids)["params"]
    from_linen, from_nnx = tmp_path / "linen", str(tmp_path / "nnx")

    checkpoint.save_params(from_nnx, module)
    assert_trees_bitwise_equal(checkpoint.load_params(from_nnx, tree), linen.params_from_nnx(module))
    checkpoint.save_params(from_linen, tree)
    assert_trees_bitwise_equal(linen.params_from_nnx(checkpoint.load_params(from_linen, module)), tree)
    abstract = jax.eval_shape(twin.init, jax.random.key(0), token_ids)["params"]
    assert_trees_bitwise_equal(checkpoint.load_params(from_linen, abstract), tree)


def test_switches_are_not_saved(tmp_path):
    checkpoint.save_params(tmp_path / "params", make_decoder(fuse_inv_rope=True))
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "fuse" in name]
    assert "fuse" not in (tmp_path / "params" / "_METADATA").read_text() + str(DESCRIPTION)
    loaded = checkpoint.load_params(tmp_path / "params", make_decoder(1, fuse_kv_index_remap=True))
    attention = loaded.layers[0].attention
    assert (attention.fuse_inv_rope, attention.fuse_kv_index_remap) == (False, True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 4}, r"layers.0.kernel: got float32\[2, 3\], wanted float32\[2, 4\]"),
        ({"dtype": jnp.bfloat16}, r"layers.0.kernel: got float32\[2, 3\], wanted bfloat16\[2, 3\]"),
        ({"layers": 13}, r"layers.12.kernel: got nothing, wanted float32\[2, 3\]"),
        ({"layers": 11}, r"layers.11.kernel: got float32\[2, 3\], wanted nothing"),
    ],
    ids=["shape", "dtype", "missing", "unexpected"],
)
def test_params_that_do_not_fit_are_refused(tmp_path, changes, message):
    checkpoint.save_params(tmp_path / "params", Tower(0))
    other = Tower(1, **changes)
    before = jax.tree.map(np.array, params(other))
    with pytest.raises(ValueError, match=message):
        checkpoint.load_params(tmp_path / "params", other)
    assert_trees_bitwise_equal(params(other), before)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_params(tmp_path / "params", before)


def test_nothing_is_overwritten_and_nothing_invented(tmp_path):
    checkpoint.save_params(tmp_path / "params", Tower(0))
    with pytest.raises(FileExistsError, match="params exists"):
        checkpoint.save_params(tmp_path / "params", Tower(1))
    assert_trees_bitwise_equal(params(checkpoint.load_params(tmp_path / "params", Tower(2))), params(Tower(0)))
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="wanted a directory that save_params wrote"):
            checkpoint.load_params(path, Tower(0))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        checkpoint.load_params(tmp_path / "file", Tower(0))
    with pytest.raises(OSError, match="file"):
        checkpoint.save_params(tmp_path / "file" / "params", Tower(0))


def test_a_run_keeps_its_bits(tmp_path):
    saved = state_at(3)
    checkpoint.save_run(tmp_path, saved, DESCRIPTION, TRAIN.steps)
    loaded, steps = checkpoint.load_run(tmp_path, state_at(0, seed=1), DESCRIPTION)
    assert (loaded.step, steps) == (3, TRAIN.steps)
    assert_trees_bitwise_equal((loaded.params, loaded.opt_state), (saved.params, saved.opt_state))
    assert_trees_bitwise_equal(
        params(checkpoint.load_params(tmp_path / "3" / "params", make_decoder(2))), nnx.to_pure_dict(saved.params)
    )


def test_the_last_few_checkpoints_are_kept_and_incomplete_ones_ignored(tmp_path):
    assert checkpoint.latest_step(tmp_path / "missing") is None and not (tmp_path / "missing").exists()
    for step in (0, 5, 9, 10):
        checkpoint.save_run(tmp_path, state_at(step), DESCRIPTION, TRAIN.steps)
    assert sorted(os.listdir(tmp_path), key=int) == ["5", "9", "10"]
    os.rename(tmp_path / "10", tmp_path / "11.orbax-checkpoint-tmp")  # as if killed while writing 11,
    shutil.rmtree(tmp_path / "5" / "params")  # and another time while deleting 5
    assert checkpoint.latest_step(tmp_path) == 9
    assert checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)[0].step == 9
    checkpoint.save_run(tmp_path, state_at(11), DESCRIPTION, TRAIN.steps)
    assert checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)[0].step == 11


def test_a_run_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in there"):
        checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)
    checkpoint.save_run(tmp_path, state_at(1), DESCRIPTION, TRAIN.steps)

    def load(cfg=CFG, config=TRAIN, documents=DOCUMENTS):
        return checkpoint.load_run(tmp_path, state_at(0), checkpoint.describe_run(cfg, config, documents))

    with pytest.raises(ValueError, match=r"model.rope_theta: got 500.0, but the run in .* has 10000.0"):
        load(cfg=dataclasses.replace(CFG, rope_theta=500.0))
    with pytest.raises(ValueError, match="model.postmix_backward: got 'single_pass', but"):
        load(cfg=dataclasses.replace(CFG, postmix_backward="single_pass"))  # may change bits
    with pytest.raises(ValueError, match="train.seed: got 1, but the run in .* has 0"):
        load(config=dataclasses.replace(TRAIN, seed=1))
    for documents in ([b"".join(DOCUMENTS)], DOCUMENTS[::-1]):  # the same bytes, cut or ordered otherwise
        with pytest.raises(ValueError, match="text.sha256"):
            load(documents=documents)
    neutral = dataclasses.replace(TRAIN, steps=20, eval_interval=2)
    assert load(dataclasses.replace(CFG, fuse_inv_rope=True, fuse_kv_index_remap=True), neutral)[0].step == 1


def test_checkpoints_of_another_program_are_refused(tmp_path):
    checkpoint.save_run(tmp_path, state_at(1), DESCRIPTION, TRAIN.steps)
    (tmp_path / "1" / "run" / "metadata").write_text('{"epoch": 3}')
    with pytest.raises(ValueError, match="another program's checkpoints"):
        checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)
    shutil.rmtree(tmp_path / "1" / "run")
    with pytest.raises(ValueError, match="another program's checkpoints"):
        checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path):
    checkpoint.save_run(tmp_path, state_at(1), DESCRIPTION, TRAIN.steps)
    state = state_at(0)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim else leaf, state.opt_state)
    with pytest.raises(ValueError, match=r"opt_state: 1.0.mu.embedding: got float32\[256, 16\], wanted bfloat16"):
        checkpoint.load_run(tmp_path, dataclasses.replace(state, opt_state=half), DESCRIPTION)


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, capfd):
    """Played by a limit on the size of files, which storage reports alike."""
    checkpoint.save_run(tmp_path, state_at(1), DESCRIPTION, TRAIN.steps)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError) as info:
            checkpoint.save_run(tmp_path, state_at(2), DESCRIPTION, TRAIN.steps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert info.value.errno == errno.EFBIG and info.value.filename == str(tmp_path / "2")
    assert capfd.readouterr() == ("", "") and not logging.getLogger("absl").disabled
    assert checkpoint.load_run(tmp_path, state_at(0), DESCRIPTION)[0].step == 1
    checkpoint.save_run(tmp_path, state_at(2), DESCRIPTION, TRAIN.steps)
    assert checkpoint.latest_step(tmp_path) == 2
