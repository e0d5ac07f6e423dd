"""Describe a refused request as the OpenAI API does."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """Refuse a request.

    Args:
        message: One sentence: what was found, then what was expected.
        param: The parameter at fault, e.g. ``"messages[0].content"``.
        status: Status code of HTTP.
        code: Reason for programs, e.g. ``"model_not_found"``.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
