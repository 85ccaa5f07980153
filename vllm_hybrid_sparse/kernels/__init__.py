"""One folder an operation: `reference.py` says what it computes, the files beside it compute it fast."""
