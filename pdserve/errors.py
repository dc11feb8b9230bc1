"""The one error tree of pdserve, sorted by situation.

    PdserveError
    ├── ConfigError                 the operator's mistake: a flag, file or checkpoint
    │   └── UnsupportedCheckpoint   the checkpoint needs what the engine lacks
    ├── RequestError                the client's mistake; trying again unchanged cannot help
    │   ├── InvalidRequest          a field is malformed, out of range or not supported
    │   │   └── ContextLengthExceeded
    │   ├── Unauthorized
    │   ├── Forbidden
    │   ├── ModelNotFound
    │   ├── RouteNotFound
    │   ├── MethodNotAllowed
    │   ├── PayloadTooLarge
    │   └── RequestTimeout          the body did not arrive in time
    ├── Overloaded                  a bound was reached; later it may fit
    │   └── RateLimited             the bound belongs to this API key
    ├── Unavailable                 no process can serve this now
    │   ├── NotReady                still loading
    │   ├── Draining                going away
    │   ├── NoWorker                no worker serves the model
    │   ├── NoActor                 it is not there, or ended before it came to the message
    │   ├── ActorFailed             it ended while it had the message: it may have acted on it
    │   └── RestartsExhausted       a supervisor has given up
    ├── DeadlineExceeded            the request's time ran out, at a named stage
    ├── Cancelled                   the client went away
    ├── ProtocolError               the other side of a connection broke its rules
    │   └── NoMethod                the peer does not serve this method: another release or role
    ├── LinkError                   a link to another node; `sent`: the peer may have acted on it
    │   ├── DialFailed              no connection came about; nothing was sent
    │   │   ├── DialRefused         nothing listens at the address
    │   │   ├── DialTimeout         nothing answered in time
    │   │   └── HandshakeRefused    one side would not have the other
    │   │       ├── WrongClusterKey
    │   │       ├── WrongCluster
    │   │       ├── WrongPeer       another node, or another life of it, than was expected
    │   │       │   └── NameTaken   a later life of this node is in the cluster
    │   │       ├── OwnAddress      the address leads back to the node that dials
    │   │       └── NoCommonVersion
    │   └── LinkLost                it ended while something was under way on it
    ├── TransferError               KV did not get from one node to another; says which, where, why
    │   ├── TransferRefused         the two ends do not fit together, or the attempt is not current
    │   ├── TransferWithdrawn       one end gave the attempt up
    │   ├── TransferTimeout         no progress, or no answer, within the deadline
    │   ├── TransferCorrupt         what arrived is not what was sent
    │   └── PathLost                the path to the peer ended
    ├── ActuatorError               a worker could not be started, stopped or listed for the planner
    │   ├── ActuatorTransient       no answer, or a failure that passes
    │   ├── ActuatorDenied          no permission, or nothing that it knows how to start
    │   └── ActuatorExhausted       there is no room now
    └── EngineError                 the engine failed while it had the request
        └── EngineDied              its process ended

Each class says which HTTP status fits, whether a retry can help, and which `type` and `code`
OpenAI's error object carries. Foreign exceptions are mapped where they enter, never passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from typing import Self


class PdserveError(Exception):
    """Base of all errors that pdserve raises on purpose. `param` names the offending field;
    `retry_after`, in seconds, becomes a Retry-After header.
    """

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ConfigError(PdserveError):
    """The operator's configuration cannot work; the message names the key and the remedy."""

    code = "config_error"


class UnsupportedCheckpoint(ConfigError):
    """The checkpoint needs a feature that the engine lacks; the message names it."""

    code = "unsupported_checkpoint"


class RequestError(PdserveError):
    """The client's request is at fault."""

    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is missing, malformed, out of range, or known but not supported."""

    code = "invalid_value"


class Overrun(NamedTuple):
    """The sizes of a request that does not fit the model's context."""

    prompt: int
    """Prompt tokens, or a lower bound of them."""
    output: int
    """Output tokens asked for; 0: the prompt alone is too long."""
    context: int


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        overrun: Overrun | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.overrun = overrun
        """The sizes; None if the engine found the error."""


