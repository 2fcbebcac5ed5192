"""Results for a person and for a program."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from async_pp.bench.survive.random_faults import RandomFaults
from async_pp.bench.survive.restarts import Kill, Restarts


def figures(timed: Restarts | None, chaos: RandomFaults | None) -> dict[str, Any]:
    """All figures, for JSON; what was not measured is null. Keys are the attributes of the classes."""
    return {
        "restarts": timed
        and {
            **asdict(timed),
            "first_s": timed.first_s,
            "ratio_to_vllm_cold_start": timed.ratio("vllm"),
            "ratio_to_own_cold_start": timed.ratio("async_pp"),
            "broken": timed.broken(),
        },
        "random_faults": chaos and {**asdict(chaos), "broken": chaos.broken()},
    }


def table(timed: Restarts | None, chaos: RandomFaults | None) -> str:
    """The same, as text."""
    parts = [_restarts(timed)] if timed is not None else []
    parts += [_random_faults(chaos)] if chaos is not None else []
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _restarts(timed: Restarts) -> list[str]:
    lines = ["One rank killed under load, medians (slowest) in seconds since the kill:"]
    ranks = sorted({kill.rank for kill in timed.kills})
    lines += [_kills(f"rank {rank}", [kill for kill in timed.kills if kill.rank == rank]) for rank in ranks]
    lines.append(_kills("all", timed.kills))
    lines.append("")
    for system, starts in timed.cold_start_s.items():
        ratio = timed.first_s / statistics.median(starts)
        lines.append(
            f"cold start to first token, {system}: {statistics.median(starts):.1f} s;"
            f" kill to next token is {ratio:.2f} of it"
        )
    account = timed.account
    lines.append(f"{account.sent} requests, {account.completed} completed, {account.different} with other tokens")
    return lines


def _kills(title: str, kills: list[Kill]) -> str:
    others = [kill.others_gone_s for kill in kills if kill.others_gone_s is not None]
    figures = {
        "ended": _both((kill.gone_s for kill in kills), 3),
        "others ended": _both(others, 3),
        "next token": _both((kill.first_s for kill in kills), 2),
        "all streams": _both((kill.all_s for kill in kills), 2),
    }
    return f"  {title:7} " + "  ".join(f"{name} {figure}" for name, figure in figures.items())


def _both(values: Iterable[float], digits: int) -> str:
    found = list(values)
    return f"{statistics.median(found):.{digits}f} ({max(found):.{digits}f})" if found else "-"


def _random_faults(chaos: RandomFaults) -> list[str]:
    account, memory, left = chaos.account, chaos.memory, [*chaos.left.processes, *chaos.left.files]
    for_nothing = sum(not fault.sent for fault in chaos.faults)
    lost = f"hung {account.hung} + broken {account.broken} + open {account.open}"
    grown = f"{memory.first_mib:.0f} -> {memory.last_mib:.0f}, {memory.mib_per_minute:+.2f} a minute"
    counts = f"descriptors {_change(memory.descriptors)}, threads {_change(memory.threads)}"
    return [
        f"Random faults for {chaos.seconds:.0f} s: {_named(chaos.sent)}; came while no such rank ran: {for_nothing}",
        f"  sent {account.sent} = completed {account.completed} + failed {account.failed} + {lost}",
        f"  failed with: {_named(account.failures)}",
        f"  broken by: {_named(account.wrong)}",
        f"  told twice: {account.twice}",
        f"  with other tokens than undisturbed: {account.different}; differ already undisturbed: {account.unsteady}",
        f"  at the end: {_named(chaos.gauges)}",
        f"  server's memory, MiB: {grown}",
        f"  server's {counts}",
        f"  exit code {chaos.left.exit_code}; left: {', '.join(left) or 'nothing'}",
    ]


def _change(ends: tuple[int, int]) -> str:
    return f"{ends[0]} -> {ends[1]}"


def _named(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in counts.items()) or "nothing"
