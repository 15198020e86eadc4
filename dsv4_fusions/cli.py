"""The command line, `dsv4-fusions COMMAND CONFIG`: train, generate, verify, bench."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

INTERRUPTED = 130  # the shell's code for a program that Ctrl-C ended


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the usage in front of it
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments; None: the process's.

    Returns:
      The exit code. 0: done; 1: bits differ or a result is wrong; 2: wrong usage, a file that cannot be read or
      written, or no fusion was active where one was to be compared; 130: interrupted.
    """
    parser = _build_parser()
    args = parser.parse_args(argv)

    def end(code, *words):
        print(f"{parser.prog} {args.command}:", *" ".join(words).split(), file=sys.stderr)
        return code

    user_errors = (OSError, ValueError, NotImplementedError, OverflowError, MemoryError)
    try:
        run = args.prepare(args)
        user_errors = (OSError, MemoryError)  # of the work itself, the others are ours
        return run()
    except KeyboardInterrupt as interrupt:
        return end(INTERRUPTED, "interrupted", str(interrupt))
    except user_errors as error:
        if isinstance(error, OSError) and error.filename is not None:
            return end(2, f"error: {error.filename}: {error.strerror}")
        return end(2, f"error: {error}")
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return end(2, f"error: {error}")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dsv4-fusions", description="DeepSeek-V4-style hybrid attention with bitwise-neutral fusions."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train a byte-level decoder on text")
    train.add_argument("config", type=_path, metavar="CONFIG", help="YAML file with the keys model: and train:")
    train.add_argument(
        "--text",
        type=_path,
        nargs="+",
        metavar="FILE",
        help="files to train on, a document each (default: Python's documentation)",
    )
    train.add_argument("--steps", type=_positive, metavar="N", help="number of steps (default: the configuration's)")
    train.add_argument(
        "--compare",
        action="store_true",
        help="train twice from one seed, fusions off and on, and fail unless every loss and parameter is bitwise equal",
    )
    train.add_argument("--checkpoint-dir", type=_path, metavar="DIR", help="save the run there, and its metrics.csv")
    train.add_argument(
        "--checkpoint-every",
        type=_positive,
        metavar="N",
        help="steps from one checkpoint to the next (default: 50); the start, the last step and Ctrl-C save as well",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --checkpoint-dir, to the bits of an unbroken run",
    )
    train.add_argument(
        "--metrics",
        type=_path,
        metavar="FILE",
        help="write a CSV row for every step (default: metrics.csv in --checkpoint-dir or the current directory)",
    )
    train.add_argument("--plot", type=_path, metavar="FILE", help="draw the loss curves as a PNG; needs matplotlib")
    train.set_defaults(prepare=_prepare_train)

    generate = commands.add_parser("generate", help="continue a text with a decoder that `train` has saved")
    generate.add_argument("config", type=_path, metavar="CONFIG", help="YAML file that the decoder was trained with")
    generate.add_argument(
        "--checkpoint", type=_path, metavar="DIR", required=True, help="--checkpoint-dir of the training"
    )
    generate.add_argument("--prompt", metavar="TEXT", required=True, help="text to continue")
    generate.add_argument("--bytes", type=_positive, default=200, metavar="N", help="bytes to generate (default: 200)")
    generate.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: always the likeliest byte (default: 0.7)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    generate.set_defaults(prepare=_prepare_generate)

    verify = commands.add_parser("verify", help="compare every kind of layer, fused and unfused, bit by bit")
    verify.add_argument("config", type=_path, metavar="CONFIG", help="YAML file with the key model:")
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verify.add_argument("--batch", type=_positive, metavar="B", help="batch entries (default: train.batch_size)")
    verify.add_argument("--tokens", type=_positive, metavar="T", help="tokens (default: train.sequence_length)")
    verify.add_argument("--layer", type=int, nargs="+", metavar="I", help="layers to look at (default: all)")
    verify.set_defaults(prepare=_prepare_verify)

    bench = commands.add_parser("bench", help="time the postmix, fused and unfused, beside XLA's and beside a copy")
    bench.add_argument(
        "config",
        type=_path,
        metavar="CONFIG",
        help="YAML file with the key model:, for instance configs/v4_flash_layer.yaml",
    )
    bench.add_argument(
        "--tokens",
        type=_positive,
        nargs="+",
        metavar="N",
        help="tokens to measure with (default: 16384 on a GPU, elsewhere those of a training step)",
    )
    bench.add_argument(
        "--implementation", nargs="+", metavar="NAME", help="implementations to measure (default: all that can run)"
    )
    bench.add_argument("--csv", type=_path, metavar="FILE", help="write a row for every measurement")
    bench.add_argument("--plot", type=_path, metavar="FILE", help="draw the times as a PNG; needs matplotlib")
    bench.add_argument(
        "--repeats", type=_positive, metavar="N", help="times to take of everything (default: 11 on a GPU, elsewhere 3)"
    )
    bench.set_defaults(prepare=_prepare_bench)
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of 1 or more")
    if value >= 2**31:  # JAX's shapes end at 64 bits, and its message about larger ones names no argument
        raise argparse.ArgumentTypeError(f"got {value}, wanted less than 2^31")
    return value


