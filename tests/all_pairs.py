"""Which combinations of a test's parameters run: of all pairs, each one at least once.

Most faults need one value of a parameter, or two together (Kuhn, Wallace and Gallo 2004, "Software
fault interactions and implications for software testing"). A test of four parameters with five
values each has 625 combinations; some 30 hold all pairs. ``--every-combination`` runs all of them,
as a GPU does. Names that one ``parametrize`` gives together are one parameter: its rows are all
wanted. A row of the kernels' table is two, its dtype and the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

Factors = Mapping[str, Hashable]  # by the parameter's name, which of its values


def covering(cases: Sequence[Factors]) -> list[int]:
    """Numbers of cases in which every pair of values that some case has is. Those with the most
    pairs that none before had are taken first, and of these the earliest."""
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    missing = set().union(*pairs)
    left = list(range(len(cases)))
    taken = []
    while missing:
        best = max(left, key=lambda i: (len(pairs[i] & missing), -i))
        taken.append(best)
        left.remove(best)
        missing -= pairs[best]
    return sorted(taken)


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that run, in their order, and the others. Pairs are those of one device."""
    groups: dict[tuple, list[tuple[pytest.Item, dict]]] = defaultdict(list)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and item.get_closest_marker("gpu") is None:
            params = dict(call.params)
            key = item.nodeid.split("[")[0], params.pop("device", None)
            groups[key].append((item, params))
    left_out = set()
    for group in groups.values():
        factors = _factors([params for _, params in group], _given_together(group[0][0]))
        if factors and min(map(len, factors)) > 2:
            taken = set(covering(factors))
            left_out |= {item for i, (item, _) in enumerate(group) if i not in taken}
    return [x for x in items if x not in left_out], [x for x in items if x in left_out]


def _given_together(item: pytest.Item) -> dict[str, str]:
    """Names of parameters -> all that one ``parametrize`` gives at a time, where they are more."""
    together = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        if len(names) > 1:
            together |= dict.fromkeys(names, ", ".join(names))
    return together


def _factors(cases: list[dict], together: Mapping[str, str]) -> list[dict[str, int]]:
    """Values by the order in which they come up."""
    numbers: dict[str, dict] = defaultdict(dict)

    def number(name: str, key: Hashable) -> int:
        return numbers[name].setdefault(key, len(numbers[name]))

    factors = []
    for case in cases:
        found = {}
        rows: dict[str, tuple] = defaultdict(tuple)
        for name, value in case.items():
            if name in together:
                rows[together[name]] += (id(value),)
            elif hasattr(value, "dtype") and isinstance(getattr(value, "name", None), str):
                found[f"{name}.dtype"] = number(f"{name}.dtype", value.dtype)
                found[name] = number(name, value.name.replace(f"_{value.dtype}_", "_"))
            else:  # each combination has the same object
                found[name] = number(name, id(value))
        factors.append(found | {names: number(names, row) for names, row in rows.items()})
    return factors
