"""Triton kernels for bf16 and fp16 on a GPU, one file for each thing that a model does.

Each function has beside it what it computes as plain torch (`<name>_reference`): the tests compare the two, and other
devices run what the models' modules say. They trust their arguments, which the engine has checked (`RaggedBatch.load`,
`loader`). They allocate what they return, do not wait for the device, and so can be captured into a CUDA graph. Nothing
is compiled for a number of tokens: whatever depends on the model alone is a constant of the kernel, and a batch's size
is an ordinary argument that is not specialised, so that no request ever waits for a compiler that a warm-up has run.

Importing this package imports Triton, which a machine without a GPU may lack: only modules that run there import it.
"""
