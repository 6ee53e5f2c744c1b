"""Every way in which a request can fail, as one tree; and the exit statuses of our processes.

A class has a wire code and an HTTP status. The gateway renders it as the body of an error. The scheduler sends it as a
`Failure` message (`wire/messages.py`), and `from_wire` makes the class again on the other side.

    ServiceError
    ├── InvalidRequest          400  the client's input is wrong (its own `code`, for example empty_input)
    │   ├── BadRequest          400  bad_request: not HTTP as this server reads it
    │   ├── TargetTooLong       414  header_too_large: its target is too long
    │   ├── ExpectationFailed   417  expectation_failed: an `Expect` that is not supported
    │   ├── HeaderTooLarge      431  header_too_large
    │   └── VersionNotSupported 505  bad_request: HTTP, but neither 1.1 nor 1.0
    ├── AuthenticationFailed    401  invalid_api_key: no key, or an unknown one
    ├── Forbidden               403  forbidden: the key is known, and may not do this
    ├── NotFound                404  unknown_route, model_not_found
    ├── MethodNotAllowed        405  method_not_allowed
    ├── RequestTimeout          408  request_timeout: the request did not arrive in time
    ├── TooLarge                413  body_too_large, too_many_chunks: the rest of it is not read
    ├── InputTooLarge           413  input_too_large_for_device: even alone it does not fit into a worker's memory
    ├── UnsupportedMedia        415  unsupported_media_type, unsupported_encoding
    ├── Overloaded              429  overloaded: the queue is full
    ├── RateLimited             429  rate_limit_exceeded: the key's own share of tokens is used up
    ├── InternalError           500  internal_error: our bug
    │   ├── NonfiniteOutput     500  nonfinite_output: the model computed a NaN or an infinity for this input
    │   └── InputQuarantined    500  input_quarantined: every worker that ran this input died
    ├── Unavailable             503  no_capacity: no worker is ready
    │   └── ShuttingDown        503  shutting_down
    └── DeadlineExceeded        504  deadline_exceeded: the request's own deadline

A malformed message of a peer is no failure of a request: `ProtocolError` is counted, and the loop goes on.
"""

from __future__ import annotations

from typing import ClassVar

# The exit statuses of our processes, besides 0.
EX_FAILURE = 1  # the process cannot start, or has failed
EX_USAGE = 2  # argparse's own, for a wrong flag
EX_STUCK = 70  # a step of a worker does not end; only a new process can use the device again
EX_DEVICE_LOST = 71  # the device of a worker answers with errors only; again only a new process can use it
EX_BUSY = 75  # EX_TEMPFAIL: another process has this role and slot; a later start may succeed
EX_CONFIG = 78  # the model or the configuration is wrong; another start would fail too


class StartRefused(Exception):
    """A process or a suite cannot start; the text says what to change."""

    exit_status: ClassVar[int] = EX_FAILURE


class AddressInUse(StartRefused):
    """Another process has this role and slot in the run folder."""

    exit_status = EX_BUSY


class ConfigurationRefused(StartRefused):
    """The model cannot be served as its folder declares it, or the file of keys cannot be used."""

    exit_status = EX_CONFIG


class ProtocolError(Exception):
    """A frame is not a message: malformed, out of bounds or of another version."""


class VersionMismatch(ProtocolError):
    """A peer introduces itself with another version of the protocol, so its other messages cannot be read."""

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
    """The connection closes after it, since it is unknown where the next request begins."""

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
    """One input is too large for the device. The request itself has been read."""

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
        """The error for a full queue, whose work would take `wait_ms`."""
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
    """Not 503: clients would then send the input again, and each try costs workers."""

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


# The errors that a scheduler may send. Those of the gateway itself never travel.
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
