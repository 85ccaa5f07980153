"""HGCA's table 1, on rows made by hand."""

import pytest

from benchmarks.accuracy.hgca_table import table
from benchmarks.accuracy.selections import GROUPS, HGCA_BETAS, HGCA_SHARES, SELECTIONS, hgca_name, retained_of


def test_the_dense_window_is_its_share_of_the_tokens() -> None:
    assert len(GROUPS["hgca"]) == 1 + 4 * 3
    for beta in HGCA_BETAS:
        for share in HGCA_SHARES:
            name = hgca_name(beta, share)
            retained = retained_of(name)
            assert retained.sink_tokens + retained.window_tokens == share * 4096
            assert SELECTIONS[name]["hgca_beta"] == beta


def test_a_cell_says_the_perplexity_against_full_attentions_and_what_was_read() -> None:
    rows = [
        {"measure": "perplexity", "tokens": 4096, "selection": name, "perplexity": perplexity, "bytes_read": read}
        for name, perplexity, read in (("full", 10.0, 1.0), (hgca_name(0.5, 0.25), 11.0, 0.4))
    ]
    heading, _, *lines = table(rows).splitlines()
    assert "baseline 10.000" in heading
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["0.25", "0.5", "0.75"]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells == ["0.25", "", "11.000 (+10.0%), 40% read", "", ""]
    with pytest.raises(ValueError, match="selection=full"):
        table(rows[1:])
    with pytest.raises(ValueError, match="measured with different settings: neither; kv_cache_dtype=fp8; give those"):
        table([*rows, rows[1] | {"settings": {"kv_cache_dtype": "fp8"}}])
