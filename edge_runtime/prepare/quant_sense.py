"""How sensitive the blocks of a model are, the most harmful first found and the rest as far as the time allows.

A group of blocks alone is made INT8, and the change of the answers on few pictures is its harm. The group of most harm
is halved and both halves are measured, until single blocks are left or what is left is too little to matter. So a
search that is cut off knows the worst of it, whatever the number of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

__all__ = ["sense"]

_GROUPS = 8
_LITTLE = 0.05
"""Of the harm of all: what a group has to have to be halved."""


def sense(
    names: Sequence[str], harm_of: Callable[[frozenset[str]], float], allowed: Callable[[], bool]
) -> Mapping[str, float]:
    """Block -> its harm alone, of all `names` (in graph order), the worst first.

    `harm_of` measures some blocks together, at least once whatever `allowed` says. Harms add up as noise does, by their
    squares: in a group that was not halved each block has its part of that.
    """
    if not names:
        return {}
    size = -(-len(names) // _GROUPS)
    waiting: list[tuple[float, int, tuple[str, ...]]] = []
    found: dict[str, float] = {}

    def put(group: tuple[str, ...], place: int) -> None:
        harm = harm_of(frozenset(group))
        found.update(dict.fromkeys(group, harm / len(group) ** 0.5))
        if len(group) > 1:
            heapq.heappush(waiting, (-harm, place, group))

    for start in range(0, len(names), size):
        if start and not allowed():
            harm = max(found.values())  # not measured: as bad as the worst, so that it stays in float first
            found.update(dict.fromkeys(names[start:], harm))
            break
        put(tuple(names[start : start + size]), start)
    whole = sum(harm**2 for harm in found.values()) ** 0.5
    while waiting and -waiting[0][0] > _LITTLE * whole and allowed():
        _, place, group = heapq.heappop(waiting)
        middle = len(group) // 2
        put(group[:middle], place)
        put(group[middle:], place + middle)
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(found.items(), key=lambda each: (-each[1], order[each[0]])))
