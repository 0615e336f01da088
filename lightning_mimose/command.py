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
from typing import Any

from lightning_mimose.errors import MimoseError, SizeError

_EXAMPLE = """\
example:
  lightning-mimose explain transformers:BertForSequenceClassification --init num_hidden_layers=4 \\
      --size batch=8,input_ids:1=512 --budget 2GB,4GB

The model is run on scaled-down batches only, on the accelerator there is or else on the CPU; the numbers are those of
that device. Batches come from --batch, else from make_batch(**dims) or example_batch(**dims) (of the model or its
module), else from train_dataloader() or example_input_array, stretched to the size, else, for models of transformers,
from the configuration."""


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
        return _explain(arguments)
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
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    asked = [_size(text) for text in arguments.size]
    if any(size.keys() != asked[0].keys() for size in asked):
        raise SizeError("Every --size must name the same dimensions.")
    budgets = [budget.strip() for text in arguments.budget for budget in text.split(",") if budget.strip()]
    units = [unit for text in arguments.units for unit in text.split(",")] if arguments.units else None
    actions = [name.strip() for name in arguments.actions.split(",")] if arguments.actions else None
    init = dict(_value(text) for text in arguments.init)

    from lightning_mimose.budget import parse_budget
    from lightning_mimose.explain import explain, tables
    from lightning_mimose.learn import learn
    from lightning_mimose.samples import batch_maker, build

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


def _print(shown: Sequence[Any]) -> None:
    from lightning_mimose.report.text import plain, rich_tables

    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console()
            for table in rich_tables(shown):
                console.print(table)
            return
    print(plain(shown))


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
