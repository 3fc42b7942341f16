"""How fast the engine is and how much a step may take. Knows no sequences."""
