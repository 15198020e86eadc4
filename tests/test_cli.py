import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from dsv4_fusions import cli
from dsv4_fusions.training import loop

CONFIG = """
model:
  hidden_size: 32
  num_hidden_layers: {layers}
  num_attention_heads: 4
  head_dim: 16
  qk_rope_head_dim: 8
  q_lora_rank: 16
  o_groups: 2
  o_lora_rank: 8
  sliding_window: 8
  compress_ratios: {ratios}
  vocab_size: {vocab_size}
  intermediate_size: 32
  index_head_dim: 8
train: {{batch_size: {batch_size}, sequence_length: {tokens}, steps: 3, warmup_steps: 2}}
"""


@pytest.fixture
def write_config(tmp_path):
    """Writes a small configuration, with changes, and returns its path."""

    def write(ratios=(0,), batch_size=2, tokens=32, vocab_size=256):
        path = tmp_path / "config.yaml"
        values = {"layers": len(ratios), "ratios": list(ratios), "vocab_size": vocab_size}
        path.write_text(CONFIG.format(batch_size=batch_size, tokens=tokens, **values))
        return str(path)

    return write


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return str(path)


@pytest.fixture
def fails(capsys):
    """Checks that a command ends with code 2 and one line on stderr, which it returns."""

    def run(*argv):
        try:
            code = cli.main(argv)
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        assert code == 2 and captured.out == ""
        assert captured.err.endswith("\n") and captured.err.count("\n") == 1 and "error: " in captured.err
        return captured.err

    return run


@pytest.mark.smoke
def test_train_prints_losses_beside_the_entropies(write_config, text_file, capsys):
    assert cli.main(["train", write_config(), "--text", text_file, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2 of 2, loss" in out and "tokens/s" in out
    assert "fuse_inv_rope: active in 0 of 1 layers (fuse_inv_rope is False)" in out
    for name in ("training loss", "held-out loss", "bigram entropy", "unigram entropy"):
        assert name in out


@pytest.mark.smoke
def test_compare_proves_runs_bitwise_equal(write_config, text_file, capsys):
    assert cli.main(["train", write_config(), "--text", text_file, "--steps", "2", "--compare"]) == 0
    out = capsys.readouterr().out
    assert "bitwise equal: 2 losses" in out
    assert "fuse_inv_rope: active in 1 of 1 layers" in out and "fuse_kv_index_remap: active in 1 of 1 layers" in out


@pytest.mark.parametrize("what", ["losses", "embedding"])
def test_compare_fails_on_one_bit(write_config, text_file, capsys, monkeypatch, what):
    def train(model, *args):
        """Trains nothing; the run with the fusions on differs from the other one in the lowest bit of one element."""
        losses = np.ones(3, np.float32)
        if model.layers[0].attention.fuse_inv_rope and what == "losses":
            losses[1] = np.nextafter(losses[1], np.float32(2))
        if model.layers[0].attention.fuse_inv_rope and what == "embedding":
            embedding = np.array(model.embedding[...])
            embedding[7, 3] = np.nextafter(embedding[7, 3], np.float32(2))
            model.embedding[...] = embedding
        return loop.Run(losses, nnx.state(model, nnx.Param), 1.0, 1.0)

    monkeypatch.setattr(loop, "train", train)
    assert cli.main(["train", write_config(), "--text", text_file, "--compare"]) == 1
    out = capsys.readouterr().out
    assert f"{what}: 1 elements differ" in out and "bitwise equal" not in out


def test_compare_needs_every_fusion_in_some_layer(write_config, text_file, capsys, monkeypatch):
    def never_trains(*args, **kwargs):
        raise AssertionError("trained for nothing")

    monkeypatch.setattr(loop, "train", never_trains)
    assert cli.main(["train", write_config(batch_size=1), "--text", text_file, "--compare"]) == 2
    out = capsys.readouterr().out
    assert "fuse_kv_index_remap is not active in any layer" in out and "batch 1" in out


def test_ctrl_c_ends_in_one_line(write_config, text_file, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupted)
    assert cli.main(["train", write_config(), "--text", text_file]) == 130
    assert capsys.readouterr().err == "dsv4-fusions train: interrupted\n"


def test_missing_and_broken_files(write_config, tmp_path, fails):
    assert "missing.yaml" in fails("train", str(tmp_path / "missing.yaml"))
    assert "missing.txt" in fails("train", write_config(), "--text", str(tmp_path / "missing.txt"))
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty" in fails("train", write_config(), "--text", str(tmp_path / "empty.txt"))
    (tmp_path / "short.txt").write_text("short")
    assert "too little" in fails("train", write_config(), "--text", str(tmp_path / "short.txt"))
    (tmp_path / "bad.yaml").write_text("model: {colour: red}")
    for command in ("train", "verify"):
        assert "model: got unknown 'colour'" in fails(command, str(tmp_path / "bad.yaml"))


def test_impossible_arguments(write_config, text_file, fails):
    assert "--steps: got '0'" in fails("train", write_config(), "--steps", "0")
    assert "--steps: got 'many'" in fails("train", write_config(), "--steps", "many")
    assert "--batch: got '-1'" in fails("verify", write_config(), "--batch", "-1")
    assert "--tokens: got '1.5'" in fails("verify", write_config(), "--tokens", "1.5")
    assert "layer: got 1, wanted 0 to 0" in fails("verify", write_config(), "--layer", "1")
    assert "vocab_size: got 100" in fails("train", write_config(vocab_size=100))
    assert "invalid choice: 'prove'" in fails("prove")
    assert "CONFIG" in fails("train")


def test_layers_that_are_not_built_cannot_train(write_config, text_file, fails):
    assert "compress_ratios[1] = 4" in fails("train", write_config(ratios=(0, 4)), "--text", text_file)


def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "dsv4_fusions", "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "train" in result.stdout and "verify" in result.stdout


@pytest.mark.slow
def test_the_shipped_model_learns_real_text(capsys):
    """With half the steps of `make train`, and both fusions on, well below the unigram entropy of 3.26 nats."""
    tiny = Path(__file__).parent.parent / "configs" / "tiny.yaml"
    assert cli.main(["train", str(tiny), "--steps", "150"]) == 0
    out = capsys.readouterr().out
    assert "fuse_inv_rope: active in 3 of 3 layers" in out and "fuse_kv_index_remap: active in 3 of 3 layers" in out
    assert float(re.search(r"held-out loss\D+([\d.]+)", out)[1]) <= 2.75
