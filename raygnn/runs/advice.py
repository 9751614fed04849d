"""Advice on a run's configuration, derived from measurements: `advise`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.runs.metrics_files import COMPUTE, LOADER, RANKS, STEP
from raygnn.runs.report.source import MOST_OF_RANKS, read_some

_FEWEST_WINDOWS = 2  # besides the first, which has the start in it
_FEW_STEPS = 20  # a run of so many is a trial, which nobody needs to be faster
_COMMUNICATES = 0.3  # of a step that is too much for an exchange that nothing hides
_STARVES = 0.2  # of a step that is too much to wait for a batch
_SWINGS = 0.2  # between the tenth and the ninetieth percentile of a busy share
_OFTEN = 0.2  # of the windows in which a rank is slow
_FREE = 0.5  # of a GPU's memory
_MB = 2**20
_LITTLE, _SHORT = _MB // 4, 1e-3  # bytes, seconds of an exchange that are not worth advice
_SMALL_BUCKET, _MANY = _MB, 32  # bytes, buckets

_Severity = Literal["warning", "hint"]
_Finding = tuple[str, tuple[str, ...], bool, str, float]  # the fields of `Advice` from `what` on


@dataclass(frozen=True)
class Advice:
    """Finding with its remedy.

    Attributes:
        name: of the rule.
        what: the finding, with the measured values.
        set: ``KEY=VALUE`` for ``--set``, to be used together; empty if no key helps.
        numerics: True if results change by more than the order of a sum.
        expect: expected effect.
        gain: estimated share of a step's time that is saved; used for sorting only.
    """

    name: str
    severity: _Severity
    what: str
    set: tuple[str, ...]
    numerics: bool
    expect: str
    gain: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "set": list(self.set)}


def possible_advice(config: Config, run: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the advice for a run's summary, as JSON types; only changes that are valid."""
    with suppress(Exception):  # the run has been trained, and must not fail now
        records = read_some(run / RANKS, MOST_OF_RANKS)
        found = advise(config.to_dict(), result, records)
        return [advice.to_dict() for advice in found if _is_possible(config, advice.set)]
    return []


def _is_possible(config: Config, changes: Sequence[str]) -> bool:
    try:
        load_config(config.to_dict(), list(changes))
    except ConfigError:
        return False
    return True


def advise(
    config: Mapping[str, Any], summary: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[Advice]:
    """Return changes that would make a run faster, or preserve its results; the most urgent first.

    Args:
        config: resolved, as JSON types.
        summary: of the run; any key may be missing.
        ranks: records of ``ranks.jsonl``, see `raygnn.runs.metrics_files`.
    """
    run = _Measurements.from_run(config, summary, ranks)
    if run is None or summary.get("steps", _FEW_STEPS + 1) <= _FEW_STEPS:
        return []
    advice: list[Advice] = []
    for severity, rules in _RULES.items():
        found = [Advice(rule.__name__[1:], severity, *item) for rule in rules for item in rule(run)]
        advice += sorted(found, key=lambda item: -item.gain)
    return advice


@dataclass(frozen=True)
class _Measurements:
    """Medians over the windows of the last attempt, without the first window.

    Attributes:
        seconds: part → seconds per batch, by rank.
        gradients: bytes of all gradients of a rank in one exchange; None if unknown.
        buckets: bytes of each of DDP's buckets.
        use: ``cpu`` and ``gpu`` → busy share of each window, mean over the ranks.
        gpu_memory: largest used share of a GPU's memory; None if unknown.
        slow: for each rank, the share of the windows in which it was slow, and its host.
        fetched: feature rows of other hosts that were in no cache.
        global_batch: seeds per batch over all ranks; None if unknown.
    """

    config: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]
    gradients: int | None
    buckets: Sequence[int]
    use: Mapping[str, Sequence[float]]
    gpu_memory: float | None
    slow: Sequence[Mapping[str, Any]]
    fetched: int
    global_batch: int | None

    @classmethod
    def from_run(
        cls,
        config: Mapping[str, Any],
        summary: Mapping[str, Any],
        ranks: Sequence[Mapping[str, Any]],
    ) -> _Measurements | None:
        """Return None if too few windows were recorded."""
        windows = [record for record in ranks if isinstance(record.get("seconds"), Mapping)]
        times = [window.get("time") or 0.0 for window in windows]  # since the command began
        starts = [i for i in range(1, len(times)) if times[i] < times[i - 1]]
        windows = windows[max(starts, default=0) :]
        world = len(windows[-1]["seconds"].get("forward", ())) if windows else 0
        windows = [w for w in windows[1:] if len(w["seconds"].get("forward", ())) == world]
        if not world or len(windows) < _FEWEST_WINDOWS:
            return None
        seconds = {}
        for part in (*STEP, *LOADER):
            rows = [window["seconds"].get(part, [0.0] * world) for window in windows]
            seconds[part] = [median(column) for column in zip(*rows)]
        use = {}
        for kind in ("cpu", "gpu"):
            shares = [_numbers((window.get("use") or {}).get(kind)) for window in windows]
            use[kind] = [fmean(window) for window in shares if window]
        memory = [_numbers((window.get("memory") or {}).get("gpu_share")) for window in windows]
        reduced, remote = summary.get("gradients") or {}, summary.get("remote") or {}
        return cls(
            config=config,
            seconds=seconds,
            gradients=reduced.get("bytes"),
            buckets=reduced.get("buckets") or [],
            use=use,
            gpu_memory=max((share for window in memory for share in window), default=None),
            slow=summary.get("ranks") or [],
            fetched=remote.get("rows", 0) - remote.get("cache_hits", 0),
            global_batch=summary.get("global_batch"),
        )

    @property
    def world(self) -> int:
        return len(self.seconds["forward"])

    @property
    def step(self) -> float:
        """Seconds per batch."""
        return max(1e-9, sum(self.mean(name) for name in STEP))

    def mean(self, part: str) -> float:
        """Return a part's seconds per batch, mean over the ranks."""
        return fmean(self.seconds[part])

    def share(self, part: str) -> float:
        return self.mean(part) / self.step

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, such as ``comm.compression``."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def lr_scaling(self) -> str:
        """Scaling rule for a larger batch."""
        return "linear" if self.get("train.optimizer") == "sgd" else "sqrt"

    @property
    def longer_queue(self) -> str:
        return f"sampling.prefetch={2 * self.get('sampling.prefetch', 0) or 2}"


