"""How tests wait, keep time, start programs and are reported."""
