"""Scores of answers by hand."""

from vllm_hybrid_sparse.load.ruler.question import all_references, any_reference


def test_all_references_counts_those_named() -> None:
    assert all_references(" 12345, 99999 and so on", ("12345", "67890")) == 0.5
    assert all_references("67890 12345", ("12345", "67890")) == 1.0
    assert all_references("", ("12345",)) == 0.0
    assert all_references("1234 5", ("12345",)) == 0.0


def test_case_does_not_matter() -> None:
    assert all_references("AcOrn", ("acorn",)) == 1.0
    assert any_reference("the town of STRELM.", ("Strelm",)) == 1.0


def test_any_reference_is_enough() -> None:
    assert any_reference("in Strelm", ("Brol", "Strelm")) == 1.0
    assert any_reference("in Goth", ("Brol", "Strelm")) == 0.0
