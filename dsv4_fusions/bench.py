"""Times of the postmix with the inverse rotation, and of its gradients, against XLA's and against a plain copy.

A version whose result is wrong gets no times. What is measured, and how: docs/performance.md.
"""

import csv
import dataclasses
import datetime
import functools
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dsv4_fusions.config import DSv4Config, TrainConfig
from dsv4_fusions.dispatch import IMPLEMENTATIONS
from dsv4_fusions.ops.inv_rope_postmix import (
    BACKWARDS,
    inv_rope_vha_postmix,
    postmix_choice,
    postmix_matrix,
    vha_postmix,
)
from dsv4_fusions.rope import RopeTables, rope_tables, rotate
from dsv4_fusions.testing import count_mismatches

COLUMNS = (
    *("version", "implementation", "backward", "pass", "tokens", "heads", "head_dim", "rope_dim", "dtype", "rounding"),
    *("clock", "ms_p20", "ms_p50", "ms_p80", "host_ms_p50", "roof_ms", "ratio", "host_ratio"),
    *("temp_bytes", "peak_bytes", "dm_error", "gpu", "driver", "jax", "xla_flags", "date"),
)
GPU_TOKENS = 16384
_GPU_REPEATS, _CPU_REPEATS = 11, 3
_CALLS, _REPEAT_SECONDS = 64, 0.04  # most calls of a repeat, and the time after which fewer are enough
_CHUNK = 1024  # tokens whose float32 copies the exact gradient of M holds at a time
# Relative errors that are no longer rounding. Those of a right result in bfloat16 are a few thousandths.
_PAIR_ERROR, _DM_ERROR = 1e-2, 2e-2
_HEADS_ALIKE = 64  # up to so many, kernels and XLA's products give the same bits (docs/numerics.md)


@dataclasses.dataclass(frozen=True)
class Version:
    """A way to compute the postmix of the back-rotated attention output.

    Attributes:
      name: "fused" and "unfused" are ours, "xla einsum" and "xla batched" are plain code for XLA to compile.
      implementation: of ours, else "".
      backward: of ours, else "".
      mix: (x, m, tables) -> output, x being what the backward saves: o for fused, the rotated tensor for the others.
      rotate: (o, tables) -> x; None for fused, which takes o itself.
    """

    name: str
    implementation: str
    backward: str
    mix: Callable
    rotate: Callable | None = None

    @property
    def label(self) -> str:
        """Name, implementation and backward in one."""
        return " ".join(filter(None, (self.name, self.implementation, self.backward)))

    @property
    def is_ours(self) -> bool:
        """Whether it is held to bits: the library's versions are, plain code for XLA is not."""
        return bool(self.implementation)


class Inputs(NamedTuple):
    """What a version is measured with; g is the gradient that comes back."""

    o: Float[Array, "tokens heads head_dim"]
    m: Float[Array, "heads heads"]
    tables: RopeTables
    g: Float[Array, "tokens heads head_dim"]


def _forward(version, o, m, tables, g):
    return {"out": version.mix(o if version.rotate is None else version.rotate(o, tables), m, tables)}


def _pull_back_rotation(version, x, tables, dx):
    if version.rotate is None:
        return dx
    # The rotation is linear in o, so that its gradient is the same everywhere, at x as well.
    return jax.vjp(lambda o: version.rotate(o, tables), x)[1](dx)[0]


def _backward(version, x, m, tables, g):
    # The output is not used, and tracing drops the product that would compute it.
    dx, dm = jax.vjp(lambda x, m: version.mix(x, m, tables), x, m)[1](g)
    return {"d_o": _pull_back_rotation(version, x, tables, dx), "d_m": dm}


def _backward_frozen_m(version, x, m, tables, g):
    (dx,) = jax.vjp(lambda x: version.mix(x, m, tables), x)[1](g)
    return {"d_o": _pull_back_rotation(version, x, tables, dx)}


def _forward_backward(version, o, m, tables, g):
    out, pull_back = jax.vjp(lambda o, m: _forward(version, o, m, tables, g)["out"], o, m)
    d_o, d_m = pull_back(g)
    return {"out": out, "d_o": d_o, "d_m": d_m}


