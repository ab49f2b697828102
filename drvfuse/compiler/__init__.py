# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to PTX and cubins by NVRTC: which library, its options, the headers of a source, and the disk cache.

It imports `ptx` and the ground floor. It needs no GPU. (It is not named `compile`, which is a public function.)
"""
