"""The search for races in Mosaic kernels, in JAX's simulator."""

import functools

import jax
import pytest


@pytest.fixture
def finds_race_in(monkeypatch):
    """finds_race_in(run, operands, products): whether the simulator, told to look for races, finds one in its kernels.

    By itself it does not note what a matrix product reads. With `products` an ordinary read in front of each stands for
    that, and the fence that such a read needs before a tile is filled again behind it. That fence may stand in for a
    missing one of the kernel's, so both ways are needed.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from dsv4_fusions import dispatch

    # JAX has no public name for the races that its simulator finds.
    simulator = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call", exc_type=ImportError)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", functools.partial(plgpu.InterpretGPUParams, detect_races=True))
    wgmma, commit_smem = plgpu.wgmma, plgpu.commit_smem

    def noted_wgmma(sums, a, b):
        for ref in (a, b):
            plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
        wgmma(sums, a, b)
        commit_smem()

    def find(run, operands, products):
        monkeypatch.setattr(plgpu, "wgmma", noted_wgmma if products else wgmma)
        simulator.reset_gpu_interpret_mode_state()
        with dispatch.interpret():
            jax.block_until_ready(jax.jit(run)(*operands))
        return simulator.get_races().races_found

    yield find
    simulator.reset_gpu_interpret_mode_state()
