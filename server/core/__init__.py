"""Core of the service: the base of all features, independent of each of them."""
