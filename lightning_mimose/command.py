"""The console script `lightning-mimose`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from lightning_mimose.errors import MimoseError, SizeError

_EXAMPLE = """\
example:
  lightning-mimose explain transformers:BertForSequenceClassification --init num_hidden_layers=4 \\
      --size batch=8,input_ids:1=512 --budget 2GB,4GB

The model is run on scaled-down batches only, on the accelerator there is or else on the CPU; the numbers are those of
that device. Batches come from --batch, else from make_batch(**dims) or example_batch(**dims) (of the model or its
module), else from train_dataloader() or example_input_array, stretched to the size, else, for models of transformers,
from the configuration."""


_BENCH = """\
examples:
  lightning-mimose bench                                     one built-in work, ten minutes
  lightning-mimose bench --work all --alternatives all --budget 0.7,0.5,0.35 --output results
  lightning-mimose bench my_package.my_module:MyModel --size batch=8,input_ids:1=128 \\
      --size batch=8,input_ids:1=512 --alternatives layers,static,ours
  lightning-mimose bench my_package.my_module:MyLightningModule --steps 12     batches of its train_dataloader()

A budget is a share of what the activations of a plain run need (0.5), or bytes (2GB). Peaks come from a meter of its
own, times from steps taken in turns. What the columns say: docs/benchmark.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; None takes the process's.

    Returns:
        The exit code: 0, or 2 for what was asked wrongly or cannot be done, with one line on stderr.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed already
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _bench(arguments) if arguments.command == "bench" else _explain(arguments)
    except MimoseError as error:
        print(f"lightning-mimose: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-mimose", description="Training inside a memory budget.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    explain = commands.add_parser(
        "explain",
        help="what a budget would cost, before training",
        description="For a model and input sizes: what each budget costs, and the smallest that works.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("model", metavar="package.module:Name", help="a model, its class, or a function that makes it")
    explain.add_argument(
        "--size",
        action="append",
        required=True,
        metavar="NAME=N,...",
        help="named dimensions of a batch; may be repeated",
    )
    explain.add_argument("--budget", action="append", default=[], metavar="B,...", help='budgets, as "4GB,80%%"')
    explain.add_argument(
        "--units", action="append", metavar="PATTERN,...", help="what to plan; found by itself if absent"
    )
    explain.add_argument(
        "--actions", metavar="NAME,...", help="what plans may do: lean, recompute (both if absent), offload, split"
    )
    explain.add_argument("--init", action="append", default=[], metavar="NAME=VALUE", help="an argument of the model")
    explain.add_argument("--batch", metavar="package.module:f", help="makes a batch from the dimensions as keywords")
    explain.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="what will train it")
    explain.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="the same training under every alternative, measured",
        description="Trains the same batches under every way to save memory, in turns, and compares peaks and times.",
        epilog=_BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "model", nargs="?", metavar="package.module:Name", help="a model or LightningModule; built-in work if absent"
    )
    bench.add_argument("--work", default="", metavar="NAME,...", help='built-in works, or "all"; bert-squad if absent')
    bench.add_argument("--scale", default="small", help="size of built-in works: tiny, small (default), paper (GPU)")
    bench.add_argument("--force", action="store_true", help="run the paper's size on a CPU all the same")
    bench.add_argument("--size", action="append", default=[], metavar="NAME=N,...", help="one batch of your model each")
    bench.add_argument("--init", action="append", default=[], metavar="NAME=VALUE", help="an argument of your model")
    bench.add_argument("--batch", metavar="package.module:f", help="makes a batch from the dimensions as keywords")
    bench.add_argument("--budget", default="0.5", metavar="B,...", help="shares of the activations, or bytes (0.5)")
    bench.add_argument(
        "--alternatives", default="", metavar="NAME,...", help='what to compare, or "all" (compiling takes minutes)'
    )
    bench.add_argument("--batch-size", type=int, metavar="N", help="of a built-in work (else what its scale has)")
    bench.add_argument("--steps", type=int, default=8, help="batches of an epoch (8)")
    bench.add_argument("--repeats", type=int, default=5, help="how often everything is measured (5)")
    bench.add_argument(
        "--output", metavar="FOLDER", help="where bench.json and the plots go; nothing is written if absent"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def _bench(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from lightning_mimose.bench.command import Options, bench

    options = Options(
        model=arguments.model,
        works=_names(arguments.work),
        scale=arguments.scale,
        sizes=[_size(text) for text in arguments.size],
        init=dict(_value(text) for text in arguments.init),
        batch=arguments.batch,
        budgets=_names(arguments.budget) or ["0.5"],
        alternatives=_names(arguments.alternatives),
        batch_size=arguments.batch_size,
        steps=arguments.steps,
        repeats=arguments.repeats,
        output=Path(arguments.output) if arguments.output else None,
        force=arguments.force,
    )
    screen = sys.stdout

    def show(tables: Sequence[Any]) -> None:
        if not arguments.json:
            _print(tables, screen, width=100)
            print(file=screen, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # what a model prints must not end up in the document
        content = bench(options, show)
    if arguments.json:
        print(json.dumps(content, indent=1))
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _explain(arguments: argparse.Namespace) -> int:
    asked = [_size(text) for text in arguments.size]
    if any(size.keys() != asked[0].keys() for size in asked):
        raise SizeError("Every --size must name the same dimensions.")
    budgets = [budget for text in arguments.budget for budget in _names(text)]
    units = [unit for text in arguments.units for unit in text.split(",")] if arguments.units else None
    actions = [name.strip() for name in arguments.actions.split(",")] if arguments.actions else None
    init = dict(_value(text) for text in arguments.init)

    from lightning_mimose.budget import parse_budget
    from lightning_mimose.explain.explain import explain, tables
    from lightning_mimose.explain.learn import learn
    from lightning_mimose.explain.samples import batch_maker, build

    for budget in budgets:  # before a minute is spent on learning
        parse_budget(budget)
    progress = _Progress()
    # What the model prints must not end up in the document.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), _quiet_lightning():
        warnings.simplefilter("ignore")
        progress.tell("building the model")
        model = build(arguments.model, init)
        make_batch = batch_maker(model, arguments.model, arguments.batch)
        try:
            knowledge = learn(
                model,
                make_batch,
                asked,
                units=units,
                actions=actions,
                optimizer=arguments.optimizer,
                tell=progress.tell,
            )
        finally:
            progress.clear()
        answers = explain(knowledge, asked, budgets)
    if arguments.json:
        document = {
            "version": _version(),
            "model": arguments.model,
            "device": str(knowledge.device),
            "optimizer": arguments.optimizer,
            "units": list(knowledge.units),
            "learnt_sizes": list(knowledge.sizes),
            "sizes": [answer.to_dict() for answer in answers],
        }
        print(json.dumps(document, indent=1))
    else:
        _print(list(tables(arguments.model, knowledge, answers)))
    return 0


def _print(shown: Sequence[Any], screen: TextIO | None = None, width: int | None = None) -> None:
    from lightning_mimose.report.text import WIDTH, plain, rich_tables

    screen = screen or sys.stdout
    if screen.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console(file=screen)
            for table in rich_tables(shown):
                console.print(table)
            return
    print(plain(shown, width or WIDTH), file=screen)


def _size(text: str) -> dict[str, int]:
    """Named dimensions from "batch=8,input_ids:1=512"."""
    size: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        if not equals or not name or not value.isdigit() or int(value) < 1:
            raise SizeError(
                f"--size {text!r} cannot be read at {part!r}. Write NAME=N,..., as in batch=8,input_ids:1=512."
            )
        size[name] = int(value)
    return size


def _value(text: str) -> tuple[str, Any]:
    """A Python literal, or else the text itself, from "name=value"."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise MimoseError(f"--init {text!r} cannot be read. Write NAME=VALUE, as in num_hidden_layers=4.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


class _Progress:
    """One line on stderr, if somebody is there to see it."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def tell(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.tell("")


@contextlib.contextmanager
def _quiet_lightning() -> Any:
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _version() -> str:
    from lightning_mimose import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
