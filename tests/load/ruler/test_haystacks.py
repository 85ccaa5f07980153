"""The text that needles are hidden in."""

from vllm_hybrid_sparse.load.ruler.haystacks import hide, noise


def test_needles_lie_at_the_depths_asked_for() -> None:
    sentences = [f"s{number}." for number in range(100)]
    parts = hide(sentences, ["A.", "B.", "C."], [0.75, 0.0, 1.0]).split()
    assert parts[0] == "B."
    assert parts[-1] == "C."
    assert parts.index("A.") == 76  # B. stands before it
    assert [part for part in parts if part.startswith("s")] == sentences


def test_noise_repeats() -> None:
    assert noise(9, 0)[0] == noise(9, 5)[4]
    assert len(noise(9, 0)) == 9
