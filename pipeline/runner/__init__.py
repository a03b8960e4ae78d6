"""Ray Data runs of any kind: this package knows neither videos nor questions."""
