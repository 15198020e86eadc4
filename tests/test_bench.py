"""The command `bench`: what it compares, what it times, what it writes."""

import contextlib
import csv
import dataclasses
import io
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import lower_for_cuda

from dsv4_fusions import bench, cli
from dsv4_fusions.config import load_yaml
from dsv4_fusions.rope import rope_tables, rotate

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")
CFG = load_yaml(TINY)[0]
TOKENS = (24, 40)
OURS = [bench._ours(name, "xla", backward) for backward in bench.BACKWARDS for name in ("unfused", "fused")]
VERSIONS = {version.label: version for version in (*OURS, *bench._PAIRS)}
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's code for a CPU")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Exit code, output, CSV rows and PNG of a whole run at two sizes."""
    folder = tmp_path_factory.mktemp("bench")
    files = [str(folder / name) for name in ("times.csv", "times.png")]
    pytest.importorskip("matplotlib")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        argv = ["bench", TINY, "--tokens", *map(str, TOKENS), "--repeats", "2", "--csv", files[0], "--plot", files[1]]
        code = cli.main(argv)
    with open(files[0], newline="") as file:
        rows = list(csv.DictReader(file))
    return code, out.getvalue(), rows, Path(files[1]).read_bytes()


@pytest.fixture
def fails(capsys):
    """Checks that the command ends with code 2 and one line on stderr, which it returns."""

    def run(*argv):
        try:
            code = cli.main(["bench", *argv])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        assert code == 2 and captured.out == "" and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.smoke
def test_every_version_has_a_row_for_every_pass_and_size(finished):
    code, _, rows, _ = finished
    assert code == 0 and tuple(rows[0]) == bench.COLUMNS
    versions, _ = bench.find_versions(CFG, TOKENS[0])
    found = [(row["tokens"], row["pass"], row["version"], row["implementation"], row["backward"]) for row in rows]
    assert found == [
        (str(tokens), pass_.name, version.name, version.implementation, version.backward)
        for tokens in TOKENS
        for pass_ in bench.PASSES
        for version in versions
    ]
    names = {version.label for version in versions}
    assert names >= {f"unfused xla {how}" for how in ("dot_general", "single_pass")} | {"xla einsum", "xla batched"}
    assert jax.default_backend() != "cpu" or names >= {"fused xla dot_general", "fused xla single_pass"}


def test_ratios_and_percentiles_agree_with_each_other(finished):
    _, _, rows, _ = finished
    parts = {"forward": 2, "backward": 3, "backward_frozen_m": 2, "forward_backward": 5}
    copies = {}
    for row in rows:
        ms, roof = float(row["ms_p50"]), float(row["roof_ms"])
        assert float(row["ratio"]) == pytest.approx(ms / roof, rel=1e-4)
        assert float(row["host_ratio"]) == pytest.approx(float(row["host_ms_p50"]) / roof, rel=1e-4)
        assert 0 < float(row["ms_p20"]) <= ms <= float(row["ms_p80"])
        copies.setdefault(row["tokens"], []).append(roof * 2 / parts[row["pass"]])
        assert row["clock"] == bench.clock()
        assert (row["dm_error"] != "") == (row["pass"] in ("backward", "forward_backward"))
    for times in copies.values():
        np.testing.assert_allclose(times, times[0], rtol=1e-4)  # all roofs of a size come from one copy


def test_rows_say_what_was_measured_and_on_what(finished):
    _, _, rows, _ = finished
    shape = ("8", "32", "16", "bfloat16", "each_product")
    for row in rows:
        assert tuple(row[name] for name in ("heads", "head_dim", "rope_dim", "dtype", "rounding")) == shape
        assert row["jax"] == jax.__version__ and row["gpu"] == jax.devices()[0].device_kind
        assert "force_host_platform_device_count" in row["xla_flags"]  # conftest.py sets it
        tensor = int(row["tokens"]) * 8 * 32 * 2
        assert int(row["temp_bytes"]) >= 0 and int(row["peak_bytes"]) >= int(row["temp_bytes"]) + 2 * tensor


