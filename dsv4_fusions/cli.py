"""The command line: `dsv4-fusions train CONFIG` and `dsv4-fusions verify CONFIG`."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

INTERRUPTED = 130  # the shell's code for a program that Ctrl-C ended


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the usage in front of it
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments; None: the process's.

    Returns:
        The exit code. 0: done; 1: bits differ; 2: wrong usage, or no fusion was active where one was to be compared.
    """
    parser = _build_parser()
    args = parser.parse_args(argv)
    try:
        run = args.prepare(args)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"{parser.prog} {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _interrupted(parser, args)
    try:
        return run()
    except KeyboardInterrupt:
        return _interrupted(parser, args)


def _interrupted(parser, args) -> int:
    print(f"{parser.prog} {args.command}: interrupted", file=sys.stderr)
    return INTERRUPTED


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dsv4-fusions", description="DeepSeek-V4-style hybrid attention with bitwise-neutral fusions."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train a byte-level decoder on text")
    train.add_argument("config", metavar="CONFIG", help="YAML file with the keys model: and train:")
    train.add_argument(
        "--text", nargs="+", metavar="FILE", help="files to train on, a document each (default: Python's documentation)"
    )
    train.add_argument("--steps", type=_positive, metavar="N", help="number of steps (default: the configuration's)")
    train.add_argument(
        "--compare",
        action="store_true",
        help="train twice from one seed, fusions off and on, and fail unless every loss and parameter is bitwise equal",
    )
    train.set_defaults(prepare=_prepare_train)

    verify = commands.add_parser("verify", help="compare every kind of layer, fused and unfused, bit by bit")
    verify.add_argument("config", metavar="CONFIG", help="YAML file with the key model:")
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verify.add_argument("--batch", type=_positive, metavar="B", help="batch entries (default: train.batch_size)")
    verify.add_argument("--tokens", type=_positive, metavar="T", help="tokens (default: train.sequence_length)")
    verify.add_argument("--layer", type=int, nargs="+", metavar="I", help="layers to look at (default: all)")
    verify.set_defaults(prepare=_prepare_verify)
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer of 1 or more")
    return value


def _prepare_train(args):
    from flax import nnx
    from rich.console import Console

    from dsv4_fusions.config import load_yaml
    from dsv4_fusions.layers import Decoder, DSv4HybridSelfAttention
    from dsv4_fusions.training import text

    console = Console(highlight=False)
    cfg, config = load_yaml(args.config)
    if cfg.vocab_size < text.NUM_BYTES:
        raise ValueError(f"vocab_size: got {cfg.vocab_size}, wanted at least {text.NUM_BYTES}: the tokens are bytes")
    if args.steps is not None:
        config = dataclasses.replace(config, steps=args.steps, warmup_steps=min(config.warmup_steps, args.steps - 1))
    documents = text.read_files(args.text) if args.text else text.python_documentation()
    training, held_out = (text.pack(part, config.sequence_length) for part in text.hold_out(documents))

    switches = DSv4HybridSelfAttention.SWITCHES
    if args.compare:
        models = [Decoder(cfg, rngs=nnx.Rngs(config.seed), **dict.fromkeys(switches, on)) for on in (False, True)]
    else:
        models = [Decoder(cfg, rngs=nnx.Rngs(config.seed))]
    status = models[-1].explain_fusions(training.take(slice(config.batch_size)).tokens)

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
        names = ("fusions off", "fusions on") if args.compare else ("training",)
        results = [
            _train(console, name, model, config, training, held_out) for name, model in zip(names, models, strict=True)
        ]
        _print_losses(console, results[-1], text.unigram_entropy(documents), text.bigram_entropy(documents))
        return _compare(console, *results) if args.compare else 0

    return run


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


def _train(console, description, model, config, training, held_out):
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
    started = None
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=config.steps, loss=float("nan"), speed=0.0)

        def on_step(step, loss, held_out_loss):
            nonlocal started
            started = started or time.perf_counter()  # behind the first step, which compiles
            speed = tokens * (step - 1) / max(time.perf_counter() - started, 1e-9)
            progress.update(task, completed=step, loss=loss, speed=speed)
            if held_out_loss is not None:
                console.print(f"step {step}: held-out loss {held_out_loss:.3f}")
            if not console.is_terminal and (step % max(config.steps // 10, 1) == 0 or step == config.steps):
                console.print(f"{description}: step {step} of {config.steps}, loss {loss:.3f}, {speed:,.0f} tokens/s")

        return train(model, config, training, held_out, on_step)


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
    import jax
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
    size = sum(array.size for array in jax.tree.leaves(off.params))
    console.print(f"[green]bitwise equal[/]: {len(off.losses)} losses and {size:,} parameters, fusions off and on")
    return 0


def _prepare_verify(args):
    from dsv4_fusions import verify
    from dsv4_fusions.config import load_yaml

    cfg, config = load_yaml(args.config)
    batch, tokens = args.batch or config.batch_size, args.tokens or config.sequence_length
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
                "not_built": kind.not_built,
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
        if kind.not_built:
            console.print(f"{title}: [yellow]not built yet[/] ({kind.not_built})")
            continue
        table = Table(
            Column(overflow="fold"), "elements", "run to run", "fused to unfused", title=f"{title}, mismatches"
        )
        for each in comparisons:
            table.add_row(each.name, *(f"{n:,}" for n in (each.elements, each.run_to_run, each.fused_to_unfused)))
        console.print(table)
    total = sum(len(kind.indices) for kind in report.kinds)
    for name, layers in fused_layers(report.kinds).items():
        implementations = ", ".join(sorted(set(layers.values())))
        reasons = {kind.fusions[name].reason for kind in report.kinds if kind.fusions and not kind.fusions[name].active}
        why = "; ".join(filter(None, [implementations, *sorted(reasons)]))
        console.print(f"{name}: fused in {len(layers)} of {total} layers" + (f" ({why})" if why else ""))
    console.print(
        {
            0: f"[green]bitwise equal[/] at batch {batch}, {tokens} tokens",
            1: f"[red]{report.mismatches:,} elements differ[/] at batch {batch}, {tokens} tokens",
            2: "[red]no fusion is active in any layer[/]: nothing was compared",
        }[report.exit_code]
    )
