"""How much XLA optimises the programs of a test: most of a test's time on a CPU is compilation."""

import contextlib
import gc
import itertools
import os
import pathlib

import jax

# Part of jit's cache key: what was compiled quickly is not taken where a user's program is wanted, nor the other way.
_quick = jax.make_user_context(False)


@contextlib.contextmanager
def quick():
    """Programs that are compiled inside are hardly optimised, those of child processes included. On CPUs alone."""
    if jax.default_backend() != "cpu" or _quick.value:
        yield
        return
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS")
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with _quick(True):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before == "1")
        if before is None:
            del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]
        else:
            os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = before


_MAPPINGS = pathlib.Path("/proc/self/maps")
_calls = itertools.count(1)


def free_programs():
    """Forgets all compiled programs, now and then.

    One takes dozens of memory mappings on a CPU. Linux gives a process 65,530, and without any left XLA crashes.
    """
    if next(_calls) % 5 == 0 and _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()
