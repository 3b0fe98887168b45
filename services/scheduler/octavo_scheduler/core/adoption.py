"""A warm cache is taken over: what an executor says its pages hold, checked and named anew.

The executor has kept what an earlier scheduler told it (``PageNames``). Nothing of that is believed that can be worked out:
every hash is computed again from the token ids, under this scheduler's own key, down each chain from its root. What hangs in
the air is left out; where the story contradicts itself, all of it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from octavo_shared.plan import CacheOffer, PageNames

DEVICE, HOST = 0, 1


class DoubtfulError(ValueError):
    """An offer contradicts itself; the message says how."""


class Link(NamedTuple):
    """Content that continues content number ``parent``, and the pages that hold it, as (tier, page)."""

    parent: int
    tokens: bytes
    pages: tuple[tuple[int, int], ...]


def read_offers(offers: Sequence[CacheOffer], num_pages: tuple[int, int], block_size: int) -> dict[int, Link]:
    """Every content that is offered, by its number. ``num_pages`` are those of device and host.

    Raises:
        DoubtfulError: a page is named twice or does not exist, or one number stands for two contents.
    """
    links: dict[int, Link] = {}
    seen: set[tuple[int, int]] = set()
    for offer in offers:
        for tier, names in ((DEVICE, offer.device), (HOST, offer.host)):
            for page, number, parent, tokens in _rows(names, block_size):
                if not 0 <= page < num_pages[tier] or (tier, page) in seen:
                    raise DoubtfulError(f"page {page} is named twice or does not exist")
                seen.add((tier, page))
                known = links.get(number)
                if known is not None and (known.parent, known.tokens) != (parent, tokens):
                    raise DoubtfulError(f"content {number} is told in two ways")
                links[number] = Link(parent, tokens, (*(known.pages if known else ()), (tier, page)))
    return links


def _rows(names: PageNames, block_size: int) -> Iterator[tuple[int, int, int, bytes]]:
    if not len(names):
        return
    if not names.numbers.all() or (names.numbers < 0).any():
        raise DoubtfulError("a page is offered that holds nothing")
    if names.tokens.shape != (len(names), block_size) or (names.tokens < 0).any():
        raise DoubtfulError("token ids are missing or none")
    data, size = np.ascontiguousarray(names.tokens, np.int32).tobytes(), block_size * 4
    columns = zip(names.pages.tolist(), names.numbers.tolist(), names.parents.tolist(), strict=True)
    for row, (page, number, parent) in enumerate(columns):
        yield page, number, parent, data[row * size : (row + 1) * size]


def in_chains(links: Mapping[int, Link], roots: Mapping[int, bytes]) -> Iterator[tuple[int, int]]:
    """(number, depth) of every content that a chain from a root leads to, each after what it continues.

    Raises:
        DoubtfulError: a root's number is that of a content as well.
    """
    if any(number in links for number in roots):
        raise DoubtfulError("a root is content as well")
    children: defaultdict[int, list[int]] = defaultdict(list)
    for number, link in links.items():
        children[link.parent].append(number)
    row = [number for root in roots for number in children[root]]
    depth = 1
    while row:
        yield from ((number, depth) for number in row)
        row, depth = [child for number in row for child in children[number]], depth + 1
