"""What a head needs, predicted before its host keys are read (Fluxion): labels, features, the network, its training."""
