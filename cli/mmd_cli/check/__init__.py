"""`mmd check`, from generated prompts to the verdict. It begins in `compare.py`."""
