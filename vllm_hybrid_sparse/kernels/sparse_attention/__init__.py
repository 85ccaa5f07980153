"""Attention over some pages of one request."""
