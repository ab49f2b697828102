# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to PTX and cubins by NVRTC: which library, its options, the headers of a source, and the disk cache.

This package needs no GPU. Besides `ptx` it imports only errors, config, dtypes, lazy and tables. (It is not named
`compile`, which is a public function.)
"""
