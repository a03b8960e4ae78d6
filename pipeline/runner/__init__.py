"""Ray Data runs of any kind: this room knows neither videos nor questions."""
