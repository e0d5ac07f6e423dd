"""The prompt as options give it: a message, a system prompt, or a whole conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vkv.errors import VkvError
from vkv_cli.streams import argument, read_text

Messages = list[dict[str, Any]]

#: Metadata key of files whose prompt went through no chat template.
PLAIN = "ignore_chat_template"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options that hold the prompt.

    Attributes:
        prompt: The user's message; ``-`` stands for stdin.
        prompt_file: A file with it; ``-`` for stdin, also of the next.
        messages: A JSON file with a conversation.
        system_prompt: Goes before the user's message; ``-`` stands for stdin.
        ignore_chat_template: The message is the prompt as it is.
    """

    prompt: str | None
    prompt_file: Path | None
    messages: Path | None
    system_prompt: str | None
    ignore_chat_template: bool

    @property
    def given(self) -> bool:
        fields = (self.prompt, self.prompt_file, self.messages, self.system_prompt)
        return any(x is not None for x in fields)

    def metadata(self) -> dict[str, str]:
        """Return the metadata that ``vkv generate`` needs about the prompt."""
        return {PLAIN: "true"} if self.ignore_chat_template else {}

    def check(self) -> None:
        """Refuse what says nothing, or two things."""
        sources = (self.prompt, self.prompt_file, self.messages)
        if not self.given:
            raise click.UsageError(
                "no prompt: give --prompt, --prompt-file, --messages or --system-prompt."
            )
        if sum(x is not None for x in sources) > 1:
            raise click.UsageError("give one of --prompt, --prompt-file and --messages.")
        if self.messages is not None and self.system_prompt is not None:
            raise click.UsageError("--messages holds the system prompt: leave --system-prompt out.")
        if self.ignore_chat_template and (self.messages or self.system_prompt is not None):
            raise click.UsageError("--ignore-chat-template goes with --prompt or --prompt-file.")
        if sum(str(x) == "-" for x in (*sources, self.system_prompt)) > 1:
            raise click.UsageError("only one of the options that hold the prompt can be stdin.")

    def tokens(self, read: Messages, tokenizer: Any) -> list[int]:
        """Return the prompt's token ids."""
        from vkv.caches import chat

        if not self.ignore_chat_template and tokenizer.has_chat_template:
            return chat.opening(tokenizer, read)
        if len(read) > 1 or read[0]["role"] != "user":
            raise VkvError("the tokenizer has no chat template: give --prompt or --prompt-file")
        return list(tokenizer.encode(read[0]["content"]))

    def read(self) -> Messages:
        """Read the conversation from the command line, standard input and files.

        Raises:
            click.UsageError: The options say nothing, or two things.
            VkvError: A file does not hold what it should.
        """
        self.check()
        if self.messages is not None:
            return _conversation(self.messages)
        found = []
        if self.system_prompt is not None:
            found.append({"role": "system", "content": self._system()})
        if self.prompt is not None or self.prompt_file is not None:
            found.append({"role": "user", "content": self._text()})
        return found

    def _system(self) -> str:
        return given(str(self.system_prompt), "--system-prompt")

    def _text(self) -> str:
        if self.prompt_file is not None:
            at = "standard input" if str(self.prompt_file) == "-" else str(self.prompt_file)
            return filled(read_text(self.prompt_file, at), at)
        return given(str(self.prompt), "--prompt")


def given(text: str, option: str) -> str:
    """Return the text of an option, read from standard input if it is ``-``.

    Raises:
        click.UsageError: The option is empty.
        VkvError: Standard input is empty, or the text is not UTF-8.
    """
    if not text.strip():
        raise click.UsageError(f"{option} is empty: there is nothing to compute.")
    at = f"{option} from standard input" if text == "-" else option
    return filled(read_text("-", at) if text == "-" else argument(text, at), at)


def filled(text: str, at: str) -> str:
    """Return ``text`` if it is not empty.

    Raises:
        VkvError: It does not; ``at`` says whose it is.
    """
    if not text.strip():
        raise VkvError("an empty prompt: there is nothing to compute", at=at)
    return text


def _conversation(path: Path) -> Messages:
    try:
        found = json.loads(read_text(path, str(path)))
    except (ValueError, RecursionError) as exc:
        raise VkvError(f"not JSON: {exc}", at=str(path)) from None
    if not isinstance(found, list) or not found:
        raise VkvError("expected a JSON list of messages", at=str(path))
    for i, message in enumerate(found):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise VkvError(f"message {i} is not a map with role and content", at=str(path))
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON can escape half a character
            raise VkvError(f"message {i} holds half a character", at=str(path)) from None
    return found
