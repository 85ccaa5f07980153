"""HGCA: attends to a dense window, and to the other tokens that some head of the group finds salient."""
