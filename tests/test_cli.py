import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from flax import nnx

from dsv4_fusions import cli
from dsv4_fusions.config import load_yaml
from dsv4_fusions.layers import Decoder
from dsv4_fusions.testing import assert_trees_bitwise_equal
from dsv4_fusions.training import checkpoint, loop, metrics

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
train: {{batch_size: {batch_size}, sequence_length: {tokens}, steps: {steps}, warmup_steps: 2, eval_interval: 4}}
"""
ROOT = Path(__file__).parents[1]  # where a child process finds the package, installed or not
TEXT = "the quick brown fox jumps over the lazy dog. " * 20
STEPS = 6


def write_yaml(path, ratios=(0,), batch_size=2, tokens=32, vocab_size=256, steps=STEPS):
    values = {"layers": len(ratios), "ratios": list(ratios), "vocab_size": vocab_size}
    path.write_text(CONFIG.format(batch_size=batch_size, tokens=tokens, steps=steps, **values))
    return str(path)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """`train` writes metrics.csv into the current directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def write_config(tmp_path):
    """Writes a small configuration, with changes, and returns its path."""
    return lambda **changes: write_yaml(tmp_path / "config.yaml", **changes)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def train(write_config, text_file):
    """Runs `train` on the small configuration."""
    return lambda *argv: cli.main(["train", write_config(), "--text", text_file, *map(str, argv)])


