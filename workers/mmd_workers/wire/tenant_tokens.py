"""Totals of tenants' tokens per day, over all gateways of a deployment. Independent of tenants and of limits.

A JetStream stream has one message for each tenant and day. The last message is the total. A writer names the message that it has
read, so of two that add at once, one is refused and reads again.
"""

from __future__ import annotations

from dataclasses import dataclass

from nats import errors as nats_errors
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.manager import JetStreamManager

from mmd_api.contract.errors import PeerLostError
from mmd_workers.wire.bus import Bus

KEPT_SECONDS = 2 * 86_400.0
MAX_STREAM_BYTES = 4 << 20
_SECONDS = 3.0
_NAME_IN_USE = 10058
_WRONG_LAST_SEQUENCE = 10071
_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """A total, and the sequence number of its message; 0: there is none."""

    total: int = 0
    sequence: int = 0


class TokenRecords:
    """The stream of one deployment, shared by all its pipeline revisions."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = bus.subjects.tokens_stream
        self._manager = JetStreamManager(bus.client, timeout=_SECONDS)
        self._publisher = JetStreamContext(bus.client, timeout=_SECONDS)

    async def ensure(self) -> None:
        """Create the stream, or set its replicas to the number of the bus. Any number of gateways may call it at once.

        Raises:
            PeerLostError: the server has no JetStream or does not answer.
        """
        config = api.StreamConfig(
            name=self._stream,
            subjects=[self._bus.subjects.tenant_tokens("*", "*")],
            max_msgs_per_subject=1,
            max_bytes=MAX_STREAM_BYTES,
            max_age=KEPT_SECONDS,
            storage=api.StorageType.FILE,
            num_replicas=self._bus.stream_replicas,
        )
        try:
            try:
                await self._manager.add_stream(config)
            except js_errors.BadRequestError as error:
                if error.err_code != _NAME_IN_USE:
                    raise
                await self._manager.update_stream(config)
        except (nats_errors.Error, TimeoutError) as error:
            raise self._lost("create", error) from error

    async def read(self, day: int, tenant: str) -> RecordedTokens:
        """Read the total of a tenant's day.

        Raises:
            PeerLostError: the total cannot be read now.
        """
        try:
            message = await self._manager.get_last_msg(
                self._stream, self._bus.subjects.tenant_tokens(day, tenant)
            )
        except js_errors.NotFoundError as error:
            if error.err_code == 10037:  # no message; any other code: no stream
                return RecordedTokens()
            raise self._lost("read", error) from error
        except (nats_errors.Error, TimeoutError) as error:
            raise self._lost("read", error) from error
        text = (message.data or b"").decode(errors="replace")
        total = int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0
        return RecordedTokens(total, message.seq or 0)

    async def write(self, day: int, tenant: str, total: int, read: RecordedTokens) -> bool:
        """Replace the total that was read. False: another gateway has done so meanwhile.

        Raises:
            PeerLostError: the server did not confirm. It may have the new total.
        """
        subject = self._bus.subjects.tenant_tokens(day, tenant)
        expected = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(read.sequence)}
        try:
            await self._publisher.publish(
                subject, str(total).encode(), timeout=_SECONDS, stream=self._stream, headers=expected
            )
        except js_errors.BadRequestError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                return False
            raise self._lost("write", error) from error
        except (nats_errors.Error, TimeoutError) as error:
            raise self._lost("write", error) from error
        return True

    def _lost(self, verb: str, error: Exception) -> PeerLostError:
        return PeerLostError(
            f"cannot {verb} the tokens of tenants in {self._stream}: {type(error).__name__} {error}; check that JetStream is enabled on the "
            "NATS server"
        )