def test_the_output_tells_the_conditions_and_the_speed_ups(finished):
    _, out, _, _ = finished
    assert "8 heads of 32 channels, 16 of them rotary, bfloat16, rounding each_product" in out
    assert f"JAX {jax.__version__}, XLA_FLAGS --xla" in out
    for tokens in TOKENS:
        assert f"{tokens} tokens: a copy of" in out
        for pass_ in bench.PASSES:
            assert f"{pass_.title}, {tokens} tokens: the roof is" in out
    einsum = [line.split() for line in out.splitlines() if line.startswith(" xla einsum")]
    assert len(einsum) == 8 and all(line[-2] == "1.00" for line in einsum)


@on_cpu
def test_on_a_cpu_the_output_says_how_little_its_times_mean(finished):
    _, out, rows, _ = finished
    assert "these are times of a CPU: they say little about a GPU" in out
    assert (
        "not measured: triton dot_general, triton single_pass (implementation 'triton' cannot run here: it needs" in out
    )
    assert all(row["clock"] == "host" and row["ms_p50"] == row["host_ms_p50"] for row in rows)


def test_the_plot_is_a_png(finished):
    assert finished[3].startswith(b"\x89PNG")


@pytest.fixture
def run_wrong(tmp_path, capsys, monkeypatch):
    """Runs the command with a function of the module replaced; returns the code, the output and the CSV rows."""

    def run(name, wrong):
        monkeypatch.setattr(bench, name, wrong)
        monkeypatch.setattr(bench, "BACKWARDS", ("dot_general",))
        path = tmp_path / "times.csv"
        code = cli.main(["bench", TINY, "--tokens", "16", "--repeats", "1", "--csv", str(path)])
        with open(path, newline="") as file:
            return code, capsys.readouterr().out, list(csv.DictReader(file))

    return run


def timed(out):
    """Labels of the versions that a table has times of."""
    return {match[1] for match in re.finditer(r"^ (\w+ \w+(?: \w+)?) +\d", out, re.MULTILINE)}


@on_cpu
def test_a_wrong_fused_version_gets_no_times(run_wrong):
    right = bench.inv_rope_vha_postmix

    def wrong(*args, **kwargs):  # the lowest bit of one token's row, in the forward alone
        return right(*args, **kwargs).at[3].multiply(1 + 2**-7)

    code, out, rows = run_wrong("inv_rope_vha_postmix", wrong)
    assert code == 1
    assert re.search(r"no times: fused xla dot_general, forward: out: \d+ elements differ from unfused", out)
    assert timed(out) == {"unfused xla dot_general", "xla einsum", "xla batched"}
    assert {row["version"] for row in rows} == {"unfused", "xla einsum", "xla batched"}


@on_cpu
def test_a_wrong_baseline_gets_no_times(run_wrong):
    unrotated = dataclasses.replace(bench._EINSUM, rotate=lambda o, tables: o)
    code, out, rows = run_wrong("_PAIRS", (unrotated,))
    assert code == 1
    assert re.search(r"no times: xla einsum, forward: out: relative error \S+ against unfused xla dot_general", out)
    assert "no times: xla einsum, backward: d_o: relative error" in out
    assert timed(out) == {"unfused xla dot_general", "fused xla dot_general"}
    assert {row["version"] for row in rows} == {"fused", "unfused"}


LIKE_M = jnp.eye(2, dtype=jnp.bfloat16)


