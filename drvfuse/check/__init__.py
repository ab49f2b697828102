# SPDX-License-Identifier: Apache-2.0
"""`drvfuse check`: runs every kernel under many schedules of the emulated driver, and mutants, which it must find."""
