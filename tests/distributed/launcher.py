"""Start a script on several processes of this machine, with a hard time limit and every rank's output."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from tests.distributed.forked import ForkedRank, can_fork, start_forked
from tests.doubles.replay import ReplayError, check_notes


__all__ = ["LaunchError", "LaunchResult", "accelerate_launch", "free_port", "launch", "launch_nodes"]

REPOSITORY = Path(__file__).resolve().parents[2]
BOOTSTRAP = REPOSITORY / "tests" / "doubles" / "bootstrap.py"
NOTES = "STRICT_NCCL_NOTES"

Process = subprocess.Popen[bytes] | ForkedRank

# Short enough to be precise about when a rank ended, long enough to cost no processor time.
POLL_SECONDS = 0.05

# What an outer launcher may have left in the environment; each launch says all of it anew.
_LAUNCHER_VARIABLES = re.compile(
    r"^(ACCELERATE_|FSDP_|TORCHELASTIC_|MASTER_|GROUP_|ROLE_|RANK$|LOCAL_RANK$|WORLD_SIZE$|LOCAL_WORLD_SIZE$)"
)
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


class LaunchError(RuntimeError):
    """A launch that had to succeed failed or ran past its time limit; the text holds every rank's output."""


@dataclass(frozen=True)
class LaunchResult:
    """What the processes of one launch left behind.

    Args:
        returncode: 0 if every rank returned 0, else the code of the rank that failed first (negative: the signal).
        output: the output of all ranks, each under a heading.
        outputs: stdout and stderr together, one text per rank.
        seconds: from the start to the end of the last rank.
        returncodes: one per rank; None for a rank that had to be killed by the launcher.
        ended: seconds from the start at which each rank ended; None for a rank that had to be killed.
        timed_out: whether the time limit or the grace period ran out, so that the launcher had to kill.
        signalled: seconds from the start at which `signal_on` was sent; None if it was not.
    """

    returncode: int
    output: str
    outputs: list[str]
    seconds: float
    returncodes: list[int | None] = field(default_factory=list)
    ended: list[float | None] = field(default_factory=list)
    timed_out: bool = False
    signalled: float | None = None


def launch(
    script: str | Path,
    args: Sequence[str | Path] = (),
    num_processes: int = 1,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
    grace: float = 5,
    signal_on: tuple[str, signal.Signals] | None = None,
    strict_nccl: bool = False,
) -> LaunchResult:
    """Run `script` on `num_processes` ranks, as torchrun would, without its agent.

    Where a rank cannot tell the difference it is forked with torch and transformers imported.

    Every rank is the leader of a process group of its own; whatever happens, all groups are gone at the end. One
    process gets no distributed environment, like `python script.py`.

    Args:
        timeout: seconds after which every process group is killed.
        env: changes to the environment of every rank; None removes a variable.
        check: raise `LaunchError` unless every rank returned 0.
        grace: seconds the other ranks have to end by themselves once one rank has failed.
        signal_on: once every rank has printed the text, send the signal to every rank, as a terminal does on Ctrl-C.
        strict_nccl: run under the double of NCCL: the launch fails, too, if the ranks would hang or get something else
            on devices. More than one process only.
    """
    what = f"{Path(script).name} on {num_processes} processes"
    with tempfile.TemporaryDirectory(prefix="notes-") as notes:
        under = Path(notes) if strict_nccl and num_processes > 1 else None
        result = _run_ranks(script, args, num_processes, timeout, env, grace, signal_on, under)
        if result.returncode and _PORT_TAKEN.search(result.output):
            # Another process took the free port between its choice and its use.
            result = _run_ranks(script, args, num_processes, timeout, env, grace, signal_on, under)
        if under is not None:
            result = _with_notes(result, under, what)
    return _judged(result, what, timeout, grace, check)


def accelerate_launch(
    script: str | Path,
    args: Sequence[str | Path] = (),
    num_processes: int | None = 2,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
    launcher_args: Sequence[str] = (),
    mode: str = "--multi_gpu",
) -> LaunchResult:
    """Run `script` with the real `accelerate launch`; `launcher_args` come before the script (`--config_file ...`).

    `outputs` has one text: `accelerate launch` merges its ranks. `mode` is left out for one process. With
    `num_processes` None the file that `launcher_args` name says all of it.
    """
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if num_processes is not None and num_processes > 1:
        command += [mode, "--main_process_port", "0"]
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    command += [*launcher_args, str(script), *map(str, args)]
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        log = Path(folder, "output.txt")
        start = time.monotonic()
        with _started([partial(_opened, command, _environment(env), log)]) as processes:
            timed_out = not _wait_until_all_ended(processes, start + timeout)
        seconds = time.monotonic() - start
        text = log.read_text(errors="replace")
    code = processes[0].returncode
    result = LaunchResult(
        returncode=code,
        output=text,
        outputs=[text],
        seconds=seconds,
        returncodes=[None if timed_out else code],
        ended=[None if timed_out else seconds],
        timed_out=timed_out,
    )
    what = f"accelerate launch of {Path(script).name} on {num_processes} processes"
    return _judged(result, what, timeout, 0, check)