def _path(text: str) -> str:
    if not text:  # the system's message about it would name nothing
        raise argparse.ArgumentTypeError("got '', wanted a path")
    return text


def _prepare_train(args):
    from flax import nnx
    from rich.console import Console

    from dsv4_fusions.config import load_yaml
    from dsv4_fusions.layers import Decoder, DSv4HybridSelfAttention
    from dsv4_fusions.training import checkpoint, loop, text

    _check_outputs(args)
    console = Console(highlight=False)
    cfg, config = load_yaml(args.config)
    if cfg.vocab_size < text.NUM_BYTES:
        raise ValueError(f"vocab_size: got {cfg.vocab_size}, wanted at least {text.NUM_BYTES}: the tokens are bytes")
    documents = text.read_files(args.text) if args.text else text.python_documentation()
    description = checkpoint.describe_run(cfg, config, documents)
    if args.steps is not None:
        config = dataclasses.replace(config, steps=args.steps, warmup_steps=min(config.warmup_steps, args.steps - 1))
    training, held_out = (text.pack(part, config.sequence_length) for part in text.hold_out(documents))

    switches = DSv4HybridSelfAttention.SWITCHES
    if args.compare:
        models = [Decoder(cfg, rngs=nnx.Rngs(config.seed), **dict.fromkeys(switches, on)) for on in (False, True)]
    else:
        models = [Decoder(cfg, rngs=nnx.Rngs(config.seed))]
    status = models[-1].explain_fusions(training.take(slice(config.batch_size)).tokens)
    state = loop.initial_state(models[-1], config) if args.checkpoint_dir else None
    state, notice, record = _open_run(args, config, description, state)

    def run():
        console.print(
            f"{sum(map(len, documents)):,} bytes in {len(documents)} documents, "
            f"{len(training)} rows of {config.sequence_length} to train on, {len(held_out)} held out"
        )
        active = _print_fusions(console, switches, status)
        idle = ", ".join(name for name in switches if not active[name])
        if args.compare and idle:
            console.print(f"[red]nothing to compare[/]: {idle} is not active in any layer")
            return 2
        if notice:
            console.print(notice)
        names = ("fusions off", "fusions on") if args.compare else ("training",)
        with record, _saving(args, config, description) as save:
            results = [
                _train(console, name, model, config, training, held_out, state, record, save)
                for name, model in zip(names, models, strict=True)
            ]
        _print_losses(console, results[-1], text.unigram_entropy(documents), text.bigram_entropy(documents))
        return _compare(console, *results) if args.compare else 0

    return run


