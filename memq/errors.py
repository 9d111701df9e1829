"""Every error that memq raises, grouped by what the caller does next.

There is one base, `MemqError`, and six kinds. Every concrete error descends from exactly one kind:

=====================  ==========================================================
kind                   the caller
=====================  ==========================================================
RetryableError         tries again later (unreachable, throttled, timed out, full)
InvalidRequestError    changes the input (not found, bad name, too large, unknown setting)
DeniedError            gets a permission
FencedError            stops: another process took over
OutcomeUnknownError    checks whether it happened
CorruptDataError       reports: stored or sent bytes are damaged
=====================  ==========================================================

`code` is stable text, also on the wire; `hint` says what to do. Messages are lowercase,
without a final dot, and carry the values.
"""

from __future__ import annotations

from typing import ClassVar

from memq.redaction import redacted


class MemqError(Exception):
    """Base of all errors of memq."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(redacted(message))
        self.hint = redacted(hint or self.default_hint)
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # tracebacks show it
        self.retry_after_ms = retry_after_ms


# ---- kinds -----------------------------------------------------------------------------------


class RetryableError(MemqError):
    """Try again later: nothing is wrong with the request."""

    code = "retryable"
    default_hint = "try again later"


class InvalidRequestError(MemqError):
    """Change the request: it can't succeed as it is."""

    code = "invalid-request"
    default_hint = "correct the request"


class DeniedError(MemqError):
    """The caller lacks a permission."""

    code = "denied"
    default_hint = "ask for the permission that the message names"


class UntrustedStoreError(DeniedError):
    """A broker names a store to which the client's configuration sends no keys."""

    code = "untrusted-store"
    default_hint = "name its endpoint in [s3] if it is right"


class KeyMissingError(DeniedError):
    """Content is encrypted, and this client has no key for it, or another key of that id."""

    code = "key-missing"
    default_hint = "pass encryption= (--encryption) with the key that the message names; see docs/encryption.md"


class NotEncryptedError(DeniedError):
    """A block is plain, and this client reads encrypted blocks only: a stranger may have made it."""

    code = "not-encrypted"
    default_hint = "if the topic also has plain records: plain_blocks='allow' (--plain-blocks allow)"


class FencedError(MemqError):
    """Stop: another owner, member or instance took over."""

    code = "fenced"
    default_hint = "stop; another owner, member or instance took over"


class OutcomeUnknownError(MemqError):
    """It may or may not have happened: check before doing it again."""

    code = "outcome-unknown"
    default_hint = "check whether it happened before doing it again"


class CorruptDataError(MemqError):
    """Stored or sent bytes are damaged. The message names the damaged part and the cause."""

    code = "corrupt-data"
    default_hint = "run memq verify on the object; the data are damaged, not merely newer"


# ---- retryable -------------------------------------------------------------------------------


class UnreachableError(RetryableError):
    """A broker, store or queue can't be reached."""

    code = "unreachable"
    default_hint = "check the address and that the server runs"
    foreign = False  # True: a server of another protocol answered, so the address is wrong
    refused = False  # True: the host answered that no process listens at the port; no time-out, and no reset


class TimedOutError(RetryableError):
    """No answer arrived within the requested time."""

    code = "timed-out"
    default_hint = "try again with a longer timeout"


class ThrottledError(RetryableError):
    """The other side is over its capacity: back off for `retry_after_ms`."""

    code = "throttled"
    default_hint = "send slower, or raise the broker's memory_bytes_max"


class OverLimitError(RetryableError):
    """A topic, a client or a principal exceeds its limit. Try again after `retry_after_ms`."""

    code = "over-limit"
    default_hint = "wait for the time in the message, send less, or raise the limit"


class NotReadyError(RetryableError):
    """The partition, broker or store is being opened: wait."""

    code = "not-ready"
    default_hint = "wait; the partition is being opened"


class QueueFullError(RetryableError):
    """A shard of queues has as many items as it may have. Nothing was enqueued."""

    code = "queue-full"
    default_hint = "wait until workers have acked items, or add workers"


class LogLostError(NotReadyError):
    """The queue has lost the log of a partition whose batches the store has. It stays closed."""

    code = "log-lost"
    default_hint = "the queue has lost the log: stop the brokers and rebuild it with memq restore"


class DrainingError(RetryableError):
    """The broker is draining and accepts no new blocks."""

    code = "draining"
    default_hint = "use another broker, or wait until this one has started again"


class BufferFullError(RetryableError):
    """The client's own buffer is full and the caller chose not to wait."""

    code = "buffer-full"
    default_hint = "send slower, raise pending_bytes_max, or use when_full='block'"