def _numbers(values: Any) -> list[float]:
    return [value for value in values or () if isinstance(value, (int, float))]


def _communication(run: _Measurements) -> Iterator[_Finding]:
    """Find a gradient exchange that takes more than 30 % of a step and is not overlapped. Few bytes
    or little time are latency, which fewer bytes do not shorten."""
    share, seconds = run.share("communicate"), run.mean("communicate")
    little = run.gradients is not None and run.gradients < _LITTLE
    if run.world < 2 or share <= _COMMUNICATES or seconds < _SHORT or little:
        return
    what = (
        f"the exchange of gradients takes {seconds * 1e3:.1f} ms a batch that nothing hides, "
        f"{share:.0%} of it"
    )
    if run.gradients:
        what += f"; {run.gradients / _MB:.1f} MB in {len(run.buckets) or 1} buckets"
    half = seconds / 2 * 1e3
    if run.get("comm.compression") == "none" and run.get("precision") != "bf16":
        expect = f"half the bytes: about {half:.0f} ms a batch less ({share / 2:.0%})"
        yield what, ("comm.compression=bf16",), True, expect, share / 2
    batches = 2 * run.get("train.accumulate", 1)
    yield (
        what,
        (f"train.accumulate={batches}",),
        True,
        f"one exchange for {batches} batches: about {half:.0f} ms a batch less; the batch of a "
        "step doubles",
        share / 2.01,
    )
    if not run.get("comm.overlap", True):
        hidden = min(seconds, run.mean("backward"))
        expect = f"up to {hidden * 1e3:.0f} ms a batch behind the backward pass"
        yield what, ("comm.overlap=true",), False, expect, hidden / run.step


def _large_buckets(run: _Measurements) -> Iterator[_Finding]:
    """Find one or two buckets with all gradients, whose exchange cannot overlap with backward."""
    if run.world < 2 or not run.gradients or not run.buckets or not run.get("comm.overlap", True):
        return
    largest = max(run.buckets)
    hidden = min(run.mean("communicate"), run.mean("backward"))
    size = max(1, round(run.gradients / 4 / _MB))
    few = largest >= run.gradients / 2 and run.gradients >= 4 * _MB and hidden >= 0.1 * run.step
    if few and size < run.get("comm.bucket_cap_mb", 25):
        yield (
            f"{largest / run.gradients:.0%} of the gradients are in one bucket of "
            f"{largest / _MB:.1f} MB, whose exchange cannot begin before its last gradient is "
            "there",
            (f"comm.bucket_cap_mb={size}",),
            False,
            f"up to {hidden * 1e3:.0f} ms a batch of the exchange behind the backward pass",
            hidden / run.step / 2,
        )


def _small_buckets(run: _Measurements) -> Iterator[_Finding]:
    """Find many small buckets, each of which costs a latency."""
    many = len(run.buckets) >= _MANY and median(run.buckets) < 2 * _SMALL_BUCKET
    if run.world > 1 and many and run.share("communicate") >= 0.1:
        yield (
            f"gradients go in {len(run.buckets)} buckets of {median(run.buckets) / _MB:.2f} MB "
            f"each, and {run.share('communicate'):.0%} of a step is exchange that nothing hides",
            ("comm.bucket_cap_mb=25",),
            False,
            "fewer exchanges, each of which costs a latency",
            run.share("communicate") / 4,
        )


