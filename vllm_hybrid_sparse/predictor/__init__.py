"""Predicts what a head needs before its host keys are read (Fluxion): labels, features, the network, its training."""
