"""Every way in which a request can fail, as one tree, and the exit statuses of our processes.

A class is a wire code, an HTTP status and an occasion. The gateway renders it as the error body; the
scheduler sends it as a `Failure` message (`protocol.py`) and `from_wire` makes the class again on the other side.

    ServiceError
    ├── InvalidRequest          400  the client's input is wrong (its own `code`, for example empty_input)
    │   ├── BadRequest          400  bad_request: not HTTP as we take it
    │   ├── TargetTooLong       414  header_too_large: its target
    │   ├── ExpectationFailed   417  expectation_failed: `Expect` asks for what is not done here
    │   ├── HeaderTooLarge      431  header_too_large
    │   └── VersionNotSupported 505  bad_request: HTTP, but neither 1.1 nor 1.0
    ├── AuthenticationFailed    401  invalid_api_key: no key, or not one of ours
    ├── Forbidden               403  forbidden: the key is known, and may not do this
    ├── NotFound                404  unknown_route, model_not_found
    ├── MethodNotAllowed        405  method_not_allowed
    ├── RequestTimeout          408  request_timeout: the request did not arrive in time
    ├── TooLarge                413  body_too_large, too_many_chunks: the rest of it is not read
    ├── InputTooLarge           413  input_too_large_for_device: not even alone does it fit into a worker's memory
    ├── UnsupportedMedia        415  unsupported_media_type, unsupported_encoding
    ├── Overloaded              429  overloaded: the queue is full
    ├── RateLimited             429  rate_limit_exceeded: the key's own share of tokens is used up
    ├── InternalError           500  internal_error: our bug
    │   ├── NonfiniteOutput     500  nonfinite_output: the model made a NaN or an infinity of this input
    │   └── InputQuarantined    500  input_quarantined: every worker that ran this input died
    ├── Unavailable             503  no_capacity: no worker is ready
    │   └── ShuttingDown        503  shutting_down
    └── DeadlineExceeded        504  deadline_exceeded: the request's own deadline

A peer that speaks nonsense is not a request's failure: `ProtocolError` is counted and the loop goes on.
"""

from __future__ import annotations

from typing import ClassVar

# Exit statuses. argparse ends with the second one by itself.
EX_FAILURE = 1
EX_USAGE = 2
EX_BUSY = 75  # EX_TEMPFAIL: somebody else has this place now
EX_CONFIG = 78  # another try is in vain


class ProtocolError(Exception):
    """A frame is not a message: malformed, out of bounds or of another version."""


class VersionMismatch(ProtocolError):
    """A peer introduces itself in another version of the protocol, so that nothing else of what it says can be read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"a peer of protocol {version}")
        self.version = version
        self.peer = b""  # set by the socket that knows it


class ServiceError(Exception):
    """A request cannot be answered. The text says what to change; it never carries user text or a path.

    `param` names the field at fault (`input[3]`). `sequence` is the index of the sequence at fault among those that
    were submitted; the gateway makes a `param` of it, by the request's own names. `retry_after_s` is how long a client
    should wait.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        sequence: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.sequence = sequence
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class BadRequest(InvalidRequest):
    """The connection closes after it: where the next request begins is unknown."""

    default_code = "bad_request"


class TargetTooLong(InvalidRequest):
    status = 414
    default_code = "header_too_large"


class ExpectationFailed(InvalidRequest):
    status = 417
    default_code = "expectation_failed"


class HeaderTooLarge(InvalidRequest):
    status = 431
    default_code = "header_too_large"


class VersionNotSupported(InvalidRequest):
    status = 505
    default_code = "bad_request"


class AuthenticationFailed(ServiceError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ServiceError):
    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(ServiceError):
    status = 404
    type = "not_found_error"
    default_code = "unknown_route"


class MethodNotAllowed(ServiceError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(ServiceError):
    status = 408
    type = "timeout_error"
    default_code = "request_timeout"
    retryable = True


class TooLarge(ServiceError):
    status = 413
    type = "invalid_request_error"
    default_code = "body_too_large"


class InputTooLarge(ServiceError):
    """The request has been read; only what it asks for is too large."""

    status = 413
    type = "invalid_request_error"
    default_code = "input_too_large_for_device"


class UnsupportedMedia(ServiceError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class Overloaded(ServiceError):
    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"
    retryable = True

    @classmethod
    def queue_full(cls, wait_ms: float) -> Overloaded:
        """What would run before a request takes so long."""
        return cls(
            f"The queue is full: {wait_ms / 1000:.1f} s of work wait. Try again later, or send less at once.",
            retry_after_s=wait_ms / 1000,
        )


class RateLimited(ServiceError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retryable = True


class InternalError(ServiceError):
    pass


class NonfiniteOutput(InternalError):
    default_code = "nonfinite_output"


class InputQuarantined(InternalError):
    """No 503, which says that another try may help: clients would send it again, and each try costs workers."""

    default_code = "input_quarantined"


class Unavailable(ServiceError):
    status = 503
    default_code = "no_capacity"
    retryable = True


class ShuttingDown(Unavailable):
    default_code = "shutting_down"


class DeadlineExceeded(ServiceError):
    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


# What a scheduler may send. The gateway's own refusals never travel.
_WIRE_CLASSES: dict[str, type[ServiceError]] = {
    error.default_code: error
    for error in (
        Overloaded,
        InternalError,
        NonfiniteOutput,
        InputQuarantined,
        InputTooLarge,
        Unavailable,
        ShuttingDown,
        DeadlineExceeded,
    )
}


def from_wire(
    code: str, message: str, *, sequence: int | None = None, retry_after_s: float | None = None
) -> ServiceError:
    """The error that a `Failure` message stands for; a code we do not know is our own bug."""
    return _WIRE_CLASSES.get(code, InternalError)(message, sequence=sequence, retry_after_s=retry_after_s)
