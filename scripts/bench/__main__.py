"""Run experiments by name, one after the other; finished ones are skipped.

    python -m scripts.bench                       all names, with minutes and files
    python -m scripts.bench all                   everything that has not been measured with these versions yet
    python -m scripts.bench 'computed-*' front --force
    python -m scripts.bench all --quick --minutes 10

Figures go to benchmarks/, those of `--quick` to runs/bench/quick/. Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import datetime
from fnmatch import filter as matching
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from .measure import EXPERIMENTS, REPOSITORY, Experiment, Settings, versions, write_json


SHARED = REPOSITORY.parent / "shared"


def load_experiments() -> None:
    """Import every module of the package: each registers its experiments."""
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if found.name != "__main__":
            import_module(f"{__package__}.{found.name}")


def chosen(patterns: Iterable[str]) -> list[Experiment]:
    """Experiments in the order of their names; `all` is every one of them."""
    names: set[str] = set()
    for pattern in patterns:
        found = matching(EXPERIMENTS, "*" if pattern == "all" else pattern)
        if not found:
            sys.exit(f"No experiment is called {pattern}; there are {', '.join(sorted(EXPERIMENTS))}.")
        names.update(found)
    return [EXPERIMENTS[name] for name in sorted(names)]


def within(experiments: Sequence[Experiment], minutes: float, quick: bool) -> list[Experiment]:
    """As many of them as fit into the time, the shortest first."""
    experiments = sorted(experiments, key=lambda each: each.minutes_of(quick))
    ends = accumulate(each.minutes_of(quick) for each in experiments)
    return [each for each, end in zip(experiments, ends, strict=True) if end <= minutes]


def print_list() -> None:
    """What there is."""
    for name, each in sorted(EXPERIMENTS.items()):
        times = f"{each.minutes:g} min, quick {each.quick_minutes:g}"
        print(f"{name:26} {times:22} {each.result}\n    {each.summary}")


def run_all(experiments: Sequence[Experiment], settings: Settings, results: Path, forces: bool) -> list[str]:
    """Run what is not finished, and return what failed: a failure is printed, and the next one goes on."""
    path = settings.folder / "state.json"
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    failed = []
    for number, each in enumerate(experiments, start=1):
        title, before = f"{each.name} ({number} of {len(experiments)})", state.get(each.name, {})
        if not forces and before.get("versions") == versions() and (results / each.result).exists():
            print(f"=== {title}: finished {before['finished']}; --force measures it again", flush=True)
            continue
        print(f"=== {title}, about {each.minutes_of(settings.quick):g} minutes: {each.summary}", flush=True)
        start = time.monotonic()
        try:
            each.run(settings, results)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(each.name)
            continue
        minutes = (time.monotonic() - start) / 60
        state[each.name] = {"finished": f"{datetime.now():%F %H:%M}", "versions": versions()}
        write_json(path, state)
        print(f"=== {each.name}: {minutes:.1f} minutes, in {results / each.result}", flush=True)
    return failed


def main() -> None:
    """Read the command line and run what it names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names or patterns of experiments, or `all`; none lists them")
    parser.add_argument("--quick", action="store_true", help="shorten every experiment, only to see that it runs")
    parser.add_argument("--force", action="store_true", help="also measure what is finished")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="as many as fit, the shortest first")
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder of the data files")
    parser.add_argument("--models", type=Path, default=SHARED / "models", help="folder of the small ViT")
    options = parser.parse_args()
    load_experiments()
    if not options.names:
        print_list()
        return
    folder = REPOSITORY / "runs" / "bench" / ("quick" if options.quick else "")
    results = folder if options.quick else REPOSITORY / "benchmarks"
    settings = Settings(options.data.resolve(), options.models.resolve(), folder, options.quick)
    experiments = within(chosen(options.names), options.minutes, options.quick)
    failed = run_all(experiments, settings, results, options.force)
    if failed:
        sys.exit(f"{len(failed)} of {len(experiments)} experiments failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
