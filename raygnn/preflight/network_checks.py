"""What the measured links between the nodes mean for the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from raygnn.config.places import size
from raygnn.preflight.findings import Finding
from raygnn.preflight.network import Link

HIGH_LATENCY_MS = 5.0
LOW_MBITS = 9_000.0  # what a line of 10 Gbit/s carries is 9.4

_LARGE_BUCKET_MB = 100


def network_findings(
    links: Sequence[Link],
    *,
    compression: str,
    accumulate: int,
    bucket_cap_mb: int,
    gradient_bytes: int | None,
) -> Iterator[Finding]:
    """At most one finding per check, about all links that it concerns, the worst one first.

    Args:
        links: as measured; the figures of local ones say nothing about the network.
        compression, accumulate, bucket_cap_mb: as configured.
        gradient_bytes: of one worker's gradients in 32-bit floats; None where that is unknown.
    """
    yield from network_reach(links)
    yield from network_latency(links, accumulate, bucket_cap_mb, gradient_bytes)
    yield from network_bandwidth(links, compression, accumulate, gradient_bytes)


def network_reach(links: Sequence[Link]) -> Iterator[Finding]:
    """Each node reaches the next one around a ring by TCP, with small and large messages."""
    # A link on which nothing came back is worse than one that carries small messages.
    bad = sorted((link for link in links if link.problem), key=lambda link: bool(link.latency_ms))
    if not bad:
        return
    worst = bad[0]
    remedy = (
        "let the nodes open TCP connections to each other on any port (firewall, security "
        "group); if they share another network, name its interface with "
        "--set comm.env.GLOO_SOCKET_IFNAME=NAME"
    )
    if worst.latency_ms is not None:
        remedy = (
            "small messages pass and large ones do not: give the interfaces of both nodes, and "
            f"all between them, the same MTU; else {remedy}"
        )
    yield Finding(
        "network_reach",
        "error",
        f"{_way(worst)} does not work: {worst.problem}{_others(bad, links)}",
        remedy,
        nodes=_nodes(bad),
        values={"links": [asdict(link) for link in bad]},
    )


def network_latency(
    links: Sequence[Link], accumulate: int, bucket_cap_mb: int, gradient_bytes: int | None
) -> Iterator[Finding]:
    """A message to the next node and back takes at most 5 ms."""
    links = [link for link in links if not link.local]
    slow = {link: link.latency_ms for link in links if link.latency_ms is not None}
    bad = sorted((link for link in slow if slow[link] > HIGH_LATENCY_MS), key=lambda x: -slow[x])
    if not bad:
        return
    advice = [_accumulate(accumulate)]
    buckets_are_many = gradient_bytes is None or gradient_bytes > bucket_cap_mb * 2**20
    if buckets_are_many and bucket_cap_mb < _LARGE_BUCKET_MB:
        advice.insert(0, f"larger gradient buckets (--set comm.bucket_cap_mb={_LARGE_BUCKET_MB})")
    yield Finding(
        "network_latency",
        "warn",
        f"a message {_way(bad[0])} and back takes {slow[bad[0]]:.1f} ms, more than "
        f"{HIGH_LATENCY_MS:g} ms{_others(bad, links)}",
        f"send less often: {', '.join(advice)}; or use nodes that are closer to each other",
        nodes=_nodes(bad),
        values={"links": [asdict(link) for link in bad], "limit_ms": HIGH_LATENCY_MS},
    )


def network_bandwidth(
    links: Sequence[Link], compression: str, accumulate: int, gradient_bytes: int | None
) -> Iterator[Finding]:
    """One connection to the next node carries what a line of 10 Gbit/s does."""
    nodes = len(_nodes(links))
    links = [link for link in links if not link.local]
    rate = {link: link.mbits for link in links if link.mbits is not None}
    bad = sorted((link for link in rate if rate[link] < LOW_MBITS), key=lambda x: rate[x])
    if not bad:
        return
    slowest = rate[bad[0]]
    what = (
        f"one connection {_way(bad[0])} carries {_speed(slowest)}, less than "
        f"{_speed(LOW_MBITS)}{_others(bad, links)}"
    )
    values = {"links": [asdict(link) for link in bad], "limit_mbits": LOW_MBITS}
    if gradient_bytes is not None:
        sent = gradient_bytes if compression == "none" else gradient_bytes // 2
        seconds = _exchange(sent, nodes, slowest)
        what += f"; the gradients are {size(sent)}, one exchange of them takes at least "
        what += f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
        values |= {"sent_bytes": sent, "exchange_seconds": seconds}
    advice = [_accumulate(accumulate)]
    if compression == "none":
        advice.insert(0, "half the bytes (--set comm.compression=bf16, or fp16)")
    yield Finding(
        "network_bandwidth",
        "warn",
        what,
        f"send less: {', '.join(advice)}",
        nodes=_nodes(bad),
        values=values,
    )


def _exchange(count: int, nodes: int, mbits: float) -> float:
    """Seconds that an all-reduce of ``count`` bytes takes at least at ``mbits``.

    Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    (2009): each of ``nodes`` has to send 2 (nodes - 1) / nodes of them, whatever the algorithm.
    """
    return 2 * (nodes - 1) / nodes * count * 8 / (mbits * 1e6)


def _accumulate(accumulate: int) -> str:
    return f"more batches per exchange (--set train.accumulate={2 * accumulate})"


def _way(link: Link) -> str:
    return f"from {link.source} to {link.target}"


def _others(bad: Sequence[Link], links: Sequence[Link]) -> str:
    """How many links there are like the one that the sentence is about."""
    return f"; it is so on {len(bad)} of {len(links)} links" if len(bad) > 1 else ""


def _nodes(links: Sequence[Link]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for link in links for node in (link.source, link.target)))


def _speed(mbits: float) -> str:
    return f"{mbits / 1000:.3g} Gbit/s" if mbits >= 1000 else f"{mbits:.3g} Mbit/s"
