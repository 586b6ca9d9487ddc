"""The form of the errors; tests/rollout/endpoint/test_server.py sees them over HTTP."""

from __future__ import annotations

from lightrl.rollout.endpoint.errors import RequestError, asleep, ended


def test_the_form_is_openais() -> None:
    error = RequestError("no", param="n", code="c")
    assert error.body == {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}}
    assert RequestError("no", status=500).body["error"]["type"] == "server_error"
    assert (asleep(2).status, asleep(2).headers) == (503, {"Retry-After": "5"})
    assert (ended().status, ended().headers) == (401, {"WWW-Authenticate": "Bearer"})
