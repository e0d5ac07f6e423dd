"""``vkv explain``: what a rule of the format says, what breaks it, and what to do."""

from __future__ import annotations

import textwrap

import click

from vkv.tools.explain import Rule, rules
from vkv.tools.explain import explain as rule_of
from vkv_cli import screen, text


@click.command()
@click.argument("numbers", nargs=-1, metavar="[RULE]...")
@text.json_option
def explain(numbers: tuple[str, ...], as_json: bool) -> None:
    """Explain rules by the numbers that stand at the end of messages, e.g. C2.

    Without one, list all rules.
    """
    found = [rule_of(number) for number in numbers] or list(rules().values())
    if as_json:
        for rule in found:
            text.echo_json(rule.to_dict())
    elif numbers:
        width = min(screen.width(), 100)
        click.echo("\n\n".join(_block(rule, width) for rule in found))
    else:
        screen.show(screen.columns(((r.number, r.cause) for r in found), cut=(1,), styles=("id",)))


def _block(rule: Rule, width: int) -> str:
    parts = (
        (f"{rule.number}, {rule.page}", rule.text),
        ("What usually breaks it", rule.cause),
        ("What to do", rule.remedy),
    )
    return "\n".join(
        f"{title}\n{textwrap.fill(body, width, initial_indent='  ', subsequent_indent='  ')}"
        for title, body in parts
    )
