"""Attention over pages that a list names, wherever each of them lies, and how long the list has to be."""
