"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU: slow, and the same arithmetic.

The choice is made when Triton is first imported: `tests/conftest.py` sees to it.
"""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        """Triton 3.6 turns arrays of one element into loop bounds, which numpy 2.4 refuses to do."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
