"""What `import dsv4_fusions` loads, and what it leaves for later."""

import subprocess
import sys

import jax
import pytest


def modules_after(*imports):
    program = f"import sys; {'; '.join(imports)}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


PREREQUISITES = ("import jax", "import flax.nnx", "import jaxtyping")
CALL = "import dsv4_fusions as d, jax.numpy as jnp; d.vha_postmix(jnp.ones((3, 2, 4)), jnp.eye(2))"


@pytest.fixture(scope="module")
def prerequisites():
    return modules_after(*PREREQUISITES)


def test_import_loads_nothing_beyond_jax_flax_and_jaxtyping(prerequisites):
    loaded = {name.split(".")[0] for name in modules_after("import dsv4_fusions") - prerequisites}
    assert loaded - sys.stdlib_module_names == {"dsv4_fusions"}


@pytest.mark.parametrize("program", ["import dsv4_fusions", CALL], ids=["import", "a call on a CPU"])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU a call runs a Pallas kernel")
def test_no_pallas_is_loaded(prerequisites, program):
    # flax.nnx loads some of Pallas' internals itself.
    assert not [name for name in modules_after(program) - prerequisites if "pallas" in name]