class Unauthorized(RequestError):
    """API keys are configured, and the request carries no known key."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is known but not permitted, or the caller is a web page of another origin."""

    http_status = 403
    error_type = "permission_error"
    code = "forbidden"


class ModelNotFound(RequestError):
    """The model is not served here."""

    http_status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class RouteNotFound(RequestError):
    """The path does not exist."""

    http_status = 404
    error_type = "not_found_error"
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method."""

    http_status = 405
    code = "method_not_allowed"


class PayloadTooLarge(RequestError):
    """The body exceeds the configured limit."""

    http_status = 413
    code = "payload_too_large"


class RequestTimeout(RequestError):
    """The client did not send its request in time."""

    http_status = 408
    retryable = True
    code = "request_timeout"


class Overloaded(PdserveError):
    """A queue or counter is at its bound; `retry_after` says when to try again."""

    http_status = 429
    retryable = True
    error_type = "rate_limit_error"
    code = "overloaded"


class RateLimited(Overloaded):
    """The API key's own limit is reached."""

    code = "rate_limit_exceeded"


class Unavailable(PdserveError):
    """No node can serve the request at the moment."""

    http_status = 503
    retryable = True
    error_type = "service_unavailable"
    code = "unavailable"


class NotReady(Unavailable):
    """The engine is still loading or is being restarted."""

    code = "not_ready"


class Draining(Unavailable):
    """The process is draining and takes no new work."""

    code = "draining"


class NoWorker(Unavailable):
    """No worker serves the model at the moment."""

    code = "no_worker"


class NoRouter(Unavailable):
    """No router of the cluster answered while the request could wait."""

    code = "no_router"


class WorkerLost(Unavailable):
    """The worker that had the request is gone; what it had produced so far has been delivered."""

    code = "worker_lost"


class Poisoned(PdserveError):
    """Several workers died while they had this request; it is not given to another one."""

    code = "poisoned_request"


class NoActor(Unavailable):
    """No longer raised. No actor at the address acted on the message."""

    code = "no_actor"


class ActorFailed(Unavailable):
    """No longer raised. An actor ended while it had the message, and may have acted on it."""

    code = "actor_failed"


class RestartsExhausted(Unavailable):
    """A supervisor's children failed more often than it may restart them."""

    code = "restarts_exhausted"


class DeadlineExceeded(PdserveError):
    """The request's time ran out; the message names the stage it was in."""

    http_status = 504
    retryable = True
    error_type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(PdserveError):
    """The client disconnected; only the logs show this error."""

    http_status = 499
    error_type = "cancelled"
    code = "cancelled"


class ProtocolError(PdserveError):
    """Received bytes break the protocol; the connection is lost."""

    code = "protocol_error"


class NoMethod(ProtocolError):
    """The peer does not serve this request or stream: it has another release or role. It did not
    act, and the connection goes on. A `ProtocolError` because nodes of release 0.1 answer with
    that.
    """

    code = "no_method"


class LinkError(PdserveError):
    """A link to another node failed. `sent` says what the caller may do. False: nothing left this
    process, so a retry is safe. True: the peer may have received and acted on it.
    """

    http_status = 503
    retryable = True
    error_type = "service_unavailable"
    code = "link_error"

    def __init__(
        self,
        message: str,
        *,
        sent: bool = True,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.sent = sent


class DialFailed(LinkError):
    """No connection was made, so nothing was sent. `cause` is one word that selects the retry
    policy.
    """

    code = "dial_failed"
    cause: ClassVar[str] = "failed"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, sent=False, param=param, retry_after=retry_after)


class DialRefused(DialFailed):
    """The address answers, but no process listens there: the node is not up, or no longer."""

    cause = "refused"


class DialTimeout(DialFailed):
    """Nothing answered in time: a network or a host is down, or a process does not run."""

    cause = "timeout"


