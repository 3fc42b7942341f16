"""Faster float32 on CPUs: small-batch kernels built with the system's compiler, and the decoder modules that use them.

Every part is optional. Without a compiler, or for layers that the kernels do not cover, PyTorch's own operators are used.
"""
