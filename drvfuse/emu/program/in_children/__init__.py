# SPDX-License-Identifier: Apache-2.0
"""A folder that is put into PYTHONPATH for the processes that a program starts; its `sitecustomize` switches them."""
