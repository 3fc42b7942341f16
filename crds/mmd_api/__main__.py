"""`python -m mmd_api` is `mmd`."""

from mmd_api.cli import main

main()