@dataclasses.dataclass(frozen=True)
class Pass:
    """A part of a training step.

    Attributes:
      name: as in the CSV file.
      title: as in tables.
      run: (version, o or x, m, tables, g) -> arrays by name.
      tensors: how many tensors of o's size it has to read and write.
      from_saved: whether it starts from x, what the forward saved, instead of o.
    """

    name: str
    title: str
    run: Callable
    tensors: int
    from_saved: bool


PASSES = (
    Pass("forward", "forward", _forward, 2, False),
    Pass("backward", "backward", _backward, 3, True),
    Pass("backward_frozen_m", "backward, frozen M", _backward_frozen_m, 2, True),
    Pass("forward_backward", "forward and backward", _forward_backward, 5, False),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times and memory of one pass of one version, whose results were right.

    Attributes:
      version, pass_: what was measured.
      clock: "cupti" (sum of the kernels' times on the GPU) or "host" (calls back to back, one synchronisation).
      ms: 20th, 50th and 80th percentile by `clock`, in milliseconds.
      host_ms: median by the host's clock.
      roof_ms: what a device-to-device copy takes to move the bytes that the pass has to move.
      temp_bytes: temporary memory of the program.
      peak_bytes: its arguments, results and temporary memory together.
      dm_error: relative error of M's gradient, None where the pass has none.
      differing: elements of output and gradient of o that differ in any bit from the unfused XLA version's.
    """

    version: Version
    pass_: Pass
    clock: str
    ms: tuple[float, float, float]
    host_ms: float
    roof_ms: float
    temp_bytes: int
    peak_bytes: int
    dm_error: float | None
    differing: int

    @property
    def ratio(self) -> float:
        """Median to roof."""
        return self.ms[1] / self.roof_ms

    @property
    def host_ratio(self) -> float:
        """Median by the host's clock to roof."""
        return self.host_ms / self.roof_ms


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found at one number of tokens.

    Attributes:
      tokens: the number.
      tensor_bytes: size of o.
      copy_ms: least time of a copy of o.
      measurements: pass by pass, versions in the order given.
      failures: what was wrong, a line each. The versions concerned have no measurements.
    """

    tokens: int
    tensor_bytes: int
    copy_ms: float
    measurements: list[Measurement]
    failures: list[str]

    def roof_ms(self, pass_: Pass) -> float:
        """Time in which a copy moves the bytes that the pass has to move."""
        return self.copy_ms * pass_.tensors / 2

    @property
    def copy_tb_per_s(self) -> float:
        """What the copy reads and writes, in TB/s."""
        return 2 * self.tensor_bytes / self.copy_ms / 1e9

    def speed_ups(self, measurement: Measurement) -> tuple[float | None, float | None]:
        """How many times as long XLA's einsum pair and the faster one of XLA's pairs take; None if not measured."""

        def against(other):
            if other.clock == measurement.clock:
                return other.ms[1] / measurement.ms[1]
            return other.host_ms / measurement.host_ms

        pairs = {
            each.version: against(each)
            for each in self.measurements
            if each.pass_ == measurement.pass_ and each.version in _PAIRS
        }
        return pairs.get(_EINSUM), min(pairs.values(), default=None)


def default_tokens(config: TrainConfig) -> int:
    """Tokens to measure with: 16384 on a GPU, elsewhere those of a training step."""
    return GPU_TOKENS if _on_gpu() else config.batch_size * config.sequence_length


def default_repeats() -> int:
    """Repeats of every measurement."""
    return _GPU_REPEATS if _on_gpu() else _CPU_REPEATS


def find_versions(
    cfg: DSv4Config, tokens: int, implementations: Sequence[str] | None = None
) -> tuple[list[Version], dict[str, str]]:
    """What can be measured here.

    Args:
      cfg: its heads, channels, dtype and rounding are taken.
      tokens: a number of tokens to try the versions with.
      implementations: names of ours; None: all.

    Returns:
      The versions, an unfused one directly before the fused one that must equal it, and what cannot run here or would
      be no fusion, with the reason.

    Raises:
      ValueError: too many tokens, an unknown implementation, a named one that cannot run here, or a configuration
        without a postmix over all heads.
    """
    for name in implementations or ():
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"--implementation: got {name!r}, wanted one of {', '.join(IMPLEMENTATIONS)}")
    if tokens >= 2**31:
        raise ValueError(f"--tokens: got {tokens}, wanted less than 2^31")
    for field, wanted in (("use_vha_attention", True), ("vha_postmix_grouped", False)):
        if getattr(cfg, field) != wanted:
            raise ValueError(f"{field}: got {not wanted}, wanted {wanted}: the postmix over all heads is measured")
    inputs = jax.eval_shape(lambda: make_inputs(cfg, tokens))
    found, absent = [], {}
    for implementation in IMPLEMENTATIONS:
        if implementations and implementation not in implementations:
            continue
        mine = []
        for backward in BACKWARDS:
            unfused, fused = (_ours(name, implementation, backward) for name in ("unfused", "fused"))
            if reason := _cannot_run(unfused, inputs):
                absent[f"{implementation} {backward}"] = reason
                continue
            mine.append(unfused)
            reason = _cannot_run(fused, inputs) or _falls_back(cfg, implementation)
            if reason:
                absent[fused.label] = reason
            else:
                mine.append(fused)
        if implementations and not mine:
            raise ValueError(f"--implementation: {absent[f'{implementation} {BACKWARDS[0]}']}")
        found += mine
    return [*found, *_PAIRS], absent


def _cannot_run(version, inputs) -> str | None:
    try:
        jax.eval_shape(functools.partial(_forward_backward, version), *inputs)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def _falls_back(cfg, implementation) -> str | None:
    shape = cfg.num_attention_heads, cfg.head_dim, cfg.qk_rope_head_dim
    return postmix_choice(cfg.dtype, *shape, implementation=implementation)[1]


@functools.cache  # equal versions are one object, whose programs are compiled once
def _ours(name, implementation, backward):
    how = {"implementation": implementation, "backward": backward}
    if name == "fused":
        mix = lambda o, m, tables: inv_rope_vha_postmix(o, m, tables, **how)  # noqa: E731
        return Version(name, implementation, backward, mix)
    return Version(name, implementation, backward, lambda x, m, tables: vha_postmix(x, m, **how), _rotate_back)


def _rotate_back(o, tables):
    return rotate(o, tables, inverse=True)


def rotate_plain(
    o: Float[Array, "*batch tokens heads head_dim"], tables: RopeTables
) -> Float[Array, "*batch tokens heads head_dim"]:
    """The inverse rotation as users write it, for XLA to differentiate and to round as it likes.

    Args:
      o: [..., tokens, heads, head_dim].
      tables: from `rope_tables`, whose two halves are equal.

    Returns:
      Array like o.
    """
    rope_dim = tables.cos.shape[-1]
    nope = o.shape[-1] - rope_dim
    cos, sin = (table[..., None, : rope_dim // 2] for table in (tables.cos, tables.sin))
    tail = o[..., nope:]
    first, second = tail[..., 0::2], tail[..., 1::2]
    rotated = jnp.stack([first * cos + second * sin, second * cos - first * sin], axis=-1).astype(o.dtype)
    return jnp.concatenate([o[..., :nope], rotated.reshape(tail.shape)], axis=-1)


def _mix_einsum(x, m, tables):
    return jnp.einsum("hk,...tkd->...thd", m, x)


def _mix_batched(x, m, tables):
    return jnp.einsum("thk,tkd->thd", jnp.broadcast_to(m, (x.shape[0], *m.shape)), x)


_EINSUM = Version("xla einsum", "", "", _mix_einsum, rotate_plain)
_PAIRS = (_EINSUM, Version("xla batched", "", "", _mix_batched, rotate_plain))


def make_inputs(cfg: DSv4Config, tokens: int) -> Inputs:
    """Standard normal o and g, and an M off the identity: with one term in every sum, no order of sums would show.

    Args:
      cfg: its heads, channels, dtypes and rounding are taken.
      tokens: how many.

    Returns:
      The inputs.
    """
    heads, dtype = cfg.num_attention_heads, jnp.dtype(cfg.dtype)
    o_key, g_key, u_key, v_key = jax.random.split(jax.random.key(0), 4)
    o, g = (_normal(key, (tokens, heads, cfg.head_dim), dtype) for key in (o_key, g_key))
    u, v = (jax.random.normal(key, (heads, cfg.postmix_rank), cfg.param_dtype) for key in (u_key, v_key))
    m = postmix_matrix(u / math.sqrt(cfg.postmix_rank), 0.05 * v).astype(dtype)
    tables = rope_tables(
        jnp.arange(tokens), cfg.qk_rope_head_dim, cfg.rope_theta, rounding=cfg.rope_rounding, dtype=dtype
    )
    return Inputs(o, m, tables, g)


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))  # jitted: its intermediates are larger than its result


def measure(
    cfg: DSv4Config, versions: Sequence[Version], tokens: int, repeats: int, on_step: Callable = lambda words: None
) -> Report:
    """Checks the results of all versions and then takes the times of those that were right.

    Args:
      cfg: its heads, channels, dtypes and rounding are taken.
      versions: from `find_versions`.
      tokens: how many.
      repeats: times to take of every pass of every version.
      on_step: called with what is being done.

    Returns:
      The report.
    """
    inputs = make_inputs(cfg, tokens)
    programs = _compile({_specification(): None} | dict.fromkeys(versions), inputs, on_step)
    on_step("checking results")
    checks = _check(versions, programs, inputs)
    failures = [
        f"{version.label}, {pass_.title}: {words}" for (version, pass_), c in checks.items() for words in c.wrong
    ]
    wrong = {version for (version, _), check in checks.items() if check.wrong}
    right = [(version, pass_) for pass_ in PASSES for version in versions if version not in wrong]

    on_step("timing a copy")
    copy = jax.jit(jnp.copy).lower(inputs.o).compile()
    copy_ms = min(_host_times(copy, (inputs.o,), repeats))  # a roof is the best that was seen
    report = Report(tokens, inputs.o.nbytes, copy_ms, [], failures)
    # One clock after the other: the kernels' clock hooks into the driver.
    host_times, kernel_times = {}, {}
    for times, take in ((host_times, _host_times), (kernel_times, _kernel_times)):
        for version, pass_ in right:
            program = programs[version, pass_]
            if program not in times:
                on_step(f"{tokens} tokens, {pass_.title}: {version.label}")
                times[program] = take(program, _arguments(version, pass_, inputs), repeats)
    for version, pass_ in right:
        program, check = programs[version, pass_], checks[version, pass_]
        host, kernels = host_times[program], kernel_times[program]
        memory = program.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        report.measurements.append(
            Measurement(
                version,
                pass_,
                clock="cupti" if kernels else "host",
                ms=tuple(map(float, np.percentile(kernels or host, (20, 50, 80)))),
                host_ms=float(np.median(host)),
                roof_ms=report.roof_ms(pass_),
                temp_bytes=memory.temp_size_in_bytes,
                peak_bytes=peak - memory.alias_size_in_bytes,
                dm_error=check.dm_error,
                differing=check.differing,
            )
        )
    return report


def _specification():
    """What out and the gradient of o are compared with."""
    return _ours("unfused", "xla", "dot_general")


def _compile(versions, inputs, on_step):
    """{(version, pass): program}; versions whose code for a pass is the same share the program."""
    programs, by_text = {}, {}
    for version in versions:
        for pass_ in PASSES:
            on_step(f"{len(inputs.o)} tokens, compiling {pass_.title}: {version.label}")
            lowered = jax.jit(functools.partial(pass_.run, version)).lower(*inputs)  # x is like o
            key = pass_, lowered.as_text()
            if key not in by_text:
                by_text[key] = lowered.compile()
            programs[version, pass_] = by_text[key]
    return programs


def _arguments(version, pass_, inputs):
    if version.rotate is None or not pass_.from_saved:
        return inputs
    return inputs._replace(o=_save(version.rotate, inputs.o, inputs.tables))


_save = jax.jit(lambda rotate, o, tables: rotate(o, tables), static_argnums=0)


class _Check(NamedTuple):
    """What was wrong with the results of a pass, and the errors that are no fault."""

    wrong: list[str]
    differing: int
    dm_error: float | None


def _check(versions, programs, inputs) -> dict[tuple[Version, Pass], _Check]:
    checks = {}
    exact_dm = _exact_dm(inputs)

    def run(version, pass_):
        return programs[version, pass_](*_arguments(version, pass_, inputs))

    for pass_ in PASSES:  # outermost, so that the results of one pass at a time are in memory
        specified, unfused = run(_specification(), pass_), None
        for version in versions:
            results = run(version, pass_)
            checks[version, pass_] = _check_results(version, results, specified, unfused, exact_dm)
            if version.name == "unfused":
                unfused = results
            del results
        del specified, unfused
    return checks


def _check_results(version, results, specified, unfused, exact_dm) -> _Check:
    wrong, differing, dm_error = [], 0, None
    if version.name == "fused":
        counts = {name: count_mismatches(array, unfused[name]) for name, array in results.items()}
        wrong += [f"{name}: {count:,} elements differ from unfused" for name, count in counts.items() if count]
    for name in results.keys() & {"out", "d_o"}:
        count = count_mismatches(results[name], specified[name])
        differing += count
        # With more heads XLA's own product may sum in another order; on a CPU, so may the interpreter's.
        if version.is_ours and count and _on_gpu() and results[name].shape[-2] <= _HEADS_ALIKE:
            wrong.append(f"{name}: {count:,} elements differ from {_specification().label}")
        if not version.is_ours:
            error = float(_relative_error(results[name], specified[name]))
            if not error <= _PAIR_ERROR:  # NaN as well
                wrong.append(f"{name}: relative error {error:.2g} against {_specification().label}")
    if "d_m" in results:
        dm = np.asarray(results["d_m"], np.float64)
        dm_error = float(np.linalg.norm(dm - exact_dm) / np.linalg.norm(exact_dm))
        # XLA's own may be as inexact as it likes: the batched form rounds the share of every token.
        if version.is_ours and not dm_error <= _DM_ERROR:
            wrong.append(f"d_m: relative error {dm_error:.2g}")
    return _Check(wrong, differing, dm_error)


@jax.jit
def _relative_error(a, b):
    a, b = (x.astype(jnp.float32) for x in (a, b))
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


def _exact_dm(inputs: Inputs) -> np.ndarray:
    """Gradient of M from the rounded rotation: float32 sums over chunks of tokens, added up in float64."""

    @functools.partial(jax.jit, static_argnums=2)
    def of_chunk(inputs, start, size):
        o, g, tables = (
            jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), part)
            for part in (inputs.o, inputs.g, inputs.tables)
        )
        x, g = (a.astype(jnp.float32) for a in (_rotate_back(o, tables), g))
        return jnp.einsum("thd,tkd->hk", g, x, precision=lax.Precision.HIGHEST)

    tokens = len(inputs.o)
    return sum(
        np.asarray(of_chunk(inputs, start, min(_CHUNK, tokens - start)), np.float64)
        for start in range(0, tokens, _CHUNK)
    )


def _host_times(program, arguments, repeats) -> list[float]:
    """Milliseconds of a call in each of several runs of calls back to back with one synchronisation."""

    def seconds(calls):
        start = time.perf_counter()
        for _ in range(calls - 1):
            program(*arguments)  # the result is dropped at once, so that the next call reuses its memory
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - start

    seconds(1)  # warms up
    calls = min(max(int(_REPEAT_SECONDS / seconds(1)), 1), _CALLS)
    return [seconds(calls) / calls * 1e3 for _ in range(repeats)]


def _kernel_times(program, arguments, repeats) -> list[float] | None:
    """Milliseconds that the kernels of a call run, once for each repeat; None where nobody tells."""
    if not (profiler := _profiler()):
        return None
    measured = profiler.measure(program)  # of one call at a time, as it keeps all results
    times = [measured(*arguments)[1] for _ in range(repeats)]
    return None if None in times else times


@functools.cache
def _profiler():
    """CUPTI as JAX wraps it, None where it does not work (no NVIDIA GPU, no permission, another tool attached)."""
    if not _on_gpu():
        return None
    try:
        from jax.experimental.mosaic.gpu.profiler import Cupti  # Mosaic loads here alone

        profiler = Cupti(finalize=False)
        ones = jnp.ones(1024)
        return profiler if profiler.measure(jnp.negative)(ones)[1] else None
    except (ImportError, AttributeError, RuntimeError):
        return None


def clock() -> str:
    """The clock that times are taken with here, "cupti" or "host"."""
    return "cupti" if _profiler() else "host"


def _on_gpu():
    return jax.default_backend() == "gpu"


def describe_machine() -> dict[str, str]:
    """The columns gpu, driver, jax, xla_flags and date of the CSV file; a driver that is not known is empty."""
    return {
        "gpu": jax.devices()[0].device_kind,
        "driver": _driver(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "date": datetime.date.today().isoformat(),
    }


def _driver():
    if not _on_gpu():
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return " ".join(jax.devices()[0].client.platform_version.split())


def csv_rows(cfg: DSv4Config, report: Report, machine: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the CSV file, with a value for each of `COLUMNS`.

    Args:
      cfg: what was measured.
      report: the measurements.
      machine: from `describe_machine`.

    Returns:
      A row for every measurement; times in milliseconds.
    """
    shape = {
        "tokens": report.tokens,
        "heads": cfg.num_attention_heads,
        "head_dim": cfg.head_dim,
        "rope_dim": cfg.qk_rope_head_dim,
        "dtype": cfg.dtype,
        "rounding": cfg.rope_rounding,
    }
    rows = []
    for each in report.measurements:
        numbers = {
            **dict(zip(("ms_p20", "ms_p50", "ms_p80"), each.ms, strict=True)),
            "host_ms_p50": each.host_ms,
            "roof_ms": each.roof_ms,
            "ratio": each.ratio,
            "host_ratio": each.host_ratio,
        }
        rows.append(
            {
                "version": each.version.name,
                "implementation": each.version.implementation,
                "backward": each.version.backward,
                "pass": each.pass_.name,
                **shape,
                "clock": each.clock,
                **{name: f"{number:.6g}" for name, number in numbers.items()},
                "temp_bytes": each.temp_bytes,
                "peak_bytes": each.peak_bytes,
                "dm_error": "" if each.dm_error is None else f"{each.dm_error:.3g}",
                **machine,
            }
        )
    return rows


def start_csv(path: str | os.PathLike) -> None:
    """Begins a CSV file, replacing an earlier one.

    Args:
      path: the file.

    Raises:
      OSError: it cannot be written.
      ValueError: there is a file of that name which is something else.
    """
    if os.path.isfile(path):  # a device would be read without end
        with open(path, encoding="utf-8", errors="replace") as file:
            header = file.readline().rstrip("\n")
        if header not in ("", ",".join(COLUMNS)):
            raise ValueError(f"--csv: {path} is there and holds something else; wanted another name")
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()


def append_csv(path: str | os.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows to a file that `start_csv` began.

    Args:
      path: the file.
      rows: from `csv_rows`.

    Raises:
      OSError: it cannot be written.
    """
    with open(path, "a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)


def draw(path: str | os.PathLike, reports: Sequence[Report], tokens: int) -> None:
    """Draws what was measured: ratios to the roof as bars, and times against tokens; writes a PNG.

    Args:
      path: the file.
      reports: one for every number of tokens.
      tokens: whose ratios to draw; the largest number that was measured if this one was not.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: it would look for a screen

    reports = sorted(reports, key=lambda report: report.tokens)
    shown = next((report for report in reports if report.tokens == tokens), reports[-1])
    versions = list(dict.fromkeys(each.version for report in reports for each in report.measurements))
    figure = Figure(figsize=(15, 6), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    width = 0.85 / max(len(versions), 1)
    for i, version in enumerate(versions):
        color = colormaps["tab20"](i)  # a pair of colours for unfused and fused
        mine = [each for each in shown.measurements if each.version == version]
        places = [PASSES.index(each.pass_) + (i - (len(versions) - 1) / 2) * width for each in mine]
        bars.bar(places, [each.ratio for each in mine], width, color=color, label=version.label)
        _draw_line(lines, reports, version, color)
    bars.axhline(1, color="black", linestyle="--", label="roof: a copy of the same bytes")
    bars.set(title=f"{shown.tokens:,} tokens", ylabel="time, in times of the roof")
    bars.set_xticks(range(len(PASSES)), [pass_.title for pass_ in PASSES])
    both = PASSES[-1]
    lines.plot(
        [report.tokens for report in reports],
        [report.roof_ms(both) for report in reports],
        "k--",
        marker=".",
    )
    lines.set(title=both.title, xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
    ticks = [report.tokens for report in reports]
    lines.set_xticks(ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else f"{tick}" for tick in ticks])
    lines.set_xticks([], minor=True)
    lines.grid(alpha=0.3)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, format="png", dpi=150)


def _draw_line(axes, reports, version, color):
    points = [
        (report.tokens, each.ms[1])
        for report in reports
        for each in report.measurements
        if each.version == version and each.pass_ == PASSES[-1]
    ]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, marker="o")
