"""Estimate what pages weigh for decode rows from key codes that lie by block of the request."""
