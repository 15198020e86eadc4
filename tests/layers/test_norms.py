import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_fusions.layers import RMSNorm, rms_normalize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_statistics_are_f32(dtype):
    x = (300 * jax.random.normal(jax.random.key(0), (5, 64))).astype(dtype)  # whose squares overflow float16
    norm = RMSNorm(64, eps=1e-6)
    norm.weight[...] = jnp.linspace(0.5, 2.0, 64)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    rtol = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]  # one rounding
    for got, expected in ((rms_normalize(x, 1e-6), want), (norm(x), want * np.linspace(0.5, 2.0, 64))):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1.1 * rtol)


def test_zero_rows_stay_zero_with_finite_gradients():
    norm = RMSNorm(8, eps=1e-6, param_dtype=jnp.bfloat16)
    assert norm.weight[...].dtype == jnp.bfloat16
    x = jnp.zeros((2, 8), jnp.bfloat16)
    assert not jnp.any(norm(x))
    assert jnp.all(jnp.isfinite(jax.grad(lambda x: norm(x).astype(jnp.float32).sum())(x)))
