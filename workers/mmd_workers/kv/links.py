"""The KV links of a worker: one per pair of worker incarnations, made on demand, never repaired but replaced at the next epoch.

It is independent of NATS and leases. The two sides agree on an epoch elsewhere (KvOffer, KvGrant) and then both call `connect`;
the side whose (pod, incarnation) sorts first is rank 0, which the other one calls, so simultaneous calls meet.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from mmd_api.contract.errors import LinkError, OverloadedError
from mmd_api.spec.transfer import KvBackend
from mmd_workers.kv import nccl, nixl, rendezvous, sentinel
from mmd_workers.kv.gloo import GlooLink
from mmd_workers.kv.link import PIECE_BYTES

log = logging.getLogger(__name__)

MAX_KNOWN_PEERS = 4096
MAX_RETIRED_INCARNATIONS = 16
MAX_TAG = 2**30
MAX_GIVEN_UP = 4
"""Limit of abandoned attempts with one peer whose threads go on; beyond it no further attempt is made."""

_CLOSE_SECONDS = 1.0
_OFFER_AGAIN = "link the pair again at the next epoch"


class Channel(Protocol):
    """What a backend provides for one pair: a `KvLink` that can be aborted from another thread."""

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """See `KvLink.send`."""
        ...

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """See `KvLink.recv`."""
        ...

    def abort(self, reason: str) -> None:
        """End operations in flight as far as the backend can; never blocks."""
        ...

    def close(self) -> None:
        """Free the pair; idempotent."""
        ...


class PairLink:
    """The link with one peer incarnation at one epoch; a `KvLink`. The first error kills it permanently.

    A role that uses the link for several chunks does so inside `with link.held():`; otherwise the link may be evicted in between.
    """

    def __init__(
        self,
        peer: str,
        epoch: int,
        device: torch.device,
        channel: Channel,
        sentinel_socket: socket.socket,
        on_dead: Callable[[str], None],
    ) -> None:
        self.peer = peer
        self.epoch = epoch
        self.device = device
        self.sentinel = sentinel_socket
        self._channel = channel
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._users = 0
        self._next_tag = 0
        self._dead = ""

    @property
    def dead(self) -> str:
        """Why the link is dead; empty while it lives."""
        return self._dead

    @property
    def in_use(self) -> bool:
        """Whether an operation or a `held` block is in progress."""
        return self._users > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the link from eviction. Raises LinkError if it is already dead."""
        with self._lock:
            if self._dead:
                raise LinkError(
                    f"link to {self.peer} at epoch {self.epoch} is dead: {self._dead}; connect at the next epoch"
                )
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def reserve_tags(self, count: int) -> int:
        """Reserve `count` tags on this link for one transfer of this sender; returns the first, for `KvChunk.first_tag`."""
        with self._lock:
            if self._next_tag + count > MAX_TAG:
                self._next_tag = 0
            first = self._next_tag
            self._next_tag += count
            return first

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send one tensor of at most 4 MB; see `KvLink.send`."""
        self._run(self._channel.send, tensor, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive one tensor of at most 4 MB; see `KvLink.recv`."""
        self._run(self._channel.recv, tensor, tag)

    def close(self) -> None:
        """Close the link on both sides; idempotent. The pair's next link has the next epoch."""
        self._on_dead("the link was closed")

    def kill(self, reason: str) -> threading.Thread | None:
        """Release those who wait on the link, as far as the backend can, and refuse further operations; for the manager.

        Never blocks: the returned thread frees what the backend holds. If no thread can be started, that happens here, for a second at
        most, and None is returned.
        """
        with self._lock:
            self._dead = self._dead or reason
        with suppress(OSError):  # the socket is closed nevertheless
            self.sentinel.close()
        try:
            self._channel.abort(reason)
        except Exception:
            log.exception("the link to %s could not be aborted", self.peer)
        try:
            closing = threading.Thread(target=self._channel.close, name=f"kv-close-{self.peer}", daemon=True)
            closing.start()
        except (RuntimeError, MemoryError) as error:
            log.warning("closing the link to %s at once: %s", self.peer, error)
            self._channel.close()
            return None
        return closing

    def _run(self, operation: Callable[[torch.Tensor, int], None], tensor: torch.Tensor, tag: int) -> None:
        if tensor.nbytes > PIECE_BYTES or not tensor.is_contiguous():
            raise ValueError(
                f"a piece must be contiguous and have at most {PIECE_BYTES} bytes, not {tensor.nbytes}; split it with chunks.split"
            )
        if tensor.device != self.device:
            raise ValueError(
                f"the link to {self.peer} transfers tensors on {self.device}, not on {tensor.device}; allocate the tensor on {self.device}"
            )
        with self.held():
            try:
                operation(tensor, tag)
            except LinkError as error:
                self._on_dead(error.message)
                raise


