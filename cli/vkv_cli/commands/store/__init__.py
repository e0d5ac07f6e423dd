"""``vkv store``: the prompts that are kept on this machine."""

from __future__ import annotations

import click

from vkv_cli.group import LazyGroup

COMMANDS = {
    "ls": ("store.ls:ls", "List entries."),
    "show": ("store.show:show", "Show one entry."),
    "get": ("store.get:get", "Say which entry has the longest prefix of a prompt."),
    "add": ("store.add:add", "Take copies of .vkv files in."),
    "export": ("store.export:export", "Write an entry to a file that depends on no other."),
    "rm": ("store.rm:rm", "Remove entries."),
    "pin": ("store.pin:pin", "Exempt entries from eviction."),
    "unpin": ("store.pin:unpin", "Let entries be evicted again."),
    "gc": ("store.gc:gc", "Remove what is over a limit, unreadable, or litter."),
    "verify": ("store.verify:verify", "Check the index and every byte of every file."),
    "stats": ("store.stats:stats", "Say how much there is."),
    "push": ("store.remote:push", "Send entries to another machine's store."),
    "pull": ("store.remote:pull", "Take entries of another machine's store in."),
    "ls-remote": ("store.remote:ls_remote", "List what another machine's store has."),
    "reindex": ("store.reindex:reindex", "Build a new index from the files."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def store() -> None:
    """Keep prompts on this machine.

    An entry is named by its id, or by the first four or more digits of it.
    """
