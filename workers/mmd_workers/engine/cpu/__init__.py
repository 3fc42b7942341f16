"""Faster float32 on CPUs: small-batch kernels built with the system's compiler, and what in a decoder uses them.

Optional in every part: without a compiler, or for layers the kernels do not cover, PyTorch's own operators serve.
"""
