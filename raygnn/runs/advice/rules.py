"""What advice there is: one rule each, from evidence to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

from raygnn.runs.advice.evidence import Evidence
from raygnn.runs.metrics_files import COMPUTE

_COMMUNICATES = 0.3  # of a step that is too much for an exchange that nothing hides
_STARVES = 0.2  # of a step that is too much to wait for a batch
_SWINGS = 0.2  # between the tenth and the ninetieth percentile of a busy share
_OFTEN = 0.2  # of the windows in which a rank is slow
_FREE = 0.5  # of a GPU's memory
_MB = 2**20
_LITTLE, _SHORT = _MB // 4, 1e-3  # bytes, seconds of an exchange that are not worth advice
_SMALL_BUCKET, _MANY = _MB, 32  # bytes, buckets


@dataclass(frozen=True)
class Advice:
    """One finding and what to do about it.

    Attributes:
        name: of the rule.
        what: the finding, with what was measured.
        set: ``KEY=VALUE`` for ``--set``, to be used together; empty where no key helps.
        numerics: whether results change, by more than the order of a sum.
        expect: what the change should bring.
        gain: how much faster a step might get, a share of it; for the order alone.
    """

    name: str
    severity: Literal["warning", "hint"]
    what: str
    set: tuple[str, ...]
    numerics: bool
    expect: str
    gain: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "set": list(self.set)}


def communication(e: Evidence) -> Iterator[Advice]:
    """An exchange of gradients that takes more than 30 % of a step, hidden by nothing; of few
    bytes, or little time, none: that is latency, which fewer bytes do not shorten."""
    share, seconds = e.share("communicate"), e.mean("communicate")
    if e.world < 2 or share <= _COMMUNICATES or seconds < _SHORT:
        return
    if e.gradients is not None and e.gradients < _LITTLE:
        return
    said = f"the exchange of gradients takes {seconds * 1e3:.1f} ms a batch that nothing hides"
    what = f"{said}, {share:.0%} of it"
    if e.gradients:
        what += f"; {e.gradients / _MB:.1f} MB in {len(e.buckets) or 1} buckets"
    found = partial(Advice, "communication", "warning", what)
    if e.get("comm.compression") == "none" and e.get("precision") != "bf16":
        yield found(
            ("comm.compression=bf16",),
            True,
            f"half the bytes: about {seconds / 2 * 1e3:.0f} ms a batch less ({share / 2:.0%})",
            share / 2,
        )
    accumulate = e.get("train.accumulate", 1)
    yield found(
        (f"train.accumulate={2 * accumulate}",),
        True,
        f"one exchange for {2 * accumulate} batches: about {seconds / 2 * 1e3:.0f} ms a batch "
        "less; the batch of a step doubles",
        share / 2.01,
    )
    if not e.get("comm.overlap", True):
        hidden = min(seconds, e.mean("backward"))
        yield found(
            ("comm.overlap=true",),
            False,
            f"up to {hidden * 1e3:.0f} ms a batch behind the backward pass",
            hidden / e.step,
        )


def large_buckets(e: Evidence) -> Iterator[Advice]:
    """All gradients in one bucket or two, so that none is exchanged before the last ones come."""
    if e.world < 2 or not e.gradients or not e.buckets or not e.get("comm.overlap", True):
        return
    largest = max(e.buckets)
    hidden = min(e.mean("communicate"), e.mean("backward"))
    if largest < e.gradients / 2 or e.gradients < 4 * _MB or hidden < 0.1 * e.step:
        return
    size = max(1, round(e.gradients / 4 / _MB))
    if size >= e.get("comm.bucket_cap_mb", 25):
        return
    yield Advice(
        "large_buckets",
        "hint",
        f"{largest / e.gradients:.0%} of the gradients are in one bucket of {largest / _MB:.1f} "
        "MB, whose exchange cannot begin before its last gradient is there",
        (f"comm.bucket_cap_mb={size}",),
        False,
        f"up to {hidden * 1e3:.0f} ms a batch of the exchange behind the backward pass",
        hidden / e.step / 2,
    )


def small_buckets(e: Evidence) -> Iterator[Advice]:
    """Many exchanges of little each, where each costs a latency."""
    many = len(e.buckets) >= _MANY and median(e.buckets) < 2 * _SMALL_BUCKET
    if e.world < 2 or not many or e.share("communicate") < 0.1:
        return
    yield Advice(
        "small_buckets",
        "hint",
        f"gradients go in {len(e.buckets)} buckets of {median(e.buckets) / _MB:.2f} MB each, "
        f"and {e.share('communicate'):.0%} of a step is exchange that nothing hides",
        ("comm.bucket_cap_mb=25",),
        False,
        "fewer exchanges, each of which costs a latency",
        e.share("communicate") / 4,
    )


def starving_loader(e: Evidence) -> Iterator[Advice]:
    """Ranks that wait for their next batch for more than 20 % of a step."""
    shares = [w / e.step for w in e.seconds["wait"]]
    worst = max(range(e.world), key=shares.__getitem__)
    if shares[worst] <= _STARVES:
        return
    parts = {name: e.seconds[name][worst] for name in ("sample", "features", "exchange")}
    main = max(parts, key=parts.__getitem__)
    listed = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in parts.items())
    who = f"rank {worst} waits" if e.world > 1 else "training waits"
    what = f"{who} for its next batch {shares[worst]:.0%} of a step; to make one takes {listed}"
    found = partial(Advice, "starving_loader", "warning", what)
    prefetch, gain = e.get("sampling.prefetch", 0), shares[worst]
    if not prefetch:
        made, rest = sum(parts.values()), e.step - e.mean("wait")
        yield found(
            ("sampling.prefetch=2",),
            False,
            f"batches made beside training: up to {min(made, rest) * 1e3:.0f} ms a batch less, "
            "where there are cores for both",
            gain,
        )
        return
    if main == "exchange" and e.world > 1:
        cache = e.get("sampling.cache", 0.0)
        if cache != 1:
            more = 1.0 if cache == "auto" else min(1.0, max(0.2, 2 * cache))
            yield found(
                (f"sampling.cache={more:g}",),
                False,
                "fewer rows from other ranks, for memory",
                gain / 2,
            )
        if e.get("sampling.topology") == "partitioned":
            yield found(
                ("sampling.topology=replicated",),
                False,
                "no exchange to draw neighbours, for the memory of the whole structure",
                gain / 2,
            )
        return
    cpus = e.get("cluster.cpus_per_worker", 1)
    if cpus < 2:
        yield found(
            (f"cluster.cpus_per_worker={cpus + 1}",),
            False,
            "a core of its own for the thread that makes batches",
            gain / 2,
        )
    key = "sampling.fanout" if main == "sample" else "sampling.batch_size"
    yield Advice(
        "starving_loader",
        "warning",
        what + f" ({key} decides how much that is)",
        (),
        True,
        "smaller fanouts, or fewer features, make a batch cheaper; the loader is the limit",
        gain / 3,
    )


def stragglers(e: Evidence) -> Iterator[Advice]:
    """A rank that holds up the others for a good part of the time."""
    for slow in (rank for rank in e.slow if rank.get("slow", 0) >= _OFTEN):
        number = slow["rank"]
        if number >= e.world:
            continue
        others = [r for r in range(e.world) if r != number]
        more = {
            name: e.seconds[name][number] - median(e.seconds[name][r] for r in others)
            for name in ("wait", *COMPUTE)
        }
        part = max(more, key=more.__getitem__)
        host = f" on {slow['host']}" if slow.get("host") else ""
        prefetch = 2 * e.get("sampling.prefetch", 0) or 2
        yield Advice(
            "stragglers",
            "warning",
            f"rank {number}{host} holds up the others in {slow['slow']:.0%} of the windows: its "
            f"{part} takes {more[part] * 1e3:.1f} ms a batch more than theirs",
            (f"sampling.prefetch={prefetch}",) if part == "wait" else (),
            False,
            "a longer queue evens out batches of unlike size"
            if part == "wait"
            else "see what else runs on its host and how it differs (raygnn check); the others "
            f"wait for {max(e.seconds['peers']) * 1e3:.1f} ms a batch",
            more[part] / e.step,
        )


def swinging_use(e: Evidence) -> Iterator[Advice]:
    """A busy share that goes up and down by more than 20 points from window to window."""
    kind = "gpu" if len(e.use["gpu"]) >= 10 else "cpu"
    values = sorted(e.use[kind])
    if len(values) < 10 or e.share("wait") < 0.05:
        return
    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
    if high - low <= _SWINGS:
        return
    prefetch = 2 * e.get("sampling.prefetch", 0) or 2
    yield Advice(
        "swinging_use",
        "hint",
        f"the {kind.upper()}s are busy between {low:.0%} and {high:.0%} from window to window, and "
        f"{e.share('wait'):.0%} of a step is wait for batches",
        (f"sampling.prefetch={prefetch}",),
        False,
        "a longer queue evens out batches of unlike size",
        e.share("wait") / 2,
    )


def unused_memory(e: Evidence) -> Iterator[Advice]:
    """GPUs with more than half of their memory free."""
    if e.gpu_memory is None or e.gpu_memory > _FREE:
        return
    batch = e.get("sampling.batch_size", 0)
    yield Advice(
        "unused_memory",
        "hint",
        f"at most {e.gpu_memory:.0%} of a GPU's memory was used",
        (f"sampling.batch_size={2 * batch}", f"train.lr_scaling={_scaling(e)}"),
        True,
        "fewer, larger steps, with less exchange for each seed",
    )


def learning_rate(e: Evidence) -> Iterator[Advice]:
    """A global batch that grew with the workers, and a learning rate that did not."""
    if e.world < 2 or e.get("train.lr_scaling") != "none":
        return
    batch = e.get("sampling.batch_size", 0)
    warmup = () if e.get("train.schedule.warmup") else ("train.schedule.warmup=0.05",)
    yield Advice(
        "learning_rate",
        "hint",
        f"{e.world} workers make a batch of {e.world * batch:,} seeds of {batch:,} each, and "
        f"train.lr is that of one",
        (f"train.lr_scaling={_scaling(e)}", *warmup),
        True,
        "as many epochs as one worker needs, if the rate was chosen for one",
    )


def _scaling(e: Evidence) -> str:
    return "linear" if e.get("train.optimizer") == "sgd" else "sqrt"


RULES: tuple[Callable[[Evidence], Iterator[Advice]], ...] = (
    communication,
    large_buckets,
    small_buckets,
    starving_loader,
    stragglers,
    swinging_use,
    unused_memory,
    learning_rate,
)
