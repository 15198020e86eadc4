import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from remap_oracle import flat_ids, random_ids

from dsv4_fusions import cli, dispatch, verify
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.layers import dsv4_attention
from dsv4_fusions.ops.kv_index_table import reference

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "compress_ratios": [128, 4, 128],
    "indexer_loss_coeff": 0.1,
    "index_head_dim": 8,
}


@pytest.fixture
def run_json(tmp_path, capsys):
    """Runs `verify --json` on the small configuration, with changes; returns the exit code and the report."""

    def run(*argv, **changes):
        path = tmp_path / "config.yaml"
        content = {"model": MODEL | changes, "train": {"batch_size": 2, "sequence_length": 128}}
        path.write_text(yaml.safe_dump(content))
        code = cli.main(["verify", str(path), "--json", *argv])
        return code, json.loads(capsys.readouterr().out)

    return run


def mismatches(report):
    return {
        each["name"]: (each["run_to_run"], each["fused_to_unfused"])
        for kind in report["kinds"]
        for each in kind["comparisons"]
    }


@pytest.mark.optimised
def test_every_tensor_of_every_kind_of_layer_is_compared(run_json):
    code, report = run_json()
    assert code == report["exit_code"] == 0 and report["mismatches"] == 0
    hca, csa = report["kinds"]
    assert (hca["compress_ratio"], hca["layers"]) == (128, [0, 2])
    assert (csa["compress_ratio"], csa["layers"]) == (4, [1])
    cfg = DSv4Config.from_dict(MODEL)
    for kind, told in zip(verify.build_layers(cfg, 2, 128), report["kinds"], strict=True):
        parameters = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(kind.layer))]
        wanted = {"output", "input gradient", "remapped ids", *(f"gradient of {name}" for name in parameters)}
        wanted |= {"indexer_loss"} if kind.ratio == 4 else set()
        assert {each["name"] for each in told["comparisons"]} == wanted and "gradient of postmix_v" in wanted
        assert all(each["elements"] > 0 for each in told["comparisons"])
    assert report["fused_layers"] == {name: {"0": "xla", "1": "xla", "2": "xla"} for name in verify.SWITCHES} or (
        jax.default_backend() == "gpu"
    )


def test_a_wrong_fused_forward_is_found(run_json, monkeypatch):
    fused = dsv4_attention.inv_rope_vha_postmix

    def sabotaged(*args, **kwargs):  # the lowest bit of one token's row
        return fused(*args, **kwargs).at[0, 3].multiply(1 + 2**-7)

    monkeypatch.setattr(dsv4_attention, "inv_rope_vha_postmix", sabotaged)
    run = verify._run.__wrapped__
    monkeypatch.setattr(verify, "_run", jax.jit(lambda *args: run(*args)))  # nothing sabotaged stays in a cache
    code, report = run_json("--tokens", "24", "--layer", "0")
    assert code == report["exit_code"] == 1
    found = mismatches(report)
    assert all(run_to_run == 0 for run_to_run, _ in found.values())
    assert found["output"][1] > 0 and found["input gradient"][1] > 0
    assert sum(fused_to_unfused for _, fused_to_unfused in found.values()) == report["mismatches"]


def test_a_wrong_remap_is_found(run_json, monkeypatch):
    right = verify._remap
    monkeypatch.setattr(verify, "_remap", lambda ids, kv_len: right(ids, kv_len - 1))
    code, report = run_json("--tokens", "24", "--layer", "0")
    assert code == 1
    found = mismatches(report)
    assert found["remapped ids"][0] == 0 and found["remapped ids"][1] > 0 and found["output"] == (0, 0)


def test_the_remap_is_not_compared_with_itself(monkeypatch):
    """Without a kernel, fused and unfused layers share this reference: where it is wrong, they agree."""
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "1")
    right = reference.local_to_flat
    monkeypatch.setattr(reference, "local_to_flat", lambda ids, kv_len: right(ids, kv_len - 1))
    monkeypatch.setattr(verify, "_remap", verify._remap.__wrapped__)  # not jitted: nothing wrong stays in a cache
    ids = random_ids((2, 5, 3), 400)
    assert verify._compare_remap(jnp.asarray(ids), 400).fused_to_unfused == np.count_nonzero(ids[1] >= 0) > 0


