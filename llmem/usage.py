"""Whatever is wrong with what the user typed, in one sentence on standard error, and exit code 2."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import click

from llmem.errors import LlmemError


class Refusal(click.ClickException):
    """One line that names the cause and the next step."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"llmem: {self.message}", file=file, err=file is None)


class SentenceCommand(click.Command):
    """A command that says click's usage errors as a `Refusal`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        path = f"{parent.command_path} {info_name}" if parent else str(info_name)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _refusal(error, path) from None
        for parameter in self.params:
            # What a script makes of an unset variable; it would count as not given.
            if isinstance(parameter, click.Option) and context.params.get(parameter.name or "") == "":
                raise Refusal(f"{parameter.opts[0]} is empty; give it a value, or leave it out")
        return context


class SentenceGroup(SentenceCommand, click.Group):
    """A group of them that says LlmemError as a `Refusal` too."""

    command_class = SentenceCommand

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _refusal(error, ctx.command_path) from None
        except LlmemError as error:
            raise Refusal(str(error)) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Refusal("no space is left where the output goes; choose another place") from None


def _refusal(error: click.UsageError, path: str) -> click.ClickException:
    """click's three lines (usage, where to look, error) as one; its help, if nothing was typed, stays."""
    if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2
        return error
    meant: Sequence[str] | None = getattr(error, "possibilities", None)
    said = " ".join((error.message if meant else error.format_message()).split()).rstrip(".")
    if meant:
        said += f" (did you mean {meant[0]}?)"
    return Refusal(f"{said[:1].lower()}{said[1:]}; see `{path} --help`")
