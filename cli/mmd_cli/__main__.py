"""`python -m mmd_cli` is `mmd`."""

from mmd_cli.program import main

main()