class MovedError(RetryableError):
    """Another broker owns the partition. Its address is `address`, or, if that is empty, in the metadata."""

    code = "moved"
    default_hint = "refresh the metadata and connect to the broker that it names"
    address = ""


class DamagedMessageError(RetryableError):
    """A message between client and broker does not match its checksum."""

    code = "damaged-message"
    default_hint = "try again; if it repeats, check memory, network and proxies between client and broker"


class StoreError(RetryableError):
    """The object store failed in a way that may pass."""

    code = "store-failed"
    default_hint = "check the object store; a broker or client that runs tries again by itself"


class QueueError(RetryableError):
    """The notification queue failed in a way that may pass."""

    code = "queue-failed"
    default_hint = "check the notification queue; a broker or client that runs tries again by itself"


class LogCutError(QueueError):
    """The queue's log ends before entries that this process has read or written: it was cut, or replaced."""

    code = "log-cut"
    default_hint = "restart the broker, which accepts the log as it is; see docs/recovery.md"


class QueueRefusedError(RetryableError):
    """The queue refused a pointer as too old. Refused does not mean absent: read before repeating."""

    code = "queue-refused"
    default_hint = "read the queue to its end, then publish again with a new proof"


class SpoolError(RetryableError):
    """The broker can't write a block to its disk, as `ack1 = "disk"` requires: the block is refused."""

    code = "spool-failed"
    default_hint = "check the broker's disk and its settings spool and spool_bytes_max; acks=all continues"


class KeyProviderError(RetryableError):
    """A key provider failed in a way that may pass. Nothing was sent in plain, or skipped."""

    code = "key-provider-failed"
    default_hint = "check the key provider: its file, or the key service and the rights of this process there"


class AuditStateError(RetryableError):
    """The database of the live audit failed. Nothing was stored, and the auditor tries again."""

    code = "audit-state-failed"
    default_hint = "check the database that the setting audit_state names; the verdicts wait for it"


class VersionConflictError(RetryableError):
    """A compare-and-set lost against another writer: read again, then decide."""

    code = "version-conflict"
    default_hint = "read the current version and try again"


# ---- invalid request -------------------------------------------------------------------------


class NotFoundError(InvalidRequestError):
    """The topic, group, object or partition does not exist."""

    code = "not-found"
    default_hint = "check the name; memq topic list shows the topics"


class PositionExpiredError(InvalidRequestError):
    """Retention removed the record at a position of `topic`; `first` is the first left (`0:17:0`)."""

    code = "position-expired"
    default_hint = "continue at 'beginning', or at the position that the message names"
    topic = ""
    first = ""


class AlreadyAckedError(InvalidRequestError):
    """The item of a queue was acked before, under the same lease. It does not come again."""

    code = "already-acked"
    default_hint = "ack each item once"


class ItemEndedError(InvalidRequestError):
    """A queue item has ended without an ack: it expired, was cancelled, or has had all its attempts."""

    code = "item-ended"
    default_hint = "drop the result; the item does not come again"


class PositionLostError(InvalidRequestError):
    """The log of `topic` was cut before a position: a reader there would skip new records, or wait."""

    code = "position-lost"
    default_hint = "set the group to a time before the loss with memq group reset, or seek; see docs/recovery.md"
    topic = ""


class AlreadyExistsError(InvalidRequestError):
    """Something of that name exists already."""

    code = "already-exists"
    default_hint = "choose another name, or pass exist_ok (--exist-ok)"


class ObjectExistsError(InvalidRequestError):
    """Another object has this key: put-if-absent found different bytes."""

    code = "object-exists"
    default_hint = "keys are never used twice; find the writer of the object"


class InvalidNameError(InvalidRequestError):
    """A topic, group, cluster or broker name breaks the grammar, or is one of memq's own."""

    code = "invalid-name"
    default_hint = "use 1 to 249 of A-Z a-z 0-9 . _ -, neither '.' nor '..', not starting with '_memq'"


class TopicSealedError(InvalidRequestError):
    """An operator has sealed the topic: it takes no more records."""

    code = "topic-sealed"
    default_hint = "write to another topic; memq topic unseal lets this one take records again"


class TooLargeError(InvalidRequestError):
    """A record, block, frame or request is over its bound."""

    code = "too-large"
    default_hint = "make it smaller, or raise the bound that the message names"


class UnknownSettingError(InvalidRequestError):
    """A setting of this name does not exist."""

    code = "unknown-setting"
    default_hint = "check the spelling; memq config lists the settings"


class InvalidSettingError(InvalidRequestError):
    """A setting has a value that is not allowed, alone or together with others."""

    code = "invalid-setting"
    default_hint = "choose an allowed value"


class InvalidFilterError(InvalidRequestError):
    """A filter of records can't be read."""

    code = "invalid-filter"
    default_hint = "see docs/filters.md for what tags and where may contain"


