"""A click group whose commands are imported when they are run, so that start-up stays short."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

#: Command name -> (module:attribute below ``vkv_cli.commands``, short help).
Table = dict[str, tuple[str, str]]


@dataclass(slots=True)
class Run:
    """Hold what is true for one run of the program; the ``obj`` of every click context.

    Attributes:
        debug: Show tracebacks and all warnings.
        failure: Exit status of an error. ``vkv diff`` has 2, as ``diff`` has.
        explained: A message said already where rules are explained.
    """

    debug: bool = False
    failure: int = 1
    explained: bool = False


def run() -> Run:
    """Return the current run."""
    found = click.get_current_context().find_object(Run)
    assert found is not None, "vkv_cli.main passes one"
    return found


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and (found := context.find_object(Run)) is not None:
        found.debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show a traceback when something fails.",
    )


class LazyGroup(click.Group):
    """A group that knows its commands' names and short help without importing them."""

    def __init__(self, *args: Any, table: Table, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.table = table
        self.params.append(_debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        if name not in self.commands:
            module, _, attribute = self.table[name][0].partition(":")
            command = getattr(import_module(f"vkv_cli.commands.{module}"), attribute)
            if not isinstance(command, LazyGroup):
                command.params.append(_debug_option())
            self.commands[name] = command
        return self.commands[name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named first; a mistyped name is answered by those like it."""
        if args and args[0] not in self.table and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.table, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])
