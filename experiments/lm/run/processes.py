"""Several processes, on one host or many, as one training: how they meet, part, and notice that one is lost.

Every process runs the same command and holds the devices of its host. JAX's runtime ends a process whose peer is
missing by a stack trace, and a collective whose peer died may wait for minutes. So the processes meet over a connection
of their own first, each with the first one, and keep it: a peer that does not come, or is lost, is one sentence. (JAX's
coordinator lives in the first process, and whoever loses that one may hear of it from JAX first.)
"""

import atexit
import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from experiments.lm.errors import UsageError

WAIT_SECONDS = 30
_LOST_SECONDS = 30
_NOTICE_SECONDS = 1
_ANSWER_SECONDS = 5
_LONGEST_GREETING = 100
# The last word on a connection.
_ENDED_WELL, _FAILED = b".", b"!"
# Where a launcher tells a process how many there are and which one it is: SLURM, Open MPI, MPICH and Intel MPI.
_LAUNCHERS = (
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a run.

    Attributes:
        host: that of the first process.
        port: where JAX's coordinator listens there; the processes meet at the next one.
        size: how many processes there are.
        index: which one this is, from 0.
    """

    host: str
    port: int
    size: int
    index: int


def read_group(
    coordinator: str | None, size: int | None, index: int | None, environment: Mapping[str, str]
) -> Group | None:
    """The processes that the command line names, with the launcher's word where it is silent; None for one alone.

    Raises:
        UsageError: if something is missing or impossible.
    """
    if coordinator is None:
        if size is not None or index is not None:
            raise UsageError("--num-processes and --process-id need --coordinator HOST:PORT, the first process's")
        return None
    host, colon, port = coordinator.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
        raise UsageError(f"--coordinator is {coordinator!r}; it must be HOST:PORT, for instance node1:12345")
    for size_name, index_name in _LAUNCHERS:
        if size is None and index is None and size_name in environment and index_name in environment:
            size, index = int(environment[size_name]), int(environment[index_name])
    if size is None or index is None:
        raise UsageError("--coordinator needs --num-processes and --process-id where neither SLURM nor MPI sets them")
    if not 0 <= index < size:
        raise UsageError(f"--process-id is {index}; of {size} processes it must be in 0..{size - 1}")
    return Group(host, int(port), size, index)


class Membership:
    """This process's connections to the others; `leave` ends them."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self._peers = peers
        self._leaving = threading.Event()
        for peer, connection in peers.items():
            threading.Thread(target=self._watch, args=(peer, connection), daemon=True).start()

    def _watch(self, peer: int, connection: socket.socket) -> None:
        try:
            word = connection.recv(1)
        except OSError:
            word = b""
        # A peer that failed has said why, and this process may be about to say the same. One that is lost says nothing,
        # and the sooner that is said here the better: JAX would abort at length.
        grace = _NOTICE_SECONDS if word == _FAILED else 0
        if word == _ENDED_WELL or self._leaving.wait(grace):
            return
        what = "failed" if word == _FAILED else "was lost"
        # The main thread may be inside a collective that will never end, and cannot be asked. It may also have
        # redirected what is printed, or left a line unfinished.
        print(f"\nerror: process {peer} {what}, so this one cannot go on; see its output", file=sys.__stderr__)
        self._end(_FAILED)
        if len(self._peers) > 1:
            time.sleep(2 * _NOTICE_SECONDS)  # JAX's coordinator is here, and would take the others along at length.
        _exit_now(1)

    def leave(self) -> None:
        """Ends the membership where all processes have come to the end."""
        self._end(_ENDED_WELL)

    def break_off(self, exit_code: int, expected: bool) -> None:
        """Ends it where this process has failed; the others notice and end, too.

        Args:
            exit_code: what the process ends with.
            expected: whether the reason is known. Otherwise it may be a collective that failed because a peer is lost,
                which is noticed in a moment and is the better thing to say.
        """
        if not expected:
            time.sleep(4 * _NOTICE_SECONDS)
        self._end(_FAILED)
        # JAX's own way out, which would run next, waits for the others.
        atexit.register(_exit_now, exit_code)

    def _end(self, word: bytes) -> None:
        self._leaving.set()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(word)
                connection.shutdown(socket.SHUT_WR)


def _exit_now(exit_code: int) -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


def join(group: Group) -> Membership:
    """Meets the other processes and starts JAX's distributed runtime with them; before JAX itself starts.

    Raises:
        UsageError: if they do not meet within `WAIT_SECONDS`, or disagree on how many they are.
    """
    membership = Membership(_meet_as_first(group) if group.index == 0 else _meet_first(group))
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM, which asks this program to stop.
    jax.distributed.initialize(
        f"{group.host}:{group.port}",
        group.size,
        group.index,
        initialization_timeout=WAIT_SECONDS,
        heartbeat_timeout_seconds=_LOST_SECONDS,
        shutdown_timeout_seconds=_LOST_SECONDS,
    )
    return membership


def _meet_as_first(group: Group) -> dict[int, socket.socket]:
    deadline = time.monotonic() + WAIT_SECONDS
    peers: dict[int, socket.socket] = {}
    _listen(group.port).close()  # JAX would say that it is taken at length.
    with _listen(group.port + 1) as server:
        while len(peers) < group.size - 1:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, group.size) if i not in peers)
                raise UsageError(
                    f"process {missing} of {group.size} did not come within {WAIT_SECONDS} s; start one for each "
                    f"--process-id in 0..{group.size - 1}, with --coordinator {group.host}:{group.port}"
                ) from None
            try:
                connection.settimeout(_ANSWER_SECONDS)
                with connection.makefile() as lines:
                    size, index = (int(word) for word in lines.readline(_LONGEST_GREETING).split())
            except (OSError, ValueError):
                connection.close()  # Not one of us.
                continue
            wrong = None
            if size != group.size:
                wrong = f"process {index} was started with --num-processes {size}, process 0 with {group.size}"
            elif index in peers or index == 0:
                wrong = f"two processes were started with --process-id {index}"
            if wrong:
                _tell(connection, wrong)
                raise UsageError(wrong)
            peers[index] = connection
    for connection in peers.values():
        _tell(connection, "")
        _keep(connection)
    return peers


