"""HGCA: a dense window, and beside it the tokens that some head of the group finds salient."""
