"""Layouts: where the values of a parameter lie on the ranks, and how they are read and written whole."""