def _starving_loader(run: _Measurements) -> Iterator[_Finding]:
    """Find ranks that wait for their next batch for more than 20 % of a step."""
    shares = [seconds / run.step for seconds in run.seconds["wait"]]
    gain = max(shares)
    if gain <= _STARVES:
        return
    rank = shares.index(gain)
    parts = {name: run.seconds[name][rank] for name in ("sample", "features", "exchange")}
    longest = max(parts, key=parts.__getitem__)
    listed = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in parts.items())
    who = f"rank {rank} waits" if run.world > 1 else "training waits"
    what = f"{who} for its next batch {gain:.0%} of a step; to make one takes {listed}"
    if not run.get("sampling.prefetch", 0):
        saved = min(sum(parts.values()), run.step - run.mean("wait"))
        expect = f"batches made beside training: up to {saved * 1e3:.0f} ms a batch less, "
        expect += "where there are cores for both"
        yield what, ("sampling.prefetch=2",), False, expect, gain
        return
    if longest == "exchange" and run.world > 1:
        cache = run.get("sampling.cache", 0.0)
        if cache != 1 and run.fetched:
            more = 1.0 if cache == "auto" else min(1.0, max(0.2, 2 * cache))
            expect = "fewer rows from other hosts, for memory"
            yield what, (f"sampling.cache={more:g}",), False, expect, gain / 2
        if run.get("sampling.topology") == "partitioned":
            expect = "no exchange to draw neighbours, for the memory of the whole structure"
            yield what, ("sampling.topology=replicated",), False, expect, gain / 2
        return
    cpus = run.get("cluster.cpus_per_worker", 1)
    if cpus < 2:
        expect = "a core of its own for the thread that makes batches"
        yield what, (f"cluster.cpus_per_worker={cpus + 1}",), False, expect, gain / 2
    key = "sampling.fanout" if longest == "sample" else "sampling.batch_size"
    yield (
        f"{what} ({key} decides how much that is)",
        (),
        True,
        "smaller fanouts, or fewer features, make a batch cheaper; the loader is the limit",
        gain / 3,
    )


def _stragglers(run: _Measurements) -> Iterator[_Finding]:
    """Find a rank that often delays the other ranks."""
    for slow in run.slow:
        rank = slow["rank"]
        if slow.get("slow", 0) < _OFTEN or rank >= run.world:
            continue
        longer = {
            part: run.seconds[part][rank]
            - median(seconds for r, seconds in enumerate(run.seconds[part]) if r != rank)
            for part in ("wait", *COMPUTE)
        }
        part = max(longer, key=longer.__getitem__)
        host = f" on {slow['host']}" if slow.get("host") else ""
        uneven = part == "wait"
        yield (
            f"rank {rank}{host} holds up the others in {slow['slow']:.0%} of the windows: its "
            f"{part} takes {longer[part] * 1e3:.1f} ms a batch more than theirs",
            (run.longer_queue,) if uneven else (),
            False,
            "a longer queue evens out batches of unlike size"
            if uneven
            else "see what else runs on its host and how it differs (raygnn check); the others "
            f"wait for {max(run.seconds['peers']) * 1e3:.1f} ms a batch",
            longer[part] / run.step,
        )


def _swinging_use(run: _Measurements) -> Iterator[_Finding]:
    """Find a busy share that varies by more than 20 points between windows."""
    kind = "gpu" if len(run.use["gpu"]) >= 10 else "cpu"
    shares, waits = sorted(run.use[kind]), run.share("wait")
    if len(shares) < 10 or waits < 0.05:
        return
    low, high = shares[len(shares) // 10], shares[-1 - len(shares) // 10]
    if high - low > _SWINGS:
        yield (
            f"the {kind.upper()}s are busy between {low:.0%} and {high:.0%} from window to window, "
            f"and {waits:.0%} of a step is wait for batches",
            (run.longer_queue,),
            False,
            "a longer queue evens out batches of unlike size",
            waits / 2,
        )


def _unused_memory(run: _Measurements) -> Iterator[_Finding]:
    """Find GPUs with more than half of their memory free."""
    if run.gpu_memory is not None and run.gpu_memory <= _FREE:
        yield (
            f"at most {run.gpu_memory:.0%} of a GPU's memory was used",
            (
                f"sampling.batch_size={2 * run.get('sampling.batch_size', 0)}",
                f"train.lr_scaling={run.lr_scaling}",
            ),
            True,
            "fewer, larger steps, with less exchange for each seed",
            0.0,
        )


def _learning_rate(run: _Measurements) -> Iterator[_Finding]:
    """Find a global batch that grew with the workers while the learning rate did not."""
    batch = run.get("sampling.batch_size", 0)
    grew = run.global_batch is None or run.global_batch > batch  # not where the run began with one
    if run.world > 1 and grew and run.get("train.lr_scaling") == "none":
        warmup = () if run.get("train.schedule.warmup") else ("train.schedule.warmup=0.05",)
        yield (
            f"the global batch is {run.world * batch:,} seeds ({run.world} workers × {batch:,}), "
            "but train.lr was chosen for one worker",
            (f"train.lr_scaling={run.lr_scaling}", *warmup),
            True,
            "as many epochs as one worker needs, if the rate was chosen for one",
            0.0,
        )


# the most urgent first
_RULES: dict[_Severity, tuple[Callable[[_Measurements], Iterator[_Finding]], ...]] = {
    "warning": (_communication, _starving_loader, _stragglers),
    "hint": (_large_buckets, _small_buckets, _swinging_use, _unused_memory, _learning_rate),
}
