"""Exports through targets that are not ours: the kernel's nvmet, and an SPDK application."""
