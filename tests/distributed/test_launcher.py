"""The launcher itself: without it no other distributed test can be trusted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launcher import REPOSITORY, LaunchError, accelerate_launch, launch


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> Path:
        path = tmp_path / "worker.py"
        path.write_text(
            "import os, signal, sys, time\n"
            "from pathlib import Path\n"
            "rank = int(os.environ.get('RANK', 0))\n"
            "world = int(os.environ.get('WORLD_SIZE', 1))\n" + body
        )
        return path

    return write


def is_gone(pid: int) -> bool:
    """Whether no process with this id runs any more; a zombie that nobody has reaped counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def is_gone_soon(pid: int) -> bool:
    """`is_gone` within a second: the kernel needs a moment to end a killed process."""
    deadline = time.monotonic() + 1
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_gone(pid)


def test_every_rank_has_its_own_environment_and_output(script):
    body = "print('rank', rank, 'of', world, sys.argv[1:]); print('to stderr', rank, file=sys.stderr)\n"
    body += "print(os.environ['OMP_NUM_THREADS'], os.environ['ACCELERATE_USE_CPU'], os.environ['HF_HUB_OFFLINE'])"
    result = launch(script(body), ["--flag", "1"], num_processes=3, timeout=60)
    assert result.returncode == 0
    assert result.returncodes == [0, 0, 0]
    assert len(result.outputs) == 3
    for rank, text in enumerate(result.outputs):
        assert f"rank {rank} of 3 ['--flag', '1']" in text
        assert f"to stderr {rank}" in text
        assert "1 true 1" in text
        assert f"rank {(rank + 1) % 3} of" not in text


def test_one_process_gets_no_distributed_environment(script, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    result = launch(script("print([name for name in os.environ if 'RANK' in name or 'FSDP' in name])"), timeout=60)
    assert result.outputs == ["[]\n"]


def test_environment_can_be_changed_and_removed(script):
    body = "print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('ADDED'))"
    result = launch(script(body), timeout=60, env={"OMP_NUM_THREADS": None, "ADDED": "yes"})
    assert result.outputs == ["None yes\n"]


def test_a_hanging_launch_is_killed_at_the_time_limit_with_its_children(script):
    body = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('pids', os.getpid(), child.pid, flush=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(60)"
    )
    result = launch(script(body), num_processes=2, timeout=5, check=False)
    assert result.seconds < 50  # Left alone it takes 60.
    assert result.timed_out
    assert result.returncode != 0
    assert result.ended == [None, None]
    for text in result.outputs:
        for pid in text.split()[1:3]:
            assert is_gone_soon(int(pid))


def test_a_failing_rank_is_echoed_with_all_others(script, capsys):
    body = "print('hello from', rank)\nif rank == 1:\n    raise RuntimeError('planted failure')"
    with pytest.raises(LaunchError) as failure:
        launch(script(body), num_processes=2, timeout=60)
    for expected in ("hello from 0", "hello from 1", "RuntimeError: planted failure", "rank 1: returned 1"):
        assert expected in str(failure.value)
    result = launch(script(body), num_processes=2, timeout=60, check=False)
    assert result.returncode == 1
    assert not result.timed_out
    assert "planted failure" in result.outputs[1]
    assert "planted failure" not in result.outputs[0]
    assert "planted failure" in capsys.readouterr().out


def test_the_others_get_a_grace_period_after_the_first_failure(script):
    body = "if rank == 0:\n    sys.exit(3)\ntime.sleep(1 if rank == 1 else 60)\nprint('ended by itself')"
    start = time.monotonic()
    result = launch(script(body), num_processes=3, timeout=50, grace=4, check=False)
    assert time.monotonic() - start < 15
    assert result.returncode == 3
    assert result.returncodes == [3, 0, None]
    assert "ended by itself" in result.outputs[1]
    assert result.ended[0] <= result.ended[1]
    assert result.ended[2] is None


def test_a_rank_killed_by_a_signal_is_a_failure(script):
    result = launch(script("os.kill(os.getpid(), signal.SIGKILL)"), timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    assert not result.timed_out


def test_a_signal_reaches_every_rank_once_all_are_ready(script):
    body = (
        "try:\n    print('ready', flush=True)\n    time.sleep(30)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n    sys.exit(130)"
    )
    result = launch(script(body), num_processes=2, timeout=60, check=False, signal_on=("ready", signal.SIGINT))
    assert result.returncodes == [130, 130]
    assert result.signalled is not None
    assert all("interrupted" in text for text in result.outputs)


def test_ranks_meet_in_a_process_group(script):
    body = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([float(rank)])\n"
        "dist.all_reduce(total)\n"
        "print('sum', total.item())\n"
        "dist.barrier(); dist.destroy_process_group()"
    )
    result = launch(script(body), num_processes=2, timeout=50)
    assert all("sum 1.0" in text for text in result.outputs)


def test_accelerate_launch_starts_every_process(script):
    body = "open(f'{sys.argv[1]}.{rank}', 'w').write(f'{world} {os.environ[\"ACCELERATE_USE_CPU\"]}')"
    path = script(body)
    result = accelerate_launch(path, [path], num_processes=2, timeout=50)
    assert result.returncode == 0
    assert [Path(f"{path}.{rank}").read_text() for rank in range(2)] == ["2 true", "2 true"]


def test_accelerate_launch_is_killed_at_the_time_limit(script):
    body = "open(f'{sys.argv[1]}.{rank}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    path = script(body)
    result = accelerate_launch(path, [path], num_processes=2, timeout=25, check=False)
    assert result.timed_out
    for rank in range(2):
        pid = Path(f"{path}.{rank}").read_text()
        assert is_gone_soon(int(pid))
        assert int(pid) != os.getpid()


def test_neighbours_are_as_different_as_processes_of_their_own(script):
    """Sets of strings in another order, other random numbers; what forks share must not make ranks agree."""
    body = "import numpy, random; print('draws', hash('text'), random.random(), numpy.random.random())"
    texts = launch(script(body), num_processes=2, timeout=60).outputs
    draws = [text.partition("draws ")[2].split() for text in texts]
    assert len(draws[0]) == 3
    assert all(first != second for first, second in zip(*draws, strict=True))


def test_ranks_end_with_the_process_that_launched_them(script, tmp_path: Path):
    body = "(Path(sys.argv[1]) / str(rank)).write_text(str(os.getpid())); time.sleep(60)"
    code = f"from tests.distributed.launcher import launch; launch({str(script(body))!r}, [{str(tmp_path)!r}], 2)"
    launching = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    pids = [int(wait_for_text(tmp_path / str(rank))) for rank in range(2)]
    launching.kill()
    launching.wait()
    assert all(is_gone_soon(pid) for pid in pids)


def wait_for_text(path: Path) -> str:
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)
    return path.read_text()
