"""How often each label comes, held against how often it came in the first batches."""

from __future__ import annotations

import math

FAIR = 0.75  # of the threshold: counts have no heavy tails, so that fewer deviations count as drift
POOLED = 128  # labels that are judged together, where single batches are too small to tell
AGREE = 3.0  # deviations within which the first batches are what fair draws give

Counts = list[float]


class Shares:
    """The counts of labels in the first batches, and what no fair draws from the same would give.

    The evidence against a class is the log likelihood ratio of two binomials with a share of their
    own over two with the same one: n times the divergence of the shares, whose tail in fair draws
    is below e^-evidence whatever the number of samples is (Chernoff), so that a batch of 32 of one
    of two classes tells as much as a slight shift among thousands. As many classes as there are
    may come out by chance; and where the first batches vary by more than fair draws (rows in the
    order of a file), so much more evidence is asked for.
    """

    def __init__(self, threshold: float) -> None:
        self.least = (FAIR * threshold) ** 2 / 2
        self.first: Counts = []  # of the first batches together
        self.limit = math.inf  # of evidence
        self.wide: Counts = []  # squared deviations of a count, for each label, that are to be told

    def settle(self, batches: list[Counts]) -> None:
        """Make limits of the counts of the first batches."""
        self.first = _sums(batches)
        total = sum(self.first)
        if not total:
            return
        most = max(1, len(batches) // 2)
        size = min(most, math.ceil(POOLED * len(batches) / total))
        joined = [_sums(batches[i : i + size]) for i in range(0, len(batches) - size + 1, size)]
        fair = max(1.0, self._variety(batches), self._variety(joined))
        self.limit = fair * (self.least + math.log(len(self.first)))
        shares = [count / total for count in self.first]
        self.wide = [self.limit * share * (1 - share) for share in shares]

    def odd(self, counts: Counts) -> str | None:
        """What is unlike the first batches, in words; None: nothing is."""
        n, total = sum(counts), sum(self.first)
        if not (n and total):
            return None
        per = n / total
        far = [  # the evidence against the rest is below that of a normal deviate
            label
            for label, (count, usual, wide) in enumerate(
                zip(counts, self.first, self.wide, strict=True)
            )
            if (count - per * usual) ** 2 > n * wide
        ]
        found, strongest = None, (self.limit, math.inf)
        for label in far:
            # of two classes both are as unlike: the one that there are more of is named
            evidence = _evidence(counts[label], n, self.first[label], total)
            if (round(evidence, 6), counts[label]) > strongest:
                found, strongest = label, (round(evidence, 6), counts[label])
        if found is None:
            return None
        share, was = counts[found] / n, self.first[found] / total
        return f"{share:.0%} of {n:.0f} labels are {found}, and {was:.0%} were among the first"

    def _variety(self, parts: list[Counts]) -> float:
        """By how much the parts vary more than fair draws; 1 where that may be chance."""
        total, evidence, shared = sum(self.first), 0.0, 0
        for label, usual in enumerate(self.first):
            if usual < 5 * len(parts):  # of rarer ones the evidence is less
                continue
            shared += 1
            evidence += sum(_evidence(part[label], sum(part), usual, total) for part in parts)
        draws = len(parts) * shared
        if not draws:
            return 1.0
        found = 2 * evidence / draws  # 1 in fair draws, as a squared normal deviate is
        return found if found > 1 + AGREE * math.sqrt(2 / draws) else 1.0


def joined(pool: Counts, counts: Counts) -> Counts:
    """The counts of both, if they are of as many classes."""
    same = len(pool) == len(counts)
    return [a + b for a, b in zip(pool, counts, strict=True)] if same else counts


def _sums(batches: list[Counts]) -> Counts:
    return [sum(counts) for counts in zip(*batches, strict=True)]


def _evidence(count: float, n: float, usual: float, total: float) -> float:
    """That `count` of `n` and `usual` of `total` have no share in common; in nats."""
    both = (count + usual) / (n + total)
    return n * _divergence(count / n, both) + total * _divergence(usual / total, both)


def _divergence(share: float, other: float) -> float:
    """Of two coins, in nats."""
    found = share * math.log(share / other) if share > 0 else 0.0
    return found + ((1 - share) * math.log((1 - share) / (1 - other)) if share < 1 else 0.0)
