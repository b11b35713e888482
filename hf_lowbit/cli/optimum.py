"""`optimum-cli lowbit ...`: the commands of `hf-lowbit` inside optimum's program.

optimum also looks for commands in a folder `optimum/commands/register` that any package may bring. We don't bring one:
the folder alone makes transformers believe that optimum is installed.
"""

from __future__ import annotations

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from . import COMMANDS, run


def _subcommand(name: str) -> CommandInfo:
    def run_it(self) -> None:
        status = run(name, self.args, "optimum-cli lowbit")
        if status:
            raise SystemExit(status)

    members = {"parse_args": staticmethod(COMMANDS[name].add_arguments), "run": run_it}
    cls = type(f"Lowbit{name.title()}Command", (BaseOptimumCLICommand,), members)
    return CommandInfo(name=name, help=COMMANDS[name].help, subcommand_class=cls)


class LowbitCommand(BaseOptimumCLICommand):
    """`optimum-cli lowbit`: prints its help, and has the subcommands of `hf-lowbit`."""

    COMMAND = CommandInfo(name="lowbit", help="Compress a model to low bits, export, import and push it.")
    SUBCOMMANDS = tuple(map(_subcommand, COMMANDS))


def install() -> None:
    """Register the command with optimum, once."""
    from optimum.commands import optimum_cli

    if not any(command is LowbitCommand for command, _ in optimum_cli._OPTIMUM_CLI_SUBCOMMANDS):
        optimum_cli.optimum_cli_subcommand()(LowbitCommand)
