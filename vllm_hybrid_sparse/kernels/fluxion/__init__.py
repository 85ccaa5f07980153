"""Fluxion: each head reads its own best blocks, as many as a predictor says, of a size chosen for the group."""
