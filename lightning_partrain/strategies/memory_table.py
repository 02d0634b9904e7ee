"""What the ranks hold, told once when training begins and once more after the first step, when all of it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_partrain import compat
from lightning_partrain.parallel import memory
from lightning_partrain.parallel.memory import BUCKETS, FEEDBACK, GRADIENTS, KINDS, MASTERS, STATE, Expectation
from lightning_partrain.parallel.replicate import ReplicatedModel

#: The two moments between which nothing is missing: gradients are there at the first, what the step leaves at the second.
FULL: tuple[memory.Moment, memory.Moment] = ("step", "between")


def in_words(amount: int | None) -> str:
    """Bytes, rounded. ``None`` is not known."""
    if amount is None:
        return "unknown"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:,.2f} {unit}"
    return f"{amount} B"


def most(there: Expectation) -> dict[str, tuple[str, int | None]]:
    """Kind -> its formula in words and its bytes, at the one of the :data:`FULL` moments that has more of it."""
    found: dict[str, tuple[str, int | None]] = {}
    for moment in FULL:
        formula, amounts = there.formula(moment), there.at(moment)
        for kind in KINDS:
            text = " + ".join(term.text(there.sizes) for term in formula.get(kind, [])) or "0"
            if kind not in found or (amounts[kind] or 0) > (found[kind][1] or 0):
                found[kind] = (text, amounts[kind])
    return found


def on_host(strategy: Any) -> set[str]:
    """Kinds that a strategy keeps in the memory of the host, where ranks have a GPU."""
    if getattr(strategy, "offload", "none") == "all" or getattr(strategy, "offload_parameters", False):
        return set(KINDS) - {BUCKETS}
    if getattr(strategy, "offload", "none") == "optimizer":
        return {STATE, MASTERS}
    return {STATE, MASTERS, GRADIENTS} if getattr(strategy, "offload_optimizer", False) else set()


def lines(there: Expectation, now: dict[str, int], who: str, host: set[str] | frozenset[str] = frozenset()) -> str:
    """The table, for the log.

    Args:
        there: what a rank will hold.
        now: what it holds, by kind.
        who: the strategy and its ranks, in words.
        host: see :func:`on_host`.
    """
    rows = [("", "formula", "expected", "now")]
    known = most(there)
    for kind, (text, amount) in known.items():
        if amount == 0 and not now[kind]:
            if kind in (BUCKETS, FEEDBACK):
                continue
            text = "none"
        where = " (host)" if kind in host and text != "none" else ""
        rows.append((kind + where, text, in_words(amount), in_words(now[kind]) if now[kind] else "-"))
    total = None if any(amount is None for _, amount in known.values()) else sum(a or 0 for _, a in known.values())
    rows.append(("in all", "", in_words(total), in_words(sum(now.values()))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        f"  {row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2].rjust(widths[2])}  {row[3].rjust(widths[3])}"
        for row in rows
    ]
    return "\n".join([_title(there, who), *table])


def _title(there: Expectation, who: str) -> str:
    counts, letters = (
        there.sizes.elements,
        {"T": "trained", "S": "in small tensors", "B": "in a bucket", "F": "not sent yet"},
    )
    used = {
        there.sizes.letters[term.what] for moment in FULL for terms in there.formula(moment).values() for term in terms
    }
    parts = [f"P = {counts['P']:,} parameters"]
    parts += [
        f"{letter} = {counts[letter]:,} {meaning}"
        for letter, meaning in letters.items()
        if letter in used and (letter != "T" or counts["T"] != counts["P"])
    ]
    return f"Memory of rank 0 ({who}; {', '.join(parts)}, N = {there.sizes.ranks}), activations apart; '-' comes with the first step:"


def after_step(there: Expectation, found: dict[str, int]) -> str:
    """The sentence for when the first step is done."""
    known = {kind: amount for kind, (_, amount) in most(there).items()}
    each = ", ".join(f"{kind} {in_words(amount)}" for kind, amount in found.items() if amount)
    total, of_all = sum(found.values()), [amount for amount in known.values() if amount is not None]
    if len(of_all) < len(known) or not sum(of_all):
        return f"Memory of rank 0 after the first step: {each}; {in_words(total)} in all."
    off = 100 * (total / sum(of_all) - 1)
    return f"Memory of rank 0 after the first step: {each}; {in_words(total)} in all, {off:+.1f} % from the formula."


def announce(strategy: Any) -> None:
    """At the end of a set-up for training. The first step of each optimizer is looked at; nothing is left in those that follow.

    Args:
        strategy: a :class:`MeshStrategy`, its layout made and its optimizers attached.
    """
    withdraw(strategy)
    if strategy.world_size == 1 or not strategy.is_global_zero:
        return
    layout: ReplicatedModel = strategy.model_parallel
    optimizers = [compat.unwrap_optimizer(optimizer) for optimizer in strategy.optimizers]
    there = memory.expectation(layout, optimizers)
    who = f"{type(strategy).__name__}, stage {there.stage}, {strategy.world_size} ranks"
    rank_zero_info(lines(there, memory.measured(layout, optimizers), who, on_host(strategy)))
    found = dict.fromkeys(KINDS, 0)
    left = {optimizer for optimizer in optimizers if any(group["params"] for group in optimizer.param_groups)}

    def look() -> None:
        for kind, amount in memory.measured(layout, optimizers).items():
            found[kind] = max(found[kind], amount)

    keeps_state = there.at("between")[STATE] != 0
    strategy.optimizer_step = _watched(
        strategy, left, keeps_state, look, lambda: rank_zero_info(after_step(there, found))
    )


def withdraw(strategy: Any) -> None:
    """Look no more, if :func:`announce` still does."""
    strategy.__dict__.pop("optimizer_step", None)


def _watched(
    strategy: Any,
    left: set[torch.optim.Optimizer],
    keeps_state: bool,
    look: Callable[[], None],
    done: Callable[[], None],
) -> Callable[..., Any]:
    """The strategy's own ``optimizer_step``, which puts itself back when all optimizers that are ``left`` have made a step."""
    step = strategy.optimizer_step

    def watched(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        def closure_then_look() -> Any:
            result = closure()
            look()
            return result

        output = step(optimizer, closure_then_look, *args, **kwargs)
        look()
        own = compat.unwrap_optimizer(optimizer)
        if own not in left:  # its second step: another makes none
            left.clear()
        elif any(own.state.values()) or not keeps_state:  # a step may be skipped
            left.discard(own)
        if not left:
            withdraw(strategy)
            done()
        return output

    return watched