class HandshakeRefused(DialFailed):
    """The peer listens, but one side refused the other."""

    code = "handshake_refused"
    cause = "handshake"


class WrongClusterKey(HandshakeRefused):
    """The two nodes do not share a cluster key; the remedy is `--cluster-key-file`."""

    code = "wrong_cluster_key"
    cause = "key"


class WrongCluster(HandshakeRefused):
    """The key is right, but the peer belongs to a cluster of another name."""

    code = "wrong_cluster"
    cause = "cluster"


class WrongPeer(HandshakeRefused):
    """Another node than was expected, another life of it, or this node itself."""

    code = "wrong_peer"
    cause = "peer"


class NameTaken(WrongPeer):
    """The peer knows a later life of this node: another process runs under its name."""

    code = "name_taken"


class OwnAddress(HandshakeRefused):
    """The address leads back to this node, for example in its own list of seeds."""

    code = "own_address"
    cause = "self"


class NoCommonVersion(HandshakeRefused):
    """The two nodes share no protocol version: their releases are too far apart."""

    code = "no_common_version"
    cause = "version"


class LinkLost(LinkError):
    """The connection ended while something was under way on it."""

    code = "link_lost"


class TransferError(PdserveError):
    """A KV transfer between nodes failed. `at` builds one with all details. No block of the attempt
    may be used. It does not say that remote writes have ended; a fence proves that
    (`pdserve.transfer.base`).
    """

    http_status = 503
    retryable = True
    error_type = "service_unavailable"
    code = "transfer_error"

    @classmethod
    def at(cls, transfer: str, peer: str, step: str, reason: str) -> Self:
        """Makes the error for a transfer (empty: the whole path), with a peer, in a step, for a
        reason.
        """
        subject = f"transfer {transfer} with {peer}" if transfer else f"transfers with {peer}"
        return cls(f"{subject}, {step}: {reason}")


class TransferRefused(TransferError):
    """The two ends do not fit together, or the attempt is outdated; nothing was written."""

    code = "transfer_refused"


class TransferWithdrawn(TransferError):
    """One end cancelled the transfer."""

    code = "transfer_withdrawn"


class TransferTimeout(TransferError):
    """No progress, or no answer, within the deadline."""

    code = "transfer_timeout"


class TransferCorrupt(TransferError):
    """What arrived is not what was sent: a checksum or a block's header differs."""

    code = "transfer_corrupt"


class PathLost(TransferError):
    """The path to the peer ended, or has been closed."""

    code = "path_lost"


class ActuatorError(PdserveError):
    """An actuator did not do what the planner asked for (`pdserve.planner.actuators.base`)."""

    http_status = 503
    code = "actuator_error"


class ActuatorTransient(ActuatorError):
    """The actuator did not answer, or failed in a way that passes; it may have acted."""

    retryable = True
    code = "actuator_transient"


class ActuatorDenied(ActuatorError):
    """The actuator may not do this, or does not know how; an operator has to change something."""

    http_status = 403
    code = "actuator_denied"


class ActuatorExhausted(ActuatorError):
    """The actuator has no room for another instance; `retry_after` if it knows until when."""

    retryable = True
    code = "actuator_exhausted"


class EngineError(PdserveError):
    """The engine failed while it had the request."""

    code = "engine_error"


class EngineDied(EngineError):
    """The engine's process ended while it had the request; a retry reaches its successor."""

    http_status = 503
    retryable = True
    code = "engine_died"


class EngineStalled(EngineDied):
    """The engine made no progress although it had work, and was killed."""

    code = "engine_stalled"


class StepFailed(EngineError):
    """An engine step failed that computed for this request and others; any of them may be the
    cause, so another worker may try.
    """

    http_status = 503
    retryable = True
    code = "step_failed"


def error_class(kind: str) -> type[PdserveError] | None:
    """The error class of this name, as in error records; None if this release has none."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, PdserveError) else None