def launch_nodes(
    script: str | Path,
    args: Sequence[str | Path],
    num_nodes: int,
    processes_per_node: int,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
) -> LaunchResult:
    """Run `script` on several nodes, each a launch group of torchrun; they meet on this machine's loopback.

    `outputs` has one text per node: torchrun merges its ranks.
    """
    port = free_port()
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(num_nodes), "--nproc_per_node", str(processes_per_node), "--node_rank", str(node)),
            *("--master_addr", "127.0.0.1", "--master_port", str(port), str(script), *map(str, args)),
        ]
        for node in range(num_nodes)
    ]
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        logs = [Path(folder, f"node{node}.txt") for node in range(num_nodes)]
        start = time.monotonic()
        starts = [
            partial(_opened, command, _environment(env), log) for command, log in zip(commands, logs, strict=True)
        ]
        with _started(starts) as processes:
            timed_out = not _wait_until_all_ended(processes, start + timeout)
            codes = [process.poll() for process in processes]
        seconds = time.monotonic() - start
        outputs = [log.read_text(errors="replace") for log in logs]
    ended = [None if code is None else seconds for code in codes]
    failure = next((code for code in codes if code), -signal.SIGKILL if timed_out else 0)
    output = _with_headings(outputs, codes, ended)
    result = LaunchResult(failure, output, outputs, seconds, codes, ended, timed_out)
    return _judged(result, f"{Path(script).name} on {num_nodes} nodes", timeout, 0, check=True)


def _run_ranks(
    script: str | Path,
    args: Sequence[str | Path],
    num_processes: int,
    timeout: float,
    env: Mapping[str, str | None] | None,
    grace: float,
    signal_on: tuple[str, signal.Signals] | None,
    notes: Path | None,
) -> LaunchResult:
    port = free_port()
    command = [*([] if notes is None else [str(BOOTSTRAP)]), str(script), *map(str, args)]
    forks = can_fork(env)
    if notes is not None:
        shutil.rmtree(notes, ignore_errors=True)
        env = {**(env or {}), NOTES: str(notes)}
    environments = [_environment(env, rank, num_processes, port) for rank in range(num_processes)]
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        logs = [Path(folder, f"rank{rank}.txt") for rank in range(num_processes)]
        start = time.monotonic()
        deadline = start + timeout
        ended: list[float | None] = [None] * num_processes
        returncodes: list[int | None] = [None] * num_processes
        first_failure: int | None = None
        signalled: float | None = None
        starts = [
            partial(start_forked, rank, command, environment, log, REPOSITORY)
            if forks
            else partial(_opened, [sys.executable, "-u", *command], environment, log)
            for rank, (environment, log) in enumerate(zip(environments, logs, strict=True))
        ]
        with _started(starts) as processes:
            while None in ended and time.monotonic() < deadline:
                for rank, process in enumerate(processes):
                    if ended[rank] is None and process.poll() is not None:
                        ended[rank] = time.monotonic() - start
                        returncodes[rank] = process.returncode
                        if process.returncode and first_failure is None:
                            first_failure = process.returncode
                            deadline = min(deadline, time.monotonic() + grace)
                if signal_on is not None and signalled is None and _all_printed(logs, signal_on[0]):
                    signalled = time.monotonic() - start
                    for process in processes:
                        if process.poll() is None:
                            process.send_signal(signal_on[1])
                time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - start
        outputs = [log.read_text(errors="replace") for log in logs]
    timed_out = None in ended
    return LaunchResult(
        returncode=first_failure or (-signal.SIGKILL if timed_out else 0),
        output=_with_headings(outputs, returncodes, ended),
        outputs=outputs,
        seconds=seconds,
        returncodes=returncodes,
        ended=ended,
        timed_out=timed_out,
        signalled=signalled,
    )


def _with_notes(result: LaunchResult, notes: Path, what: str) -> LaunchResult:
    """Raise if the notes of a launch that ended well break a rule of NCCL; one that failed gets what they say."""
    try:
        check_notes(notes)
    except ReplayError as error:
        text = f"{result.output}\n===== under the rules of NCCL =====\n{error}"
        if not result.returncode:
            raise LaunchError(f"{what} would fail on devices.\n{text}") from error
        return replace(result, output=text)
    return result


def _opened(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def _started(starts: Sequence[Callable[[], Process]]) -> Iterator[list[Process]]:
    """Start processes, each in a session of its own; kill what is left of them at the end."""
    processes: list[Process] = []
    try:
        for start in starts:
            processes.append(start())
        yield processes
    finally:
        # torchrun's agent gives its workers sessions of their own, so a process group alone does not reach them.
        descendants = [child for process in processes for child in _children(process.pid)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for child in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for process in processes:
            process.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_until_all_ended(processes: Sequence[Process], deadline: float) -> bool:
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _environment(
    changes: Mapping[str, str | None] | None, rank: int = 0, num_processes: int = 1, port: int | None = None
) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    python_path = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    updates: dict[str, str | None] = {
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if port is not None and num_processes > 1:
        updates |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    updates |= dict(changes or {})
    for name, value in updates.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _all_printed(logs: Sequence[Path], text: str) -> bool:
    return all(text in log.read_text(errors="replace") for log in logs)


def _with_headings(outputs: Sequence[str], codes: Sequence[int | None], ended: Sequence[float | None]) -> str:
    parts = []
    for rank, (text, code, moment) in enumerate(zip(outputs, codes, ended, strict=True)):
        end = "killed by the launcher" if moment is None else f"returned {code} after {moment:.1f} s"
        parts.append(f"===== rank {rank}: {end} =====\n{text}")
    return "\n".join(parts)


def _judged(result: LaunchResult, what: str, timeout: float, grace: float, check: bool) -> LaunchResult:
    if not result.returncode:
        return result
    if result.timed_out:
        limit = f"did not end within {timeout:g} s, or {grace:g} s after the first failure"
        text = f"{what} {limit}, and was killed.\n{result.output}"
    else:
        text = f"{what} failed with {result.returncode}.\n{result.output}"
    if check:
        raise LaunchError(text)
    print(text)
    return result