def indexed(device: torch.device) -> torch.device:
    """The device as tensors report it: `cuda` becomes `cuda:0`, or whichever is the current one."""
    return torch.empty(0, device=device).device


class _Attempt(Future[PairLink]):
    """A link that is being established, then the link. Its thread may continue after the attempt was given up."""

    def __init__(self, pod: str, *, calls: bool) -> None:
        super().__init__()
        self.pod = pod
        self.given_up = threading.Event()
        self.met_at: float | None = None  # (time.monotonic)
        self.holds_device = False
        self._calls = calls
        self._store: rendezvous.PairStore | None = None

    @property
    def lingers(self) -> bool:
        """Whether its thread was given up at a point where it cannot end at once."""
        return self.given_up.is_set() and (self._calls or self.met_at is not None)

    def meet(self, store: rendezvous.PairStore) -> None:
        """Note that the peers have met."""
        self.met_at, self._store = time.monotonic(), store
        if self.given_up.is_set():
            store.abort()

    def give_up(self, reason: str) -> None:
        """Release those who wait for the link, and end the exchange with the peer."""
        self.given_up.set()
        if (store := self._store) is not None:
            store.abort()
        self.set_exception(LinkError(f"{reason}; {_OFFER_AGAIN}"))


@dataclass(slots=True)
class _Peer:
    """The record of one pod: its incarnation, its newest failed epoch, and the link (or attempt) at the next one."""

    pod: str
    incarnation: str
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_RETIRED_INCARNATIONS))
    failed_epoch: int = -1
    attempt: _Attempt | None = None

    @property
    def link(self) -> PairLink | None:
        attempt = self.attempt
        if attempt is None or not attempt.done() or attempt.cancelled() or attempt.exception() is not None:
            return None
        return attempt.result()