@pytest.mark.parametrize("label", VERSIONS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_counts_as_wrong(label, on_gpu, monkeypatch):
    """On a GPU, ours equal each other in output and gradient of o; elsewhere only fused and unfused need to."""
    monkeypatch.setattr(bench, "_on_gpu", lambda: on_gpu)
    version = VERSIONS[label]
    right = {"out": jnp.ones((2, 2, 2), jnp.bfloat16), "d_m": LIKE_M}
    another_bit = right | {"out": right["out"].at[0].multiply(1 + 2**-7)}

    def check(results, specified=right, unfused=right, exact_dm=np.eye(2)):  # noqa: B008
        return bench._check_results(version, results, specified, unfused, exact_dm)

    assert check(right) == bench._Check([], 0, 0.0)
    found = check(another_bit, unfused=another_bit)
    assert found.differing == 4 and bool(found.wrong) == (version.is_ours and on_gpu)
    assert bool(check(another_bit, specified=another_bit).wrong) == (version.name == "fused")
    assert bool(check(right, exact_dm=1.05 * np.eye(2)).wrong) == version.is_ours
    nan = right | {"out": right["out"].at[0].set(jnp.nan)}
    assert bool(check(nan, unfused=nan).wrong) == (on_gpu or not version.is_ours)


def dots(text):
    return text.count("stablehlo.dot_general")


def lowered(version, lower=lambda fn, *args: jax.jit(fn).lower(*args).as_text(), cfg=CFG):
    """The text of every pass, by name."""
    inputs = jax.eval_shape(lambda: bench.make_inputs(cfg, 32))
    return {pass_.name: lower(lambda *args, p=pass_: p.run(version, *args), *inputs) for pass_ in bench.PASSES}


@pytest.mark.parametrize("label", VERSIONS)
def test_a_backward_contains_no_forward(label):
    texts = lowered(VERSIONS[label])
    both, forward, backward, frozen = (
        dots(texts[name]) for name in ("forward_backward", "forward", "backward", "backward_frozen_m")
    )
    assert both == forward + backward and forward >= 1
    assert 1 <= frozen < backward
    if "single_pass" not in label:
        assert (backward, frozen) == (2, 1)


@on_cpu
@pytest.mark.parametrize("label", ["fused xla dot_general", "unfused xla dot_general", "xla einsum"])
def test_gradients_of_all_passes_are_the_same(label):
    version, inputs = VERSIONS[label], bench.make_inputs(CFG, 16)
    programs = bench._compile([version], inputs, lambda words: None)
    results = {p.name: programs[version, p](*bench._arguments(version, p, inputs)) for p in bench.PASSES}
    both = results["forward_backward"]
    for name, alone in results.items():
        assert all(bench.count_mismatches(array, both[key]) == 0 for key, array in alone.items()), name


@pytest.mark.lowering
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize("backward", bench.BACKWARDS)
@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_a_backward_contains_no_forward_kernel(implementation, backward, name):
    cfg = dataclasses.replace(CFG, num_attention_heads=64, head_dim=128)
    texts = lowered(bench._ours(name, implementation, backward), lower_for_cuda, cfg)
    kernels = {pass_: len(re.findall(r"custom_call @\S*(?:triton|mosaic)", text)) for pass_, text in texts.items()}
    assert kernels["forward"] == 1
    assert kernels["forward_backward"] == 1 + kernels["backward"]
    assert kernels["backward"] == kernels["backward_frozen_m"] == (backward == "single_pass")


@on_cpu
@pytest.mark.parametrize("rounding", ["each_product", "once"])
def test_plain_code_rotates_to_the_same_bits(rounding):
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 32), jnp.bfloat16)
    tables = rope_tables(jnp.arange(7) * 1000, 16, rounding=rounding)
    ours = jax.jit(lambda x: rotate(x, tables, inverse=True))(x)
    assert bench.count_mismatches(jax.jit(lambda x: bench.rotate_plain(x, tables))(x), ours) == 0


def test_exact_gradient_of_m(monkeypatch):
    monkeypatch.setattr(bench, "_CHUNK", 7)
    inputs = bench.make_inputs(CFG, 24)
    x = np.asarray(rotate(inputs.o, inputs.tables, inverse=True), np.float64)
    wanted = np.einsum("thd,tkd->hk", np.asarray(inputs.g, np.float64), x)
    np.testing.assert_allclose(bench._exact_dm(inputs), wanted, rtol=1e-5, atol=1e-4)


def test_no_term_of_a_sum_is_zero():
    o, m, tables, g = bench.make_inputs(CFG, 24)
    assert all(bool(array.all()) for array in (m, g)) and np.count_nonzero(o) > 0.99 * o.size
    assert float(jnp.linalg.norm((m - jnp.eye(8)).astype(jnp.float32))) > 0.1


