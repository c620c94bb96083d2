"""Tests of the acceptance core, against a slow reference written from the paper."""