@pytest.fixture(scope="module")
def unbroken_folder(tmp_path_factory):
    """Configuration and checkpoints of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "text.txt").write_text(TEXT)
    argv = ["train", write_yaml(folder / "config.yaml"), "--text", str(folder / "text.txt")]
    assert cli.main([*argv, "--checkpoint-dir", str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def unbroken(unbroken_folder):
    """Losses, held-out losses and final state of that run."""
    return losses(unbroken_folder / "run"), final_state(unbroken_folder / "run")


def losses(run):
    """(step, training loss, held-out loss) of every row; the texts, so that equal means to the last bit."""
    return [(row["step"], row["loss"], row["held_out_loss"]) for row in metrics.read(run / "metrics.csv")]


def final_state(run):
    """Parameters and optimizer's state of a run's last checkpoint, as nested dictionaries."""
    import orbax.checkpoint as ocp

    step = checkpoint.latest_step(run)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return step, [checkpointer.restore(run / str(step) / name) for name in ("params", "opt_state")]


def assert_same_run(run, unbroken):
    assert losses(run) == unbroken[0]
    (step, state), (wanted_step, wanted) = final_state(run), unbroken[1]
    assert step == wanted_step
    assert_trees_bitwise_equal(state, wanted)


@pytest.fixture
def fails(capsys):
    """Checks that a command ends with code 2 and one line on stderr, which it returns."""

    def run(*argv):
        capsys.readouterr()  # of what ran before
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
    assert cli.main(["train", write_config(), "--text", text_file]) == 0
    out = capsys.readouterr().out
    assert f"step {STEPS} of {STEPS}, loss" in out and "tokens/s" in out
    assert "fuse_inv_rope: active in 0 of 1 layers (fuse_inv_rope is False)" in out
    for name in ("training loss", "held-out loss", "bigram entropy", "unigram entropy"):
        assert name in out


@pytest.mark.optimised
@pytest.mark.smoke
def test_compare_proves_runs_bitwise_equal(write_config, text_file, capsys):
    assert cli.main(["train", write_config(), "--text", text_file, "--compare"]) == 0
    out = capsys.readouterr().out
    assert f"bitwise equal: {STEPS} losses" in out
    assert "fuse_inv_rope: active in 1 of 1 layers" in out and "fuse_kv_index_remap: active in 1 of 1 layers" in out


def test_compare_with_every_kind_of_layer(text_file, tmp_path, capsys):
    """The shipped hybrid's first layers at a tenth of their size, the indexer's loss among what is trained.

    Hardly optimised: as users compile them, these layers' bits are compared one by one (test_verify.py, tests/layers).
    """
    content = yaml.safe_load((ROOT / "configs" / "small_hybrid.yaml").read_text())
    content["model"] |= {"num_hidden_layers": 3, "compress_ratios": content["model"]["compress_ratios"][:3]}
    content["model"] |= {"hidden_size": 32, "head_dim": 16, "qk_rope_head_dim": 8, "intermediate_size": 32}
    content["model"] |= {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "q_lora_rank": 16, "o_lora_rank": 8}
    content["train"] |= {"batch_size": 2, "sequence_length": 160, "steps": 3, "warmup_steps": 1}
    path = tmp_path / "hybrid.yaml"
    path.write_text(yaml.safe_dump(content))
    table = tmp_path / "metrics.csv"
    assert cli.main(["train", str(path), "--text", text_file, "--compare", "--metrics", str(table)]) == 0
    out = capsys.readouterr().out
    assert "bitwise equal: 3 losses" in out and ", indexer loss 0." in out
    assert all(float(row["indexer_loss"]) > 0 for row in metrics.read(table))
    assert "fuse_inv_rope: active in 3 of 3 layers" in out and "fuse_kv_index_remap: active in 3 of 3 layers" in out


def test_generate_continues_the_prompt(unbroken_folder, capfdbinary):
    """The likeliest bytes are the same on every call, samples of one seed too; the prompt comes first."""
    argv = ["generate", str(unbroken_folder / "config.yaml"), "--checkpoint", str(unbroken_folder / "run")]

    def text(*more):
        assert cli.main([*argv, "--prompt", "the quick", *more]) == 0
        return capfdbinary.readouterr().out

    likeliest = text("--temperature", "0", "--bytes", "12")
    assert likeliest.startswith(b"the quick") and likeliest.endswith(b"\n") and len(likeliest) == 9 + 12 + 1
    assert text("--temperature", "0", "--bytes", "12", "--seed", "5") == likeliest
    samples = [text("--temperature", "2", "--bytes", "12", "--seed", seed) for seed in ("1", "1", "2")]
    assert samples[0] == samples[1] != samples[2]
    assert len(text("--bytes", "40")) == 9 + 40 + 1  # beyond the window
    assert text("--bytes", "3", "--seed", str(2**63 - 1)) == text("--bytes", "3", "--seed", str(2**63 - 1))
    assert text("--prompt", "a\udcff", "--bytes", "3").startswith(b"a\xff")  # what Python makes of a byte 255


def test_generate_names_what_is_wrong(unbroken_folder, write_config, fails, tmp_path):
    run, config = str(unbroken_folder / "run"), str(unbroken_folder / "config.yaml")
    command = lambda *more: ("generate", *more, "--prompt", "a")  # noqa: E731
    assert "compress_ratios: got [128]" in fails(*command(write_config(ratios=(128,)), "--checkpoint", run))
    assert "got no checkpoint in there" in fails(*command(config, "--checkpoint", str(tmp_path / "nowhere")))
    assert "--checkpoint" in fails("generate", config, "--prompt", "a")
    assert "prompt: got nothing" in fails("generate", config, "--checkpoint", run, "--prompt", "")
    assert "temperature: got -1" in fails(*command(config, "--checkpoint", run), "--temperature", "-1")
    assert "--bytes: got '0'" in fails(*command(config, "--checkpoint", run), "--bytes", "0")
    for seed in (2**63, 10**30, -(2**63) - 1):
        assert f"seed: got {seed}, wanted" in fails(*command(config, "--checkpoint", run), "--seed", str(seed))


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


@pytest.mark.optimised
def test_metrics_hold_every_step_to_the_bit(train, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(loop, "train", lambda *args, train=loop.train: runs.append(train(*args)) or runs[-1])
    assert train("--metrics", tmp_path / "m.csv", "--compare", "--plot", tmp_path / "p.png") == 0
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == ("run", "step", "loss", "indexer_loss", "held_out_loss", "tokens_per_second", "seconds")
    for name, run in zip(("fusions off", "fusions on"), runs, strict=True):
        mine = [row for row in rows if row["run"] == name]
        assert [int(row["step"]) for row in mine] == list(range(1, STEPS + 1))
        assert_trees_bitwise_equal(np.array([row["loss"] for row in mine], np.float32), run.losses)
        assert [row["step"] for row in mine if row["held_out_loss"]] == ["4", str(STEPS)]
        assert float(mine[-1]["held_out_loss"]) == run.held_out_loss
        seconds = [float(row["seconds"]) for row in mine]
        assert 0 < seconds[0] and seconds == sorted(seconds)
        assert all(float(row["tokens_per_second"]) > 0 for row in mine)
    assert [row["loss"] for row in rows[:STEPS]] == [row["loss"] for row in rows[STEPS:]]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_plot_shows_every_run(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from dsv4_fusions.training.plot import draw_losses

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    values = [("off", 1, 5.5, None), ("off", 2, 5.25, 5.3), ("on", "1", "5.5", ""), ("on", "2", "5.25", "5.3")]
    columns = ("run", "step", "loss", "held_out_loss")
    draw_losses("p.png", [dict(zip(columns, row, strict=True)) for row in values])
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].lines}
    curve, dots = [[1.0, 5.5], [2.0, 5.25]], [[2.0, 5.3]]
    assert lines == {"off": curve, "off, held out": dots, "on": curve, "on, held out": dots}


def test_plot_needs_matplotlib_before_the_training(train, fails, write_config, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ("train", write_config(), "--text", text_file, "--checkpoint-dir", str(tmp_path / "run"))
    assert "the extra plot brings it" in fails(*argv, "--plot", str(tmp_path / "p.png"))
    assert not (tmp_path / "run").exists()


def test_a_run_killed_at_any_step_resumes_to_the_same_bits(train, unbroken, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    for last in range(STEPS):
        run, argv = tmp_path / str(last), ("--checkpoint-dir", tmp_path / str(last), "--checkpoint-every", 2)

        def append(path, row, last=last, append=metrics.append):
            if row["step"] > last:
                raise Killed
            append(path, row)

        with monkeypatch.context() as patch:
            patch.setattr(metrics, "append", append)
            with pytest.raises(Killed):
                train(*argv)
        assert checkpoint.latest_step(run) == last // 2 * 2
        assert train(*argv, "--resume") == 0
        assert_same_run(run, unbroken)


KILLED_WHILE_SAVING = """
import os, pathlib, signal, sys, threading, time

