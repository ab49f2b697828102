# SPDX-License-Identifier: Apache-2.0
"""The parts that the parsers of all commands share: the class of parsers, types of numbers, and common options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes an int from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is {'not positive' if least else 'negative'}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"{value} is above {most}")
        return value

    return parse


natural, positive = at_least(0), at_least(1)


class Parser(argparse.ArgumentParser):
    """A parser whose errors show the usage of the command that was given, and are in plain words."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would leave unknown arguments to the parser of all commands
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"ignored explicit argument (.*)", r"\1 is no value that it takes", message)
        missing = re.sub(r"the following arguments are required: (.*)", r"\1 is missing", message)
        super().error(message if missing == message else f"{missing}; see `{self.prog} --help`")


def command(commands: Any, name: str, does: str, *more: str, **options: Any) -> Any:
    """Add the parser of a command. The phrase `does` says what the command does. The list of all commands shows the
    phrase. The command's own help begins with the phrase, made a sentence, and continues with the sentences `more`."""
    sentences = [f"{does[0].upper()}{does[1:]}.", *more]
    parser = commands.add_parser(name, help=does, description=" ".join(sentences), **options)
    parser.set_defaults(prog=parser.prog)
    return parser


def completed(option: Any, completer: Callable[..., object]) -> None:
    """Let shells complete the values of an option by argcomplete's `completer`."""
    option.completer = completer


def add_driver(
    parser: argparse.ArgumentParser, text: str = "default: the `driver` setting", default: str | None = None
) -> None:
    """Add `--driver` to a command that runs on either driver; `text` is its help."""
    parser.add_argument("--driver", choices=("cuda", "emu"), default=default, help=text)
