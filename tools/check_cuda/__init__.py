"""Checks of the compiled CUDA code that need nvcc but no GPU: ``make check-cuda``.

What is proved, for every kernel of ours and every architecture that is compiled here: no register
is spilled; floating-point arithmetic is correctly rounded and cannot be contracted; columns move in
vectors; nothing that is linked in waits for the device.
"""
