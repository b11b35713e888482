"""The command `hf-lowbit`: the public functions, for people at a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """One command: what it does in a line, the arguments it takes, and what runs with them."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    return run(options.command, options)


def run(command: str, options: argparse.Namespace, program: str = "hf-lowbit") -> int:
    """Run a command with its parsed arguments. Errors a user can mend are printed as one sentence."""
    try:
        COMMANDS[command].run(options)
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError, RuntimeError) as error:
        print(f"{program} {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-lowbit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help))
    return parser


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder or Hub id")
    parser.add_argument("--group-size", default="128", help='a number, "none" (per channel) or "tensor"')
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _compress_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder or Hub id of a dense model")
    parser.add_argument("output_dir")
    parser.add_argument("--budget", help='"60MB", "2GiB" or "40%%" of the dense bytes; default: what fits in memory')
    parser.add_argument("--bits", type=_bits, help='"ternary", 2, 3, 4, 8, or an average such as 3.2')
    parser.add_argument("--calibration", help="a text file")
    parser.add_argument("--eval", dest="evaluation", help="a text file that is scored before and after each stage")
    parser.add_argument("--stages", default="layer,block,global", help="default: all, separated by commas")
    parser.add_argument("--low-memory", action="store_true", help="never hold the dense model; layer stage only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-resume", action="store_true", help="begin anew in a folder of an earlier run")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the folder or Hub id of a low-bit checkpoint")
    parser.add_argument("output_dir")
    parser.add_argument("--format", required=True, help="compressed-tensors, gguf, gemma or bitnet")
    parser.add_argument("--activations", choices=["float"], help="leave int8 activations out where there are none")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="the folder or Hub id of the checkpoint")
    parser.add_argument("output_dir")


def _card_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    parser.add_argument("--base-model", help="Hub id of the dense model it was made from")


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    parser.add_argument("repo_id")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--revision")
    parser.add_argument("--create-pr", action="store_true")


def _inspect(options) -> None:
    from ..compression.inspect import inspect

    found = inspect(options.model, group_size=_group_size(options.group_size))
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)


def _compress(options) -> None:
    from ..hub.card import write_card_beside
    from ..pipeline import compress

    wishes = {name: getattr(options, name) for name in ("budget", "bits", "calibration", "evaluation", "low_memory")}
    stages = tuple(options.stages.split(","))
    print(compress(options.model, options.output_dir, **wishes, stages=stages, seed=options.seed,
                   resume=not options.no_resume))  # fmt: skip
    write_card_beside(options.output_dir, options.output_dir, base_model=options.model)
    print(f"the checkpoint and its card are in {options.output_dir}")


def _bits(text: str) -> str | int | float:
    if text == "ternary":
        return text
    return int(text) if text.isdecimal() else float(text)


def _export(options) -> None:
    from ..exports import export

    print(export(options.model, options.output_dir, options.format, activations=options.activations))


def _import(options) -> None:
    from ..imports import import_checkpoint

    print(import_checkpoint(options.checkpoint, options.output_dir))


def _card(options) -> None:
    from ..hub import render_card

    print(render_card(options.folder, base_model=options.base_model))


def _push(options) -> None:
    from ..hub import push_to_hub

    wishes = {"private": options.private or None, "revision": options.revision, "create_pr": options.create_pr or None}
    result = push_to_hub(options.folder, options.repo_id, **{k: v for k, v in wishes.items() if v is not None})
    print(result)


def _group_size(text: str) -> int | str | None:
    if text in ("none", "tensor"):
        return None if text == "none" else text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'--group-size={text!r} must be a number, "none" or "tensor".') from None


# the commands, for `hf-lowbit` and for `optimum-cli lowbit`
COMMANDS = {
    "inspect": Command(
        "modules, parameters, bytes at each width; reads only the config", _inspect_arguments, _inspect
    ),
    "compress": Command("compress a model to a size or a number of bits", _compress_arguments, _compress),
    "export": Command("write a low-bit checkpoint in a format that other programs read", _export_arguments, _export),
    "import": Command("convert a GPTQ or compressed-tensors checkpoint to a low-bit one", _import_arguments, _import),
    "card": Command("print the model card of a low-bit checkpoint", _card_arguments, _card),
    "push": Command("upload a low-bit checkpoint with its card", _push_arguments, _push),
}
