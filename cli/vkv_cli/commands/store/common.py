"""Share options and output among the commands of ``vkv store``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import click

import vkv
from vkv.errors import VkvError
from vkv.store import Entry
from vkv.store.local.layout import INDEX
from vkv.store.local.units import age, size
from vkv_cli import complete, screen, text


def _made(store: vkv.PromptStore) -> bool:
    return any((store.root / name).exists() for name in ("objects", INDEX))


def check_there(store: vkv.PromptStore) -> None:
    """Refuse a directory that is no store.

    Raises:
        VkvError: There is none.
    """
    if not _made(store):
        raise VkvError(f"no store at {store.root}")


def _remember_parents(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Keep the flag for ``_store``, which is called later."""
    context.meta["vkv.parents"] = value


def _store(context: click.Context, _: click.Parameter, value: str | None) -> vkv.PromptStore:
    """Open the store; one that was named must exist, unless the command creates it."""
    store = vkv.PromptStore(value, parents=bool(context.meta.get("vkv.parents")))
    if store.root.exists() and not store.root.is_dir():
        raise VkvError(f"{store.root} is a file, expected a store's directory")
    if value is not None and context.info_name not in MAKING:
        check_there(store)
    return store


#: Commands that make a store where there is none.
MAKING = ("add", "prefill", "pull")
#: ``store: PromptStore``.
store_option = click.option(
    "--store", metavar="DIR", callback=_store,
    help="The store's directory.  [default: store in $VKV_CACHE_DIR, else in vkv in "
    "$XDG_CACHE_HOME, else ~/.cache/vkv/store]",
)  # fmt: skip
#: Creates folders above the store; eager, because ``store_option`` needs it.
parents_option = click.option(
    "--parents", is_flag=True, is_eager=True, expose_value=False, callback=_remember_parents,
    help="Create the folders above the store too.",
)  # fmt: skip
ids_argument = click.argument(
    "ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete.entry
)


def _in_units(parse: Callable[[str], float]) -> Callable[..., float | None]:
    """Return a callback that turns ``20GB``, or ``7d``, into a number."""

    def convert(_: click.Context, param: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except VkvError as exc:
            raise click.BadParameter(f"{exc}.", param=param) from None

    return convert


def size_option(name: str, help: str) -> Callable[..., Any]:  # noqa: A002  # as click has it
    """Return an option that takes a size like ``20GB``."""
    return click.option(name, metavar="SIZE", callback=_in_units(size), help=help)


def age_option(name: str, help: str) -> Callable[..., Any]:  # noqa: A002
    """Return an option that takes an age like ``7d``."""
    return click.option(name, metavar="AGE", callback=_in_units(age), help=help)


def since(moment: float) -> str:
    """Return how long ago a time was, like ``5 min ago``."""
    passed = time.time() - moment
    for seconds, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= 2 * seconds:
            return f"{passed // seconds:.0f} {name} ago"
    return "just now"


def total(entries: Iterable[Entry]) -> str:
    """Return a total like ``3 entries, 1.2 GB``."""
    sizes = [entry.size for entry in entries]
    return f"{count(len(sizes), 'entry', 'entries')}, {text.size(sum(sizes))}"


def count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def same_as(key: str, entry: Entry) -> str:
    """Return why the entry of a file has another id than the file, if it has."""
    return "" if key == entry.id else f" (was here; of the same content as {key[:12]})"


def show(entries: Iterable[Entry], as_json: bool) -> None:
    """Print one line, or one JSON object, for each entry."""
    if as_json:
        for entry in entries:
            text.echo_json({"schema_version": 1, **entry.to_dict()})
        return
    found = list(entries)
    named = any(entry.name or entry.tags for entry in found)
    head = ("ID", "SIZE", "TOKENS", "USED", "CODEC", "MODEL", "NAME")
    rows = [head, *map(_row, found)]
    rows = rows if named else [row[:-1] for row in rows]
    screen.show(
        screen.columns(rows, header=True, right=(1, 2, 3), cut=(4, 5, 6)[: len(rows[0]) - 4],
                       styles=("id",))
    )  # fmt: skip


def _row(entry: Entry) -> tuple[str, ...]:
    key = entry.id[:12] + (" (pinned)" if entry.pinned else "")
    own = (key, text.size(entry.size), f"{entry.tokens:,}", since(entry.used))
    names = " ".join(x for x in (entry.name, *(f"#{tag}" for tag in entry.tags)) if x)
    return (*own, entry.codec, entry.label, names)
