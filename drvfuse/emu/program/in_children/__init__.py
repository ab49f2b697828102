# SPDX-License-Identifier: Apache-2.0
"""A folder that is added to PYTHONPATH for the processes that a program starts. Its `sitecustomize` makes them use the
emulated driver.
"""
