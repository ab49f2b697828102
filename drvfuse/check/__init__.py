# SPDX-License-Identifier: Apache-2.0
"""`drvfuse check`: every kernel under many schedules of the emulated driver, and known faults that must be found."""
