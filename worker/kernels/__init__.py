"""Triton kernels for bf16 and fp16 on a GPU, one file for each thing that a model does.

Beside each function stands the same computation in plain torch (`<name>_reference`), and tests compare the two. Other
devices run the plain operations of the models' modules. Functions trust their arguments, which were checked before
(`worker.batch.ragged.check`, `worker.models.loader`). They allocate their results and do not wait for the device, so
they can be captured into a CUDA graph.

No kernel is compiled for one number of tokens. Sizes of the model are constants of a kernel; the size of a batch is an
ordinary argument that is not specialised. So after the warm-up no request waits for a compiler.

Importing this package imports Triton, which a machine without a GPU may lack: only modules that run there import it.
"""
