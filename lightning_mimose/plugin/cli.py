"""A LightningCLI with the budget as a flag of its own."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_mimose.plugin.callback import MimoseCallback


class MimoseCLI(LightningCLI):
    """`LightningCLI` plus `--mimose.budget=8GB` and every other argument of `MimoseCallback`.

    Limitations:
        Needs the extra `cli` (jsonargparse).
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callback's arguments under `mimose`."""
        parser.add_lightning_class_args(MimoseCallback, "mimose")