def kill_once_a_checkpoint_is_half_written(run):
    while not any(path.name[0] > "3" for path in run.glob("*tmp*")):
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill_once_a_checkpoint_is_half_written, args=(pathlib.Path(sys.argv[1]),), daemon=True).start()
from dsv4_fusions import cli
cli.main(sys.argv[2:])
"""


def test_a_process_killed_while_saving_resumes_to_the_same_bits(write_config, text_file, unbroken, tmp_path):
    run = tmp_path / "run"
    argv = ["train", write_config(), "--text", text_file, "--checkpoint-dir", str(run), "--checkpoint-every", "2"]
    child = [sys.executable, "-c", KILLED_WHILE_SAVING, str(run), *argv]
    process = subprocess.run(child, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert any("tmp" in name for name in os.listdir(run)) and checkpoint.latest_step(run) in (2, 4)
    assert cli.main([*argv, "--resume"]) == 0
    assert_same_run(run, unbroken)


def test_a_run_resumes_under_other_fusions_to_the_same_bits(
    write_config, text_file, ctrl_c, unbroken, tmp_path, monkeypatch
):
    run, path = tmp_path / "run", write_config()
    argv = ["train", path, "--text", text_file, "--checkpoint-dir", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", interrupt_after(3))
        assert cli.main(argv) == cli.INTERRUPTED
    off = Path(path).read_text()
    Path(path).write_text(off.replace("model:", "model:\n  fuse_inv_rope: true\n  fuse_kv_index_remap: true"))
    assert cli.main([*argv, "--resume"]) == 0
    assert_same_run(run, unbroken)
    model = Decoder(load_yaml(path)[0], rngs=nnx.Rngs(1))
    checkpoint.load_params(run / str(STEPS) / "params", model)  # for use without the trainer
    assert model.layers[0].attention.fuse_inv_rope


def interrupt_after(last, train=loop.train):
    """`loop.train`, with Ctrl-C pressed during the step after `last - 1` steps."""

    def interrupted(model, config, training, held_out, on_step, start):
        def press(state, *rest):
            if state.step == last:
                signal.raise_signal(signal.SIGINT)
            on_step(state, *rest)

        return train(model, config, training, held_out, press, start)

    return interrupted


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal: a test run in the background ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_saves_and_the_run_goes_on(train, ctrl_c, unbroken, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", interrupt_after(3))
        assert train("--checkpoint-dir", run, "--plot", tmp_path / "p.png") == 130
    assert capsys.readouterr().err == f"dsv4-fusions train: interrupted after step 3, which is saved in {run}\n"
    assert checkpoint.latest_step(run) == 3 and losses(run) == unbroken[0][:3]
    assert (tmp_path / "p.png").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train("--checkpoint-dir", run, "--resume") == 0
    assert_same_run(run, unbroken)


def test_a_second_ctrl_c_does_not_wait(train, ctrl_c, tmp_path, capsys, monkeypatch):
    def interrupted_twice(*args):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(loop, "train", interrupted_twice)
    assert train("--checkpoint-dir", tmp_path / "run") == 130
    assert capsys.readouterr().err == "dsv4-fusions train: interrupted\n"


def test_ctrl_c_without_checkpoints_keeps_the_rows(train, ctrl_c, unbroken, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "train", interrupt_after(3))
    assert train("--metrics", tmp_path / "metrics.csv") == 130
    assert capsys.readouterr().err == "dsv4-fusions train: interrupted\n"
    assert losses(tmp_path) == unbroken[0][:2]


def test_a_finished_run_and_a_longer_one(train, unbroken, tmp_path, capsys, fails, write_config, text_file):
    argv = ("--checkpoint-dir", tmp_path / "run")
    assert train(*argv) == 0
    before = capsys.readouterr().out
    assert train(*argv, "--resume") == 0  # nothing left to do
    assert_same_run(tmp_path / "run", unbroken)
    again = capsys.readouterr().out
    assert "not the run" not in again and "step" not in again
    assert before.splitlines()[-8:] == again.splitlines()[-8:]  # the table
    assert train(*argv, "--resume", "--steps", STEPS + 2) == 0
    assert f"not the run that {STEPS + 2} unbroken steps give" in capsys.readouterr().out
    assert [int(step) for step, _, _ in losses(tmp_path / "run")] == list(range(1, STEPS + 3))
    argv = ("train", write_config(), "--text", text_file, *map(str, argv), "--resume")
    assert f"steps: got {STEPS}, but the run in {tmp_path / 'run'} has done {STEPS + 2}" in fails(*argv)


def test_a_run_is_not_overwritten_or_mixed_up(fails, write_config, text_file, tmp_path, unbroken):
    run, config = tmp_path / "run", write_config()
    argv = ("train", config, "--text", text_file, "--checkpoint-dir", str(run))
    assert f"{run}: got no checkpoint in there" in fails(*argv, "--resume")
    assert not run.exists()
    assert cli.main(argv) == 0
    assert "holds a run already; wanted --resume" in fails(*argv)
    for changes, message in (({"batch_size": 1}, "train.batch_size: got 1"), ({"ratios": (128,)}, "compress_ratios")):
        write_config(**changes)
        assert message in fails(*argv, "--resume")
    write_config()
    Path(text_file).write_text(TEXT + "!")
    assert "text.sha256" in fails(*argv, "--resume")
    assert_same_run(run, unbroken)


def test_rows_that_somebody_else_keeps_are_not_overwritten(fails, write_config, text_file, tmp_path, unbroken):
    argv = ("train", write_config(), "--text", text_file, "--checkpoint-dir", str(tmp_path))
    (tmp_path / "metrics.csv").write_text("epoch,accuracy\n1,0.5\n")
    assert "metrics.csv with other columns" in fails(*argv)
    metrics.start(tmp_path / "metrics.csv", [dict.fromkeys(metrics.COLUMNS, 1)])
    assert "holds a run already" in fails(*argv)
    metrics.start(tmp_path / "metrics.csv")  # what an attempt leaves that failed before its first step
    assert cli.main(argv) == 0
    assert_same_run(tmp_path, unbroken)


def test_metrics_go_to_the_current_directory(train, fails, write_config, text_file, capsys):
    for _ in range(2):  # the second run replaces the file of the first
        assert train() == 0
        assert [row["step"] for row in metrics.read("metrics.csv")] == [str(step) for step in range(1, STEPS + 1)]
    Path("metrics.csv").write_text("epoch,accuracy\n1,0.5\n")
    assert "metrics.csv with other columns" in fails("train", write_config(), "--text", text_file)
    assert Path("metrics.csv").read_text() == "epoch,accuracy\n1,0.5\n"
    argv = ("train", write_config(), "--text", text_file, "--metrics", text_file)  # a slip of the tab key
    assert "text.txt with other columns" in fails(*argv)
    assert Path(text_file).read_text() == TEXT
    assert "--metrics: cannot be combined with --checkpoint-dir" in fails(*argv, "--checkpoint-dir", "run")


def test_metrics_without_their_end_are_read_up_to_it(tmp_path):
    path = tmp_path / "metrics.csv"
    row = dict.fromkeys(metrics.COLUMNS, "1")
    metrics.start(path)
    metrics.append(path, row)
    metrics.append(path, row)
    os.truncate(path, path.stat().st_size - 3)
    assert metrics.read(path) == [row]
    os.truncate(path, 0)
    assert metrics.read(path) == []


def test_outputs_that_cannot_be_written(fails, write_config, text_file, tmp_path):
    argv = ("train", write_config(), "--text", text_file)
    below_a_file, missing = f"{text_file}/x", str(tmp_path / "missing" / "x")
    for option in ("--checkpoint-dir", "--metrics", "--plot"):
        assert "text.txt/x" in fails(*argv, option, below_a_file)
    for option in ("--metrics", "--plot"):
        assert "missing/x: No such file or directory" in fails(*argv, option, missing)
        assert f"{tmp_path}: Is a directory" in fails(*argv, option, str(tmp_path))
    assert "text.txt: Not a directory" in fails(*argv, "--checkpoint-dir", text_file)
    assert "--resume: wanted --checkpoint-dir" in fails(*argv, "--resume")
    assert "--checkpoint-every: wanted --checkpoint-dir" in fails(*argv, "--checkpoint-every", "3")
    assert "cannot be combined with --compare" in fails(*argv, "--compare", "--checkpoint-dir", str(tmp_path / "run"))
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "here", "text.txt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_in_one_line(train, fails, unbroken, write_config, text_file, tmp_path, capsys, monkeypatch):
    assert "/dev/full: No space left" in fails("train", write_config(), "--text", text_file, "--metrics", "/dev/full")

    def append(path, row, append=metrics.append):
        append("/dev/full" if row["step"] == 4 else path, row)

    monkeypatch.setattr(metrics, "append", append)
    run = tmp_path / "run"
    assert train("--checkpoint-dir", run, "--checkpoint-every", 3) == 2
    assert capsys.readouterr().err == "dsv4-fusions train: error: /dev/full: No space left on device\n"
    monkeypatch.undo()
    assert losses(run) == unbroken[0][:3]
    assert train("--checkpoint-dir", run, "--resume") == 0
    assert_same_run(run, unbroken)


def test_internal_errors_keep_their_traceback(train, monkeypatch):
    def broken(*args):
        raise ValueError("a bug")

    monkeypatch.setattr(loop, "train", broken)
    with pytest.raises(ValueError, match="a bug"):
        train()


def test_missing_and_broken_files(write_config, tmp_path, fails):
    assert "missing.yaml" in fails("train", str(tmp_path / "missing.yaml"))
    assert "missing.txt" in fails("train", write_config(), "--text", str(tmp_path / "missing.txt"))
    for argv in ((str(tmp_path),), (write_config(), "--text", str(tmp_path))):
        assert f"{tmp_path}: Is a directory" in fails("train", *argv)
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty" in fails("train", write_config(), "--text", str(tmp_path / "empty.txt"))
    (tmp_path / "short.txt").write_text("short")
    assert "too little" in fails("train", write_config(), "--text", str(tmp_path / "short.txt"))
    (tmp_path / "bad.yaml").write_text("model: {colour: red}")
    for command in ("train", "verify"):
        assert "model: got unknown 'colour'" in fails(command, str(tmp_path / "bad.yaml"))
    for content, message in (
        ("model: {hidden_size: wide}", "hidden_size: got 'wide', wanted an integer"),
        ("model: [1, 2]", "model: got [1, 2], wanted a mapping"),
        ("model: {}\ntrain: {steps: -1}", "steps: got -1, wanted 1 or more"),
        ("model: {hidden_size: 32\n", "is not valid YAML"),
        ("\x00\xff", "is not valid YAML"),
        ("", "wanted the top-level key model"),
    ):
        (tmp_path / "bad.yaml").write_bytes(content.encode("latin1"))
        assert message in fails("train", str(tmp_path / "bad.yaml"))


def test_sizes_beyond_every_machine(write_config, text_file, fails):
    assert "Unable to allocate" in fails("train", write_config(tokens=10**15), "--text", text_file)
    path = Path(write_config())
    for was, becomes, message in (
        ("hidden_size: 32", f"hidden_size: {10**14}", "Out of memory"),
        ("train: {", f"train: {{seed: {10**30}, ", "less than 2^32"),
    ):
        path.write_text(Path(write_config()).read_text().replace(was, becomes))
        assert message in fails("train", str(path), "--text", text_file)


def test_impossible_arguments(write_config, text_file, fails):
    assert "--steps: got '0'" in fails("train", write_config(), "--steps", "0")
    assert "--steps: got 'many'" in fails("train", write_config(), "--steps", "many")
    assert "--steps: got '-3'" in fails("train", write_config(), "--steps", "-3")
    assert "--checkpoint-every: got '0'" in fails("train", write_config(), "--checkpoint-every", "0")
    assert "--batch: got '-1'" in fails("verify", write_config(), "--batch", "-1")
    assert "--tokens: got '1.5'" in fails("verify", write_config(), "--tokens", "1.5")
    assert "layer: got 1, wanted 0 to 0" in fails("verify", write_config(), "--layer", "1")
    assert "vocab_size: got 100" in fails("train", write_config(vocab_size=100))
    assert "invalid choice: 'prove'" in fails("prove")
    assert "CONFIG" in fails("train")


@pytest.mark.parametrize("value", [2**31, 10**20])
@pytest.mark.parametrize(
    "argv",
    [
        ("train", "c.yaml", "--steps"),
        ("train", "c.yaml", "--checkpoint-every"),
        ("generate", "c.yaml", "--checkpoint", "run", "--prompt", "a", "--bytes"),
        ("verify", "c.yaml", "--batch"),
        ("verify", "c.yaml", "--tokens"),
        ("bench", "c.yaml", "--tokens"),
        ("bench", "c.yaml", "--repeats"),
    ],
    ids=lambda argv: f"{argv[0]}{argv[-1]}",
)
def test_sizes_beyond_32_bits(fails, argv, value):
    assert f"{argv[-1]}: got {value}, wanted less than 2^31" in fails(*argv, str(value))


@pytest.mark.parametrize(
    "argv, name",
    [
        (("train", ""), "CONFIG"),
        (("generate", "", "--checkpoint", "run", "--prompt", "a"), "CONFIG"),
        (("verify", ""), "CONFIG"),
        (("bench", ""), "CONFIG"),
        (("generate", "c.yaml", "--prompt", "a", "--checkpoint", ""), "--checkpoint"),
        *(
            ((*argv, option, ""), option)
            for argv, options in (
                (("train", "c.yaml"), ("--text", "--checkpoint-dir", "--metrics", "--plot")),
                (("bench", "c.yaml"), ("--csv", "--plot")),
            )
            for option in options
        ),
    ],
    ids=lambda value: f"{value[0]}{value[-2]}" if isinstance(value, tuple) else "",
)
def test_an_empty_path_is_named(fails, argv, name):
    assert f"argument {name}: got '', wanted a path" in fails(*argv)


@pytest.mark.parametrize("changes, option", [({"batch_size": 2**31}, "--batch"), ({"tokens": 10**20}, "--tokens")])
def test_verify_names_sizes_of_the_configuration(fails, write_config, changes, option):
    (size,) = changes.values()
    assert f"{option}: got {size}, wanted less than 2^31" in fails("verify", write_config(**changes))


def test_the_largest_size_is_taken():
    assert cli._positive(str(2**31 - 1)) == 2**31 - 1


def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "dsv4_fusions", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    assert "train" in result.stdout and "verify" in result.stdout


@pytest.mark.optimised
@pytest.mark.slow
def test_the_shipped_model_learns_real_text(tmp_path, capsys):
    """From little more than a quarter of what `make train` reads; well below the unigram entropy of 3.26 nats."""
    content = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    content["train"] |= {"batch_size": 2, "steps": 170}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    assert cli.main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert "fuse_inv_rope: active in 3 of 3 layers" in out and "fuse_kv_index_remap: active in 3 of 3 layers" in out
    assert float(re.search(r"held-out loss\D+([\d.]+)", out)[1]) <= 2.75
