"""Measures how fast the engine is, and limits steps. Knows no sequences."""