def test_kernel_times_take_the_place_of_the_hosts(monkeypatch):
    class Profiler:
        def measure(self, program):
            return lambda *args: (program(*args), next(times))

    monkeypatch.setattr(bench, "_profiler", Profiler)
    times = iter([3.0, None, 2.0])
    assert bench._kernel_times(lambda: 0, (), 3) is None  # a call without kernels
    times = iter([3.0, 1.0, 2.0] * 3 + [None] * 3)
    *with_kernels, without = bench.measure(CFG, [VERSIONS["xla einsum"]], 16, 3).measurements
    assert [each.clock for each in with_kernels] == ["cupti"] * 3
    assert all(each.ms == pytest.approx((1.4, 2.0, 2.6)) and each.host_ms != 2 for each in with_kernels)
    assert without.clock == "host" and without.ms[1] == without.host_ms


def measurement(label, ms, pass_=bench.PASSES[-1]):
    return bench.Measurement(VERSIONS[label], pass_, "host", (ms / 2, ms, 2 * ms), ms, 0.5, 0, 0, None, 0)


def test_speed_ups():
    mine = measurement("unfused xla dot_general", 2.0)
    pairs = [
        measurement("xla einsum", 5.0),
        measurement("xla batched", 3.0),
        measurement("xla batched", 1.0, "another"),
    ]
    report = bench.Report(8, 1024, 0.5, [mine, *pairs], [])
    assert report.speed_ups(mine) == (2.5, 1.5)
    assert bench.Report(8, 1024, 0.5, [mine, pairs[1]], []).speed_ups(mine) == (None, 1.5)
    assert bench.Report(8, 1024, 0.5, [mine], []).speed_ups(mine) == (None, None)


def test_the_plot_shows_what_was_measured(monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    forward = bench.PASSES[0]
    small = bench.Report(1024, 1, 0.2, [measurement("xla einsum", 2.0)], [])
    large = bench.Report(
        2048, 1, 0.4, [measurement("xla einsum", 3.0), measurement("xla batched", 5.0, forward)], ["a failure"]
    )
    bench.draw("p.png", [small, large], 2048)
    bars, lines = figures[0].axes
    assert [[bar.get_height() for bar in version] for version in bars.containers] == [[6.0], [10.0]]
    assert [line.get_xydata().tolist() for line in lines.lines] == [
        [[1024.0, 2.0], [2048.0, 3.0]],
        [[1024.0, 0.5], [2048.0, 1.0]],  # the roof
    ]
    assert bars.get_title() == "2,048 tokens"
    bench.draw("p.png", [small], 2048)
    assert figures[1].axes[0].get_title() == "1,024 tokens"


def test_bad_arguments_are_named(fails, tmp_path, monkeypatch):
    assert "--tokens: got '0'" in fails(TINY, "--tokens", "0")
    assert "--tokens: got 2147483648, wanted less than 2^31" in fails(TINY, "--tokens", "1", str(2**31))
    assert "--repeats: got 'x'" in fails(TINY, "--repeats", "x")
    assert "--implementation: got 'cuda', wanted one of mosaic, triton" in fails(TINY, "--implementation", "cuda")
    assert "--plot: got p.jpg, wanted a name that ends in .png" in fails(TINY, "--plot", "p.jpg")
    missing = str(tmp_path / "missing" / "x.png")
    assert "x.png: No such file or directory" in fails(TINY, "--plot", missing)
    assert "x.png: No such file or directory" in fails(TINY, "--csv", missing)
    assert "missing.yaml" in fails(str(tmp_path / "missing.yaml"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot: matplotlib is not installed" in fails(TINY, "--plot", str(tmp_path / "p.png"))


@on_cpu
def test_a_named_implementation_that_cannot_run_is_an_error(fails):
    assert "--implementation: implementation 'triton' cannot run here: it needs" in fails(
        TINY, "--implementation", "xla", "triton"
    )


def test_files_of_others_are_not_overwritten(fails, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("epoch,accuracy\n1,0.5\n")
    assert "times.csv is there and holds something else" in fails(TINY, "--csv", str(path))
    assert path.read_text() == "epoch,accuracy\n1,0.5\n"
    path.write_text("")
    for rows in ([dict.fromkeys(bench.COLUMNS, 1)], []):
        bench.start_csv(path)  # replaces what an earlier run wrote
        bench.append_csv(path, rows)
        assert len(path.read_text().splitlines()) == 1 + len(rows)
