"""Our layers against transformers' `DeepseekV4Attention`: its recorded results always, live ones where it is installed.

A difference is the norm of it over a whole array, relative to the norm of transformers' array.

bfloat16 is compared with an eager run of transformers all of whose parameters are bfloat16. There the rotary tables,
the attention's scores and its softmax are rounded to bfloat16, ours are not: nearly every result of transformers is 1.2
to 2 times as far from its own f32 result as ours is. Nothing is adjusted for that, the tolerance allows for both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers.common import quick

from dsv4_fusions import DSv4Config, DSv4HybridSelfAttention
from dsv4_fusions.hf import attention_weights, load_hf_attention
from tools import make_hf_fixtures as hf

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}

# Wider than the recorded cases, and other weights.
LIVE_CONFIG = hf.CONFIG | dict(hidden_size=96, num_attention_heads=8, head_dim=64, q_lora_rank=48, o_groups=4)
LIVE_CONFIG |= dict(o_lora_rank=32, sliding_window=128, index_head_dim=32, index_topk=48)
LIVE_SEED = 1004  # see `SEED` in the tool

recorded = functools.cache(hf.read_fixture)


@functools.cache
def live_source(kind):
    return hf.make_source(LIVE_CONFIG, kind, LIVE_SEED)[0]


def make_layer(case):
    cfg = DSv4Config.from_hf(case.config, dtype=case.dtype, param_dtype=case.dtype)
    layer = DSv4HybridSelfAttention(cfg, hf.KINDS.index(case.kind), rngs=nnx.Rngs(0))
    load_hf_attention(layer, case.weights)
    return layer


@functools.partial(quick, static_argnums=0)
def run(graphdef, state, x, g):
    # Not "highest": under jit on a CPU, XLA sums a bf16 weight gradient in bf16 whatever that says. With 1034 rows of
    # ones, jit(lambda x, w, g: vjp(lambda w: x @ w, w)[1](g)) is 512 instead of 1034; with this it is right.
    with jax.default_matmul_precision("F32_F32_F32"):
        y, pull = jax.vjp(lambda layer, x: layer(x)[0], nnx.merge(graphdef, state), x)
        return y, *pull(g)


def differences(case, wanted):
    """Of output, input gradient and every parameter's gradient, by name; where transformers has 0, so must we."""
    assert case.counts.mean() > 0.3  # so that no other seed leaves next to nothing to compare
    layer = make_layer(case)
    y, d_layer, dx = run(*nnx.split(layer), jnp.asarray(case.x, case.dtype), jnp.asarray(case.g, case.dtype))
    wanted = dict(wanted)
    pairs = {"y": (y[case.counts], wanted.pop("y")[case.counts]), "dx": (dx, wanted.pop("dx"))}
    weights = attention_weights(d_layer)
    assert weights.keys() == wanted.keys()
    pairs |= {name: (weights[name].param[...], weights[name].to_layer(grad)) for name, grad in wanted.items()}

    result = {}
    for name, (mine, theirs) in pairs.items():
        mine, norm = np.asarray(mine, np.float32), np.linalg.norm(theirs)
        if norm == 0:
            np.testing.assert_array_equal(mine, 0, err_msg=name)
        else:
            result[name] = float(np.linalg.norm(mine - theirs) / norm)
    return result


def check(case, wanted):
    found = differences(case, wanted)
    worst = max(found, key=found.get)
    name = f"{case.kind} {case.dtype} {case.x.shape[1]}"
    print(f"{name}: y {found['y']:.1e}, dx {found['dx']:.1e}, {worst} {found[worst]:.1e}")
    too_large = {name: value for name, value in found.items() if not value < TOLERANCES[case.dtype]}
    assert not too_large


@pytest.mark.parametrize("tokens", hf.LENGTHS)
@pytest.mark.parametrize("dtype", hf.DTYPES)
@pytest.mark.parametrize("kind", hf.KINDS)
def test_recorded(kind, dtype, tokens):
    check(*recorded(kind)[dtype, tokens])


@pytest.mark.parametrize("tokens", hf.LENGTHS)
@pytest.mark.parametrize("dtype", hf.DTYPES)
@pytest.mark.parametrize("kind", hf.KINDS)
def test_live(kind, dtype, tokens):
    try:
        import torch
        from transformers.models import deepseek_v4  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs torch and transformers 5.17 or newer: {error}")
    torch.set_num_threads(1)  # the test processes share the cores
    case = hf.make_case(live_source(kind), dtype, tokens)
    check(case, hf.reference(case))


def test_recorded_selections_leave_something_out():
    """Another selection makes another output: the recorded ones would tell."""
    case, wanted = recorded("csa")["float32", 127]
    case = case._replace(config=case.config | {"index_topk": 7})
    y = make_layer(case)(jnp.asarray(case.x))[0]
    assert np.linalg.norm(y - wanted["y"]) > 1e-2 * np.linalg.norm(wanted["y"])
