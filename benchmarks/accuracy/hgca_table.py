"""HGCA's table 1 from rows of `perplexity`: perplexity by β and by the dense window's share of the KV cache.

    python -m benchmarks.accuracy.perplexity --text PATH --selections hgca --out rows.jsonl
    python -m benchmarks.accuracy.hgca_table rows.jsonl

Each perplexity comes with the KV bytes that a decode step read, dense window and packed copies together.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.plots import Summary, load
from benchmarks.accuracy.selections import FULL, HGCA_BETAS, HGCA_SHARES, HGCA_TOKENS, hgca_name
from benchmarks.accuracy.summaries import PERPLEXITY, groups_of
from benchmarks.report import markdown_table


def table(summaries: Sequence[Summary]) -> str:
    """The table as Markdown; cells that were not measured are empty.

    raises   ValueError if full attention was not measured, or rows were measured with different settings
    """
    measured = [row for row in summaries if (row["measure"], row["tokens"]) == (PERPLEXITY, HGCA_TOKENS)]
    groups = groups_of([row for row in measured if PERPLEXITY in row])
    if len(groups) > 1:
        apart = "; ".join(", ".join(setting) or "neither" for _, _, *setting in groups)
        raise ValueError(f"the rows were measured with different settings: {apart}; give those of one")
    rows = {row["selection"]: row for group in groups.values() for row in group}
    if FULL not in rows:
        raise ValueError(f"selection={FULL}: must be among the rows, it is the baseline")
    full = rows[FULL][PERPLEXITY]

    def cell(beta: float, share: float) -> str:
        row = rows.get(hgca_name(beta, share))
        if row is None:
            return ""
        return f"{row[PERPLEXITY]:.3f} ({row[PERPLEXITY] / full - 1:+.1%}), {row['bytes_read']:.0%} read"

    headings = (f"baseline {full:.3f}; share in the window", *(f"β = {beta:g}" for beta in HGCA_BETAS))
    return markdown_table(
        headings, [(f"{share:g}", *(cell(beta, share) for beta in HGCA_BETAS)) for share in HGCA_SHARES]
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON) or rows (JSONL)")
    options = parser.parse_args(arguments)
    try:
        print(table(load(options.files)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
