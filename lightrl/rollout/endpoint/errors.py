"""The errors of the endpoint, in the form that OpenAI's clients understand."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """The endpoint refused a request; the message is for the author of the client."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None, retry_s: int = 0
    ) -> None:
        """Sets the parts of the answer; retry_s: seconds after which to try again, 0: not stated."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def asleep(waited_s: float) -> RequestError:
    """Returns the error for a request that has waited too long for a sleeping engine."""
    return RequestError(
        f"The engine is asleep while the policy trains, and did not wake up within {waited_s:g} s. Try again.",
        status=503,
        code="engine_asleep",
        retry_s=5,
    )


def ended() -> RequestError:
    """Returns the error for a request whose key belongs to an episode that is over."""
    return RequestError("The episode that this key belongs to has ended.", status=401, code="episode_ended")