class LinkManager:
    """All KV links of one worker process. Thread-safe; `connect` blocks, everything else returns at once."""

    def __init__(
        self,
        backend: KvBackend,
        pod: str,
        incarnation: str,
        host: str,
        device: torch.device,
        chunk_timeout_seconds: float = 2.0,
        connect_timeout_seconds: float = 5.0,
        max_links: int = 64,
    ) -> None:
        """Listen for peers on `host` alone and a free port. Links move tensors of `device` alone.

        Raises:
            BackendUnavailableError: the backend cannot run here (NCCL without a CUDA device, NIXL that is not installed).
            OSError: `host` is not an address of this machine.
        """
        if backend == "Nccl":
            nccl.check_available(device)
        elif backend == "Nixl":
            nixl.check_available(device)
        self.device = indexed(device)
        self.backend = backend
        self._self = (pod, incarnation)
        self._host = host
        self.chunk_timeout_seconds = chunk_timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._max_links = max_links
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # least recently used first
        self._connecting: set[_Attempt] = set()  # attempts whose thread goes on, even if given up
        self._dying: list[tuple[PairLink, str]] = []  # links to kill once the lock is released, with reasons
        self._closing: set[threading.Thread] = set()  # threads that free what dead links hold
        self._closed = False
        self._rendezvous = rendezvous.Rendezvous(host, connect_timeout_seconds)
        self.endpoint = self._rendezvous.endpoint
        try:
            self._watch = sentinel.Watch()
        except BaseException:
            self._rendezvous.close()
            raise

    def epoch_for(self, peer: str, peer_incarnation: str, failed_epoch: int) -> int:
        """The epoch the granting side grants: the current one, or the next after the newest that either side saw fail.

        Raises:
            LinkError: the incarnation is an earlier one of this pod.
        """
        with self._changing():
            record = self._adopt(peer, peer_incarnation)
            self._fail_up_to(record, failed_epoch, f"{peer} reported epoch {failed_epoch} as failed")
            return record.failed_epoch + 1

    def failed_epoch(self, peer: str, peer_incarnation: str) -> int:
        """Newest epoch with this peer that must not be used again (-1: none): what `KvOffer.failed_epoch` carries."""
        with self._changing():
            return self._adopt(peer, peer_incarnation).failed_epoch

    def connect(self, peer: str, peer_incarnation: str, peer_endpoint: str, epoch: int) -> PairLink:
        """The link with this peer at this epoch, made if there is none.

        Blocks for `connect_timeout_seconds` at most: call it in a thread. Both sides call it; concurrent calls share one attempt.

        Raises:
            LinkError: the peer did not come in time or was lost; an older epoch, or an earlier incarnation of the pod.
            OverloadedError: `max_links` links are all in use, `MAX_GIVEN_UP` earlier attempts with this peer have not ended, or the process
                cannot start a thread.
        """
        with self._changing():
            record = self._adopt(peer, peer_incarnation)
            if epoch <= record.failed_epoch:
                raise LinkError(
                    f"epoch {epoch} with {peer} has ended (newest failed: {record.failed_epoch}); offer again"
                )
            self._fail_up_to(record, epoch - 1, f"{peer} moved to epoch {epoch}")
            attempt = record.attempt
            if attempt is None:
                self._make_room(peer)
                attempt = _Attempt(peer, calls=self._self > (peer, peer_incarnation))
                thread = threading.Thread(
                    target=self._make,
                    args=(attempt, record, peer, peer_endpoint, epoch),
                    name=f"kv-connect-{peer}",
                    daemon=True,
                )
                try:
                    thread.start()
                except Exception as error:
                    raise OverloadedError(
                        f"no thread to link with {peer}: {error}; try another worker, or retry later"
                    ) from error
                record.attempt = attempt  # the thread reads neither without the lock
                self._connecting.add(attempt)
        try:
            return attempt.result(self._connect_timeout_seconds)
        except FutureTimeoutError:
            reason = f"no link to {peer} at {peer_endpoint} within {self._connect_timeout_seconds} s"
            with self._changing():
                self._fail_up_to(record, epoch, reason)
            raise LinkError(f"{reason}; {_OFFER_AGAIN}") from None

    def notify_lost(self, peer: str) -> None:
        """The peer is lost: kill its link and release its waiters, as far as the backend can."""
        self._end(peer, f"{peer} was reported lost")

    def drop(self, peer: str) -> None:
        """Close the link with this peer, if there is one; the next one has the next epoch."""
        self._end(peer, f"the link to {peer} was dropped")

    def close(self) -> None:
        """Close all links, waiting at most a second for what their backends hold; idempotent. Call it in a thread."""
        with self._changing():
            self._closed = True
            for record in self._peers.values():
                self._fail_up_to(record, record.failed_epoch + 1, "this worker closed its links")
            self._peers.clear()
        self._rendezvous.close()
        self._watch.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._lock:
            closing = list(self._closing)
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def live_links(self) -> int:
        """The number of links that are made or being made."""
        with self._lock:
            return sum(record.attempt is not None for record in self._peers.values())

    @property
    def connecting_seconds(self) -> float:
        """Seconds since the oldest connecting thread met its peer, even if its attempt was given up; 0 without one.

        Meeting ends at the deadline, or when the attempt is given up. The backend's connection after it need not end: gloo gives up after
        30 s at most, whatever its timeout. NCCL's initialization has no deadline, abort does not reach it, and it holds the device.
        """
        with self._lock:
            oldest = min(
                (attempt.met_at for attempt in self._connecting if attempt.met_at is not None), default=None
            )
        return 0.0 if oldest is None else time.monotonic() - oldest

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for changes that may end links: these are killed after its release, so that nobody waits for a backend."""
        try:
            with self._lock:
                yield
        finally:
            with self._lock:
                dying, self._dying = self._dying, []
                self._closing = {thread for thread in self._closing if thread.is_alive()}
            for link, reason in dying:
                try:
                    closing = link.kill(reason)
                except Exception:
                    log.exception("the link to %s could not be closed (%s)", link.peer, reason)
                    continue
                if closing is not None:
                    with self._lock:
                        self._closing.add(closing)

    def _end(self, peer: str, reason: str) -> None:
        with self._changing():
            record = self._peers.get(peer)
            if record is not None and record.attempt is not None:
                self._fail_up_to(record, record.failed_epoch + 1, reason)

    def _adopt(self, peer: str, incarnation: str) -> _Peer:
        """The record of this pod, reset when it has a new incarnation. Called inside `_changing`."""
        if self._closed:
            raise LinkError("this worker has closed its KV links; place the request elsewhere")
        record = self._peers.get(peer)
        if record is None:
            record = self._peers[peer] = _Peer(peer, incarnation)
        elif record.incarnation != incarnation:
            if incarnation in record.retired:
                raise LinkError(f"{peer} has restarted as {record.incarnation}; {incarnation} is outdated")
            self._fail_up_to(record, record.failed_epoch + 1, f"{peer} restarted")
            record.retired.append(record.incarnation)
            record = self._peers[peer] = _Peer(peer, incarnation, record.retired)
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_KNOWN_PEERS:
            idle = next(
                (name for name, other in self._peers.items() if other.attempt is None and name != peer), None
            )
            if idle is not None:
                del self._peers[idle]
        return record

    def _fail_up_to(self, record: _Peer, epoch: int, reason: str) -> None:
        """End all epochs up to `epoch`. Called inside `_changing`."""
        if epoch <= record.failed_epoch:
            return
        record.failed_epoch = epoch
        attempt, link = record.attempt, record.link
        record.attempt = None
        if link is not None:
            self._watch.remove(link.sentinel)
            self._dying.append((link, reason))
        elif attempt is not None and not attempt.done():
            attempt.give_up(reason)
            self._rendezvous.look_again()

    def _make_room(self, peer: str) -> None:
        """Evict the least recently used idle link if there are too many links. Called inside `_changing`.

        An attempt that was given up takes room only while it holds the device, and no link is evicted for it. A peer may have at most
        `MAX_GIVEN_UP` attempts whose threads cannot be ended.
        """
        lingering = [attempt for attempt in self._connecting if attempt.lingers]
        if sum(attempt.pod == peer for attempt in lingering) >= MAX_GIVEN_UP:
            raise OverloadedError(
                f"{MAX_GIVEN_UP} earlier attempts to link with {peer} have not ended; try another worker, or retry later"
            )
        linked = [record for record in self._peers.values() if record.attempt is not None]
        if len(linked) + sum(attempt.holds_device for attempt in lingering) < self._max_links:
            return
        for record in linked if len(linked) >= self._max_links else ():
            if record.link is not None and not record.link.in_use:
                self._fail_up_to(record, record.failed_epoch + 1, "the idle link was evicted")
                return
        raise OverloadedError(
            f"all {self._max_links} KV links are in use; try another worker, or retry later"
        )

    def _make(self, attempt: _Attempt, record: _Peer, peer: str, peer_endpoint: str, epoch: int) -> None:
        """Body of a connecting thread: make the channel and settle the attempt, unless it was given up meanwhile."""
        try:
            self._settle(attempt, record, peer, peer_endpoint, epoch)
        finally:
            with self._lock:
                self._connecting.discard(attempt)

    def _settle(self, attempt: _Attempt, record: _Peer, peer: str, peer_endpoint: str, epoch: int) -> None:
        try:
            channel, sock = self._make_channel(attempt, (peer, record.incarnation), peer_endpoint, epoch)
        except Exception as error:
            reason = f"no link to {peer} at {peer_endpoint}: {str(error).strip()[:300]}"
            if not isinstance(error, LinkError):
                log.exception("%s", reason)
            with self._changing():
                self._connecting.discard(attempt)
                if record.attempt is attempt:
                    self._fail_up_to(record, epoch, reason)
            return
        on_dead = partial(self._on_dead, record, epoch)
        link = PairLink(peer, epoch, self.device, channel, sock, on_dead)
        with self._changing():
            self._connecting.discard(attempt)
            if record.attempt is not attempt:
                self._dying.append((link, "abandoned while connecting"))
                return
            try:
                self._watch.add(
                    sock, partial(self._on_dead, record, epoch, f"{peer} closed the link or died")
                )
            except Exception as error:
                log.exception("the link to %s cannot be watched", peer)
                reason = f"no link to {peer} at {peer_endpoint}: it cannot be watched ({error})"
                self._dying.append((link, reason))
                self._fail_up_to(record, epoch, reason)
            else:
                attempt.set_result(link)

    def _name(self, peer: tuple[str, str], epoch: int) -> str:
        """The name of a link, the same on both sides."""
        first, second = sorted((self._self, peer))
        return "/".join(("kv", self.backend, *first, *second, str(epoch)))

    def _make_channel(
        self, attempt: _Attempt, peer: tuple[str, str], peer_endpoint: str, epoch: int
    ) -> tuple[Channel, socket.socket]:
        """The backend's channel at this epoch and the sentinel connection next to it."""
        deadline = time.monotonic() + self._connect_timeout_seconds
        rank, name = 0 if self._self < peer else 1, self._name(peer, epoch)
        if rank == 0:
            connection = self._rendezvous.accept(name, deadline, attempt.given_up)
        else:
            connection = rendezvous.call(peer_endpoint, name, deadline)
        store = rendezvous.PairStore(connection, deadline)
        attempt.meet(store)
        channel: Channel | None = None
        sock: socket.socket | None = None
        try:
            channel = self._connected(attempt, store, rank, peer[0])
            sock = store.finish()
            return channel, sentinel.keep_alive(sock)
        except BaseException:
            store.close()
            if sock is not None:
                sock.close()
            if channel is not None:
                channel.close()
            raise

    def _connected(self, attempt: _Attempt, store: rendezvous.PairStore, rank: int, peer: str) -> Channel:
        seconds = self._connect_timeout_seconds
        if self.backend == "Nccl":
            store.set(f"here-{rank}", "")
            store.get(f"here-{1 - rank}")  # the next step has no deadline: not for a peer that never came
            attempt.holds_device = True
            return nccl.NcclLink(store, rank, self.device, self.chunk_timeout_seconds, seconds)
        if self.backend == "Nixl":
            name = f"{self._self[0]}-to-{peer}"
            return nixl.NixlLink(store, rank, self.device, self.chunk_timeout_seconds, seconds, name)
        return GlooLink(store, rank, self._host, self.chunk_timeout_seconds, seconds)

    def _on_dead(self, record: _Peer, epoch: int, reason: str) -> None:
        with self._changing():
            self._fail_up_to(record, epoch, reason)
