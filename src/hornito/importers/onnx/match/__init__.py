"""Matchers: one file for each kind of thing that exports spell out."""