@pytest.mark.parametrize("shape", [(1, 3, 2), (3, 300, 5), (2, 256, 1)], ids=str)
def test_every_wrong_id_is_counted(shape, monkeypatch):
    ids = jnp.asarray(random_ids(shape, 400))
    assert verify._compare_remap(ids, 400) == verify.Comparison("remapped ids", ids.size, 0, 0)
    wrong = flat_ids(np.asarray(ids), 400)
    wrong[[0, -1]] += 1
    monkeypatch.setattr(verify, "_remap", lambda ids, kv_len: jnp.asarray(wrong))
    assert verify._compare_remap(ids, 400) == verify.Comparison("remapped ids", ids.size, 0, 2 * shape[2])


def test_a_remap_that_does_not_repeat_itself_is_found(monkeypatch):
    steps = itertools.count()
    monkeypatch.setattr(verify, "_remap", lambda ids, kv_len: jnp.full((4, 2), next(steps), jnp.int32))
    assert verify._compare_remap(jnp.zeros((1, 4, 2), jnp.int32), 8).run_to_run == 8


def test_a_machine_that_does_not_repeat_itself_is_found():
    values = iter(range(3))
    (comparison,) = verify._compare(lambda fused: {"output": jnp.full(5, next(values), jnp.float32)})
    assert (comparison.elements, comparison.run_to_run, comparison.fused_to_unfused) == (5, 5, 5)


@pytest.mark.parametrize(
    "run_to_run, fused_to_unfused, wanted", [(0, 0, 0), (1, 0, 1), (0, 1, 1)], ids=["equal", "unstable", "wrong"]
)
def test_exit_code(run_to_run, fused_to_unfused, wanted):
    active = dsv4_attention.FusionStatus(True, "xla", "")
    kind = verify.LayerKind(0, (0,), None, dict.fromkeys(verify.SWITCHES, active))
    assert verify.Report([kind], [[verify.Comparison("output", 3, run_to_run, fused_to_unfused)]]).exit_code == wanted


@pytest.mark.filterwarnings("ignore:fuse_.*has no effect")
def test_nothing_fused_is_no_success(run_json, monkeypatch):
    monkeypatch.setattr(verify, "_compare_kind", lambda *args: [verify.Comparison("output", 3, 0, 0)])
    changes = {"use_vha_attention": False, "sparse_attention_backend": "xla"}
    code, report = run_json("--layer", "0", "1", **changes)
    assert code == report["exit_code"] == 2 and report["mismatches"] == 0
    assert "use_vha_attention" in report["kinds"][0]["fusions"]["fuse_inv_rope"]["reason"]


def test_the_table_names_kinds_and_conclusion(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify, "_compare_kind", lambda *args: [verify.Comparison("output", 3, 0, 0)])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "train": {"batch_size": 2, "sequence_length": 128}}))
    assert cli.main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    for words in (
        "compress ratio 128: layers 0, 2",
        "compress ratio 4: layers 1",
        "fused in 3 of 3 layers",
    ):
        assert words in out
    assert "bitwise equal at batch 2, 128 tokens" in out


def test_no_parameter_stays_at_zero():
    cfg = DSv4Config.from_dict(MODEL)
    (kind,) = verify.build_layers(cfg, 2, 128, [0])
    params = nnx.state(kind.layer, nnx.Param)
    assert not kind.layer.postmix_v[...].any()
    moved = nnx.to_pure_dict(verify._moved_off_zero(params, jax.random.key(0)))
    assert all(leaf.any() for leaf in jax.tree.leaves(moved))
    assert moved["postmix_u"].tolist() == kind.layer.postmix_u[...].tolist()  # what is not zero stays


@pytest.mark.parametrize("batch, tokens", [(1, 7), (4, 97), (3, 2)])
def test_documents_of_the_test_input(batch, tokens):
    rows = np.asarray(verify._documents(batch, tokens))
    assert rows.shape == (batch, tokens) and (rows[0] == 1).all()
    if tokens > 10:
        assert all(len(set(row)) == 4 and row[-1] == 0 for row in rows[1:])
        assert len({row.tobytes() for row in rows}) == batch
