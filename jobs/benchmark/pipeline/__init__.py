"""Measure the whole job beside a plain DataLoader loop on the same videos, with an encoder that only sleeps."""