class UnsupportedFormatError(InvalidRequestError):
    """The bytes are of a newer version, codec, flag or kind: not damage, never skipped."""

    code = "unsupported-format"
    default_hint = "upgrade memq: the data were written by a newer version"


class UnsupportedVersionError(InvalidRequestError):
    """The two sides share no protocol version."""

    code = "unsupported-version"
    default_hint = "upgrade the older side"


class ProtocolError(InvalidRequestError):
    """The peer broke the protocol; the connection is closed."""

    code = "protocol"
    default_hint = "connect with a memq client; this port speaks memq's own protocol only"


class ForeignProtocolError(ProtocolError):
    """The first bytes of a connection are those of another protocol."""

    code = "foreign-protocol"
    default_hint = "connect with a memq client; health and metrics are on http_port, the dashboard is on dashboard_port"


class OutOfSequenceError(InvalidRequestError):
    """A block does not continue the sequences of its stream; the stream is closed."""

    code = "out-of-sequence"
    default_hint = "open the stream again from the oldest unacked block"


class IdentityConflictError(InvalidRequestError):
    """A block or staged batch is refused: other content, or unknown content, has its identity."""

    code = "identity-conflict"
    default_hint = "send the records again under another producer id; look for two writers that share one identity"


class TransactionAbortedError(InvalidRequestError):
    """The transaction was rolled back: no record of it is or will be visible, and no position has moved."""

    code = "transaction-aborted"
    default_hint = "begin a new transaction, and send the records again"


class TransactionCommittedError(InvalidRequestError):
    """A transaction that was to be rolled back is committed: an operator or an earlier try committed it."""

    code = "transaction-committed"
    default_hint = "do not send the records again: readers get those that were held"


class TooOldError(InvalidRequestError):
    """A block was first sent longer ago than the delivery timeout, or a staged batch is too old."""

    code = "too-old"
    default_hint = "do not send the block again; its outcome is unknown"


class ClosedError(InvalidRequestError):
    """The producer, consumer or connection was closed already."""

    code = "closed"
    default_hint = "open a new one"


class ForkedError(InvalidRequestError):
    """A client created before fork() was used in the child."""

    code = "forked"
    default_hint = "create the client after fork(), in the process that uses it"


# ---- fenced ----------------------------------------------------------------------------------


class LeaseLostError(FencedError):
    """The lease of a queue item is over, and another worker may have the item."""

    code = "lease-lost"
    default_hint = "stop the work on this item, or ask for longer leases and extend them in time"


class EpochFencedError(FencedError):
    """A higher epoch of the partition was opened."""

    code = "epoch-fenced"
    default_hint = "open the partition again, or leave it to its new owner"


class ProducerFencedError(FencedError):
    """A newer instance of the producer has started, with its name or transactional id: it may not send."""

    code = "producer-fenced"
    default_hint = "stop this instance; two that run at once need two names, or transactional ids"


class TermFencedError(FencedError):
    """Another governor was elected: this one may not change assignments."""

    code = "term-fenced"
    default_hint = "nothing to do; the governor of the newer term continues"


class GenerationFencedError(FencedError):
    """The member's group generation is stale: its partitions were given to others."""

    code = "generation-fenced"
    default_hint = "join the group again; uncommitted batches go to the new member"


KINDS: tuple[type[MemqError], ...] = (
    RetryableError,
    InvalidRequestError,
    DeniedError,
    FencedError,
    OutcomeUnknownError,
    CorruptDataError,
)


def kind_of(error: type[MemqError]) -> type[MemqError]:
    """Return the one kind that `error` descends from."""
    kinds = [kind for kind in KINDS if issubclass(error, kind)]
    assert len(kinds) == 1, f"{error.__name__} has {len(kinds)} kinds"
    return kinds[0]


def all_errors() -> list[type[MemqError]]:
    """Return every error class of memq, kinds first, in the order of definition."""
    found: list[type[MemqError]] = []
    todo: list[type[MemqError]] = list(KINDS)
    while todo:
        error = todo.pop(0)
        found.append(error)
        todo.extend(error.__subclasses__())
    return found


def error_from_wire(code: str, kind: str, text: str, retry_after_ms: int = 0, hint: str = "") -> MemqError:
    """Build the error that a peer named; an unknown `code` falls back to its kind."""
    for error in all_errors():
        if error.code == code:
            return error(text, hint=hint, retry_after_ms=retry_after_ms)
    for error in KINDS:
        if error.code == kind:
            return error(text, hint=hint, retry_after_ms=retry_after_ms)
    return RetryableError(f"{code}: {text}", hint=hint, retry_after_ms=retry_after_ms)