def _meet_first(group: Group) -> dict[int, socket.socket]:
    deadline = time.monotonic() + WAIT_SECONDS
    where = f"{group.host}:{group.port + 1}"
    answer = ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise UsageError(
                f"process 0 did not answer at {where} within {WAIT_SECONDS} s, or its other processes did not come; "
                "check --coordinator, and that the port and the next one are open"
            )
        try:
            connection = socket.create_connection((group.host, group.port + 1), timeout=left)
            connection.settimeout(math.ceil(left) + 1)  # Process 0 may have started later, and waits as long.
            connection.sendall(f"{group.size} {group.index}\n".encode())
            with connection.makefile() as lines:
                answer = lines.readline()
        except OSError:
            time.sleep(0.2)
            continue
        if answer == "\n":
            _keep(connection)
            return {0: connection}
        if answer:
            raise UsageError(answer.strip())
        raise UsageError(f"process 0 at {where} ended before the run began; see its output")


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used here ({os.strerror(error.errno or 0)}); --coordinator needs a port that is "
            "free, and the next one, too"
        ) from None


def _tell(connection: socket.socket, text: str) -> None:
    connection.sendall(f"{text}\n".encode())


def _keep(connection: socket.socket) -> None:
    """Makes the system notice within half a minute when the other host is gone without a word."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    import jax

    return jax.process_index() == 0


def by_first(function: Callable[[], str]) -> str:
    """What `function` returns, called by the first process only.

    Raises:
        UsageError: in all processes, if the function raised it.
    """
    import jax

    if jax.process_count() == 1:
        return function()
    text, failed = "", False
    if is_first():
        try:
            text = function()
        except UsageError as error:
            text, failed = str(error), True
    told = _from_first([int(failed), *text.encode()])
    text = bytes(told[1:]).decode()
    if told[0]:
        raise UsageError(text)
    return text


def largest(value: int) -> int:
    """The largest of the processes' values."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def _from_first(numbers: list[int]) -> list[int]:
    """Small numbers that the first process holds, of any count."""
    import numpy as np
    from jax.experimental import multihost_utils

    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    mine = np.resize(np.array(numbers, np.int32), count)
    return [int(number) for number in multihost_utils.broadcast_one_to_all(mine)]


@contextlib.contextmanager
def quiet_unless_first(group: Group | None) -> Iterator[None]:
    """Nothing that the other processes print within the block is seen: it would be the same words again."""
    if group is None or group.index == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
