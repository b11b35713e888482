"""The command `hf-lowbit`: the public functions, for people at a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors a user can mend are printed as one sentence."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError, RuntimeError) as error:
        print(f"hf-lowbit {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-lowbit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="modules, parameters, bytes at each width; reads only the config")
    inspect.add_argument("model", help="a folder or Hub id")
    inspect.add_argument("--group-size", default="128", help='a number, "none" (per channel) or "tensor"')
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.set_defaults(run=_inspect)
    compress = commands.add_parser("compress", help="compress a model to a size or a number of bits")
    compress.add_argument("model", help="a folder or Hub id of a dense model")
    compress.add_argument("output_dir")
    compress.add_argument("--budget", help='"60MB", "2GiB" or "40%%" of the dense bytes; default: what fits in memory')
    compress.add_argument("--bits", type=_bits, help='"ternary", 2, 3, 4, 8, or an average such as 3.2')
    compress.add_argument("--calibration", help="a text file")
    compress.add_argument("--eval", dest="evaluation", help="a text file that is scored before and after each stage")
    compress.add_argument("--stages", default="layer,block,global", help="default: all, separated by commas")
    compress.add_argument("--low-memory", action="store_true", help="never hold the dense model; layer stage only")
    compress.add_argument("--seed", type=int, default=0)
    compress.add_argument("--no-resume", action="store_true", help="begin anew in a folder of an earlier run")
    compress.set_defaults(run=_compress)
    export = commands.add_parser("export", help="write a low-bit checkpoint in a format that other programs read")
    export.add_argument("model", help="the folder or Hub id of a low-bit checkpoint")
    export.add_argument("output_dir")
    export.add_argument("--format", required=True, help="compressed-tensors, gguf, gemma or bitnet")
    export.add_argument("--activations", choices=["float"], help="leave int8 activations out where there are none")
    export.set_defaults(run=_export)
    bring = commands.add_parser("import", help="convert a GPTQ or compressed-tensors checkpoint to a low-bit one")
    bring.add_argument("checkpoint", help="the folder or Hub id of the checkpoint")
    bring.add_argument("output_dir")
    bring.set_defaults(run=_import)
    card = commands.add_parser("card", help="print the model card of a low-bit checkpoint")
    card.add_argument("folder")
    card.add_argument("--base-model", help="Hub id of the dense model it was made from")
    card.set_defaults(run=_card)
    push = commands.add_parser("push", help="upload a low-bit checkpoint with its card")
    push.add_argument("folder")
    push.add_argument("repo_id")
    push.add_argument("--private", action="store_true")
    push.add_argument("--revision")
    push.add_argument("--create-pr", action="store_true")
    push.set_defaults(run=_push)
    return parser


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
