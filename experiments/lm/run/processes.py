"""Several processes, on one host or many, as one training: how they meet, and how they end.

Every process runs the same command and holds the devices of its host; `jax.distributed` lets them compute together. It
would end a process whose peers do not come, start differently or are lost by an abort and a stack trace that Python
cannot catch, so each process opens a connection to the first one beforehand and keeps it. Where nothing closes the
connection, as when a host loses its power, JAX's heartbeat ends the others.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from experiments.lm.errors import RunError, Stopped, UsageError

WAIT_SECONDS = 30
_LOST_SECONDS = 30
_ANSWER_SECONDS = 5
_NOTICE_SECONDS = 1
_ENDED_WELL = b"."
_LONGEST_LINE = 1000
_LONGEST_BROADCAST = 1 << 16
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


@contextlib.contextmanager
def joined(group: Group | None) -> Iterator[None]:
    """Within the block the processes compute together; only the first one prints. None: this one is alone.

    Entered before JAX starts. Where the block fails in one process, the others end, too.

    Raises:
        UsageError: if they do not meet within `WAIT_SECONDS`, or disagree on how many they are.
    """
    if group is None:
        yield
        return
    peers = _meet_as_first(group) if group.index == 0 else _meet_first(group)
    for peer, connection in peers.items():
        threading.Thread(target=_watch, args=(peer, connection), daemon=True).start()
    _start_jax(group)
    try:
        with contextlib.ExitStack() as stack:
            if group.index:  # It would be the same words again.
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield
    except Stopped:  # All processes stop after the same step.
        _end_well(peers)
        raise
    except (UsageError, RunError) as error:
        atexit.register(_exit_now, error.exit_code)
        raise
    except Exception as error:
        atexit.register(_exit_now, RunError.exit_code)
        why = f"{type(error).__name__}: {str(error).partition('\n')[0][:200]}"
        raise RunError(
            f"process {group.index} cannot go on ({why}); where another failed or was lost, see its output"
        ) from error
    except BaseException:
        atexit.register(_exit_now, 130)
        raise
    else:
        _end_well(peers)


def _start_jax(group: Group) -> None:
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


def _end_well(peers: dict[int, socket.socket]) -> None:
    for connection in peers.values():
        with contextlib.suppress(OSError):
            connection.sendall(_ENDED_WELL)


def _watch(peer: int, connection: socket.socket) -> None:
    """Ends this process soon after a peer that has not ended well, unless it ends by itself for the same reason."""
    with contextlib.suppress(OSError):
        if connection.recv(1) == _ENDED_WELL:
            return
    time.sleep(_NOTICE_SECONDS)
    # The main thread may be inside a collective that will never end, and may have redirected what is printed.
    print(f"\nerror: process {peer} failed or was lost, so this one cannot go on; see its output", file=sys.__stderr__)
    _exit_now(1)


def _exit_now(exit_code: int) -> None:
    """Ends the process before JAX's own way out, which waits for the others."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


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
                size, index = map(int, _line(connection, _ANSWER_SECONDS).split())
            except (OSError, ValueError):
                connection.close()  # Not one of us.
                continue
            wrong = ""
            if size != group.size:
                wrong = f"process {index} was started with --num-processes {size}, process 0 with {group.size}"
            elif index in peers or index == 0:
                wrong = f"two processes were started with --process-id {index}"
            if wrong:
                connection.sendall(f"{wrong}\n".encode())
                raise UsageError(wrong)
            peers[index] = connection
    for connection in peers.values():
        connection.sendall(b"\n")
    return peers


def _meet_first(group: Group) -> dict[int, socket.socket]:
    deadline = time.monotonic() + WAIT_SECONDS
    address = (group.host, group.port + 1)
    where = f"{group.host}:{group.port + 1}"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
            connection.sendall(f"{group.size} {group.index}\n".encode())
            answer = _line(connection, left + 1)  # Process 0 may have started later, and waits as long.
        except OSError:
            time.sleep(0.2)
            continue
        if answer == "\n":
            return {0: connection}
        raise UsageError(answer.strip() or f"process 0 at {where} ended before the run began; see its output")
    raise UsageError(
        f"process 0 did not answer at {where} within {WAIT_SECONDS} s, or its other processes did not come; "
        "check --coordinator, and that the port and the next one are open"
    )


def _line(connection: socket.socket, seconds: float) -> str:
    connection.settimeout(seconds)
    with connection.makefile() as lines:
        line = lines.readline(_LONGEST_LINE)
    connection.settimeout(None)
    return line


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be used here ({os.strerror(error.errno or 0)}); --coordinator needs a port that is "
            "free, and the next one, too"
        ) from None


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
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return function()
    told = ["", ""]
    if is_first():
        try:
            told[0] = function()
        except UsageError as error:
            told[1] = str(error)
    words = json.dumps(told).encode().ljust(_LONGEST_BROADCAST)
    text, refusal = json.loads(bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(words, np.uint8))))
    if refusal:
        raise UsageError(refusal)
    return str(text)


def largest(value: int) -> Callable[[], int]:
    """Asks for the largest of the processes' values; what it returns waits for the answer.

    The answer comes from the devices, behind the work that they have been given.
    """
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return lambda: value
    split, find = _for_largest()
    found = find(jax.make_array_from_callback((jax.device_count(),), split, lambda _: np.full(1, value, np.int32)))
    found.copy_to_host_async()
    return lambda: int(found)


@functools.cache
def _for_largest() -> tuple[Any, Any]:
    """How the processes' values lie on the devices, and what finds the largest."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("devices")), NamedSharding(mesh, PartitionSpec())
    return split, jax.jit(jnp.max, out_shardings=whole)