def _check_outputs(args) -> None:
    """Finds out before the work what would lose its result behind it."""
    if args.checkpoint_dir is None:
        for name, value in (("--resume", args.resume), ("--checkpoint-every", args.checkpoint_every)):
            if value:
                raise ValueError(f"{name}: wanted --checkpoint-dir with it")
    elif args.metrics is not None:
        raise ValueError("--metrics: cannot be combined with --checkpoint-dir, whose metrics.csv must stay complete")
    elif args.compare:
        raise ValueError(
            "--checkpoint-dir: cannot be combined with --compare, which trains twice and keeps neither run"
        )
    _check_plot(args.plot)


def _check_plot(path) -> None:
    """Raises unless a plot can be drawn and written there."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "--plot: matplotlib is not installed; the extra plot brings it: pip install '.[plot]'"
        ) from None
    existed = os.path.exists(path)
    open(path, "ab").close()
    if not existed:
        os.remove(path)


def _open_run(args, config, description, state):
    """Takes up a run or begins one.

    Returns:
      Where training starts, a notice for the user or None, and the record of the steps, earlier ones included.
    """
    from dsv4_fusions.training import checkpoint, metrics

    directory, rows, notice = args.checkpoint_dir, [], None
    path = args.metrics or os.path.join(directory or "", "metrics.csv")
    if directory is None and os.path.isfile(path):  # a device would be read without end
        metrics.read(path)  # raises where a file of that name is something else
    if args.resume:
        state, steps = checkpoint.load_run(directory, state, description)
        if state.step > config.steps:
            raise ValueError(f"steps: got {config.steps}, but the run in {directory} has done {state.step}")
        if steps != config.steps:
            notice = (
                f"[yellow]not the run that {config.steps} unbroken steps give[/]: "
                f"up to step {state.step} the learning rate followed a schedule of {steps} steps"
            )
        rows = [row for row in metrics.read(path) if int(row["step"]) <= state.step]
    elif directory is not None and (checkpoint.latest_step(directory) is not None or metrics.read(path)):
        raise ValueError(f"--checkpoint-dir: {directory} holds a run already; wanted --resume or another directory")
    if directory is not None:
        os.makedirs(directory, exist_ok=True)  # metrics.csv goes there first
    metrics.start(path, rows)
    if directory is not None and not args.resume:
        checkpoint.save_run(directory, state, description, config.steps)  # finds out now whether that works
    return state, notice, _Record(path, rows, args.plot)


class _Record:
    """Rows of metrics, on disk one by one, and their plot, drawn on the way out unless an error takes it."""

    def __init__(self, path, rows, plot):
        self.path, self.rows, self.plot = path, list(rows), plot
        self.earlier_seconds = float(rows[-1]["seconds"]) if rows else 0.0

    def add(self, **row):
        from dsv4_fusions.training import metrics

        self.rows.append(row)
        metrics.append(self.path, row)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.plot is not None and self.rows and kind in (None, KeyboardInterrupt):
            from dsv4_fusions.training.plot import draw_losses

            draw_losses(self.plot, self.rows)


@contextlib.contextmanager
def _saving(args, config, description):
    """A function to call with the state after every step: it saves when that is due.

    The first Ctrl-C waits for the step to end, because a step consumes the state before it, and saves; a second one
    interrupts at once.
    """
    from dsv4_fusions.training import checkpoint

    if args.checkpoint_dir is None:
        yield lambda state: None
        return
    every, interrupted = args.checkpoint_every or 50, False
    previous = signal.getsignal(signal.SIGINT)

    def on_ctrl_c(*_):
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    def save(state):
        if interrupted or state.step % every == 0 or state.step == config.steps:
            checkpoint.save_run(args.checkpoint_dir, state, description, config.steps)
        if interrupted:
            raise KeyboardInterrupt(f"after step {state.step}, which is saved in {args.checkpoint_dir}")

    if previous is signal.default_int_handler:  # a shell's background job ignores Ctrl-C, and goes on ignoring it
        signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield save
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt(f"after the last step, which is saved in {args.checkpoint_dir}")


def _print_fusions(console, switches, status) -> dict[str, int]:
    """Prints in how many layers each fusion is active, or why not, and returns the numbers."""
    active = {}
    for name in switches:
        statuses = [fusions[name] for fusions in status.values()]
        active[name] = sum(each.active for each in statuses)
        implementations = sorted({each.implementation for each in statuses if each.active})
        reasons = sorted({each.reason for each in statuses if not each.active})
        console.print(
            f"{name}: active in {active[name]} of {len(statuses)} layers ({'; '.join(implementations + reasons)})"
        )
    return active


def _train(console, description, model, config, training, held_out, state, record, save):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsv4_fusions.training.loop import train

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    tokens = config.batch_size * config.sequence_length
    began = time.perf_counter() - record.earlier_seconds
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        completed = state.step if state else 0
        task = progress.add_task(description, total=config.steps, completed=completed, loss=float("nan"), speed=0.0)

        def on_step(state, loss, aux, held_out_loss, seconds):
            step, speed = state.step, tokens / seconds
            progress.update(task, completed=step, loss=loss, speed=speed)
            if held_out_loss is not None and step < config.steps:
                console.print(f"step {step}: held-out loss {held_out_loss:.3f}")
            if not console.is_terminal and (step % max(config.steps // 10, 1) == 0 or step == config.steps):
                losses = [f"loss {loss:.3f}", *(f"{name.replace('_', ' ')} {value:.3g}" for name, value in aux.items())]
                console.print(
                    f"{description}: step {step} of {config.steps}, {', '.join(losses)}, {speed:,.0f} tokens/s"
                )
            record.add(
                run=description,
                step=step,
                loss=loss,
                indexer_loss=aux.get("indexer_loss"),
                held_out_loss=held_out_loss,
                tokens_per_second=f"{speed:.1f}",
                seconds=f"{time.perf_counter() - began:.3f}",
            )
            save(state)  # behind its row: a row without a checkpoint is dropped on resuming, the reverse would be a gap

        return train(model, config, training, held_out, on_step, state)


def _print_losses(console, result, unigram, bigram):
    from rich.table import Table

    table = Table("", "nats a byte")
    for name, value in (
        ("training loss", result.training_loss),
        ("held-out loss", result.held_out_loss),
        ("bigram entropy of the text", bigram),
        ("unigram entropy of the text", unigram),
    ):
        table.add_row(name, f"{value:.3f}")
    console.print(table)


def _compare(console, off, on) -> int:
    from flax import nnx

    from dsv4_fusions.testing import count_mismatches

    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(off.params)]
    arrays = zip(
        ["losses", *names],
        [off.losses, *jax.tree.leaves(off.params)],
        [on.losses, *jax.tree.leaves(on.params)],
        strict=True,
    )
    differing = {name: count for name, a, b in arrays if (count := count_mismatches(a, b))}
    for name, count in differing.items():
        console.print(f"[red]{name}: {count} elements differ[/]")
    if differing:
        return 1
    if not np.isfinite(off.losses).all():
        console.print("[yellow]the losses are not finite[/]: equal NaNs say little about the fusions")
    size = sum(array.size for array in jax.tree.leaves(off.params))
    console.print(f"[green]bitwise equal[/]: {len(off.losses)} losses and {size:,} parameters, fusions off and on")
    return 0


def _prepare_generate(args):
    from flax import nnx

    from dsv4_fusions.config import load_yaml
    from dsv4_fusions.layers import Decoder
    from dsv4_fusions.training import checkpoint
    from dsv4_fusions.training.generate import generate

    cfg, config = load_yaml(args.config)
    # Abstract parameters: all of them come from the checkpoint.
    model = nnx.eval_shape(lambda: Decoder(cfg, rngs=nnx.Rngs(config.seed)))
    checkpoint.load_run_params(args.checkpoint, cfg, model)
    prompt = os.fsencode(args.prompt)  # the bytes that were typed, UTF-8 or not
    new_bytes = generate(model, prompt, args.bytes, args.temperature, args.seed)

    def run():
        # Bytes, as they come: a character may take several of them.
        for data in (prompt, *(bytes([byte]) for byte in new_bytes), b"\n"):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return 0

    return run


def _prepare_verify(args):
    from dsv4_fusions import verify
    from dsv4_fusions.config import load_yaml

    cfg, config = load_yaml(args.config)
    batch, tokens = args.batch or config.batch_size, args.tokens or config.sequence_length
    for name, size in (("--batch", batch), ("--tokens", tokens)):  # the configuration's are checked nowhere else
        if size >= 2**31:
            raise ValueError(f"{name}: got {size}, wanted less than 2^31")
    kinds = verify.build_layers(cfg, batch, tokens, args.layer)

    def run():
        from rich.console import Console

        progress = Console(stderr=True, highlight=False)
        with progress.status("verifying") as status:
            report = verify.verify(cfg, kinds, batch, tokens, lambda kind: status.update(f"ratio {kind.ratio}"))
        if args.json:
            print(json.dumps(_report_as_dict(report, batch, tokens), indent=2))
        else:
            _print_report(Console(highlight=False), report, batch, tokens)
        return report.exit_code

    return run


def _report_as_dict(report, batch, tokens) -> dict:
    from dsv4_fusions.verify import fused_layers

    return {
        "batch": batch,
        "tokens": tokens,
        "exit_code": report.exit_code,
        "mismatches": report.mismatches,
        "fused_layers": fused_layers(report.kinds),
        "kinds": [
            {
                "compress_ratio": kind.ratio,
                "layers": kind.indices,
                "fusions": {name: dataclasses.asdict(status) for name, status in kind.fusions.items()},
                "comparisons": [dataclasses.asdict(each) for each in comparisons],
            }
            for kind, comparisons in zip(report.kinds, report.comparisons, strict=True)
        ],
    }


def _print_report(console, report, batch, tokens):
    from rich.table import Column, Table

    from dsv4_fusions.verify import fused_layers

    for kind, comparisons in zip(report.kinds, report.comparisons, strict=True):
        title = f"compress ratio {kind.ratio}: layers {', '.join(map(str, kind.indices))}"
        table = Table(
            Column(overflow="fold"), "elements", "run to run", "fused to unfused", title=f"{title}, mismatches"
        )
        for each in comparisons:
            table.add_row(each.name, *(f"{n:,}" for n in (each.elements, each.run_to_run, each.fused_to_unfused)))
        console.print(table)
    total = sum(len(kind.indices) for kind in report.kinds)
    for name, layers in fused_layers(report.kinds).items():
        implementations = ", ".join(sorted(set(layers.values())))
        reasons = {kind.fusions[name].reason for kind in report.kinds if not kind.fusions[name].active}
        why = "; ".join(filter(None, [implementations, *sorted(reasons)]))
        console.print(f"{name}: fused in {len(layers)} of {total} layers" + (f" ({why})" if why else ""))
    console.print(
        {
            0: f"[green]bitwise equal[/] at batch {batch}, {tokens} tokens",
            1: f"[red]{report.mismatches:,} elements differ[/] at batch {batch}, {tokens} tokens",
            2: "[red]no fusion is active in any layer[/]: nothing was proved",
        }[report.exit_code]
    )


def _prepare_bench(args):
    from dsv4_fusions import bench
    from dsv4_fusions.config import load_yaml

    cfg, config = load_yaml(args.config)
    sizes = sorted(set(args.tokens or [bench.default_tokens(config)]))
    repeats = args.repeats or bench.default_repeats()
    versions, absent = bench.find_versions(cfg, sizes[-1], args.implementation)
    if args.plot is not None and not args.plot.endswith(".png"):
        raise ValueError(f"--plot: got {args.plot}, wanted a name that ends in .png")
    _check_plot(args.plot)
    if args.csv is not None:
        bench.start_csv(args.csv)

    def run():
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 160  # a file has room for the tables
        machine = bench.describe_machine()
        _print_bench_conditions(console, cfg, machine, absent)
        progress, reports = Console(stderr=True, highlight=False), []
        for tokens in sizes:
            with progress.status("measuring") as status:
                report = bench.measure(cfg, versions, tokens, repeats, status.update)
            reports.append(report)
            _print_bench_report(console, report)
            if args.csv is not None:
                bench.append_csv(args.csv, bench.csv_rows(cfg, report, machine))
        if args.plot is not None:
            bench.draw(args.plot, reports, bench.default_tokens(config))
        return 1 if any(report.failures for report in reports) else 0

    return run


def _print_bench_conditions(console, cfg, machine, absent):
    from dsv4_fusions import bench

    driver, flags = machine["driver"] or "unknown", machine["xla_flags"] or "not set"
    console.print(f"{machine['gpu']}, driver {driver}, JAX {machine['jax']}, XLA_FLAGS {flags}")
    console.print(
        f"{cfg.num_attention_heads} heads of {cfg.head_dim} channels, {cfg.qk_rope_head_dim} of them rotary, "
        f"{cfg.dtype}, rounding {cfg.rope_rounding}"
    )
    if machine["gpu"] == "cpu":
        console.print("[yellow]these are times of a CPU: they say little about a GPU[/]")
    clocks = {"cupti": "times of the kernels alone, by CUPTI", "host": "calls back to back, by the host's clock"}
    console.print(f"ms: {clocks[bench.clock()]}")
    reasons = {}
    for label, reason in absent.items():
        reasons.setdefault(reason, []).append(label)
    for reason, labels in reasons.items():
        console.print(f"not measured: {', '.join(labels)} ({reason})", markup=False)


def _print_bench_report(console, report):
    from rich import box
    from rich.table import Column, Table

    from dsv4_fusions import bench

    console.print(
        f"\n{report.tokens:,} tokens: a copy of {report.tensor_bytes / 2**20:,.4g} MiB takes {report.copy_ms:.4g} ms "
        f"({report.copy_tb_per_s:.3g} TB/s)"
    )
    for failure in report.failures:
        console.print(f"[red]wrong, hence no times[/]: {failure}")
    times = ("ms", "p20 to p80", "host ms", "x roof", "host x roof")
    others = ("temp MiB", "peak MiB", "dM error", "differing", "x einsum", "x best XLA")
    for pass_ in bench.PASSES:
        table = Table(
            Column("", no_wrap=True),
            *(Column(name, justify="right", no_wrap=True) for name in (*times, *others)),
            title=f"{pass_.title}, {report.tokens:,} tokens: the roof is {report.roof_ms(pass_):.4g} ms",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for each in report.measurements:
            if each.pass_ == pass_:
                table.add_row(each.version.label, *_bench_cells(report, each))
        console.print(table)


def _bench_cells(report, measurement):
    low, middle, high = measurement.ms
    yield from (f"{middle:.4g}", f"{low:.4g} to {high:.4g}", f"{measurement.host_ms:.4g}")
    yield from (f"{ratio:.3f}" for ratio in (measurement.ratio, measurement.host_ratio))
    yield from (f"{size / 2**20:,.2f}" for size in (measurement.temp_bytes, measurement.peak_bytes))
    yield "" if measurement.dm_error is None else f"{measurement.dm_error:.2e}"
    yield f"{measurement.differing:,}"
    yield from ("" if times is None else f"{times:.2f}" for times in report.speed_ups(measurement))
