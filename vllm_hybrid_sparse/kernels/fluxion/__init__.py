"""Fluxion: each head selects its best blocks, as many as a predictor says, of a size chosen for the group."""
