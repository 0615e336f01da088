"""Grades of lean saves: what may be rebuilt."""

from __future__ import annotations

GRADES = ("lean", "lean+masks", "lean+attention", "lean+expansions", "lean+products")
"""Actions, each of which rebuilds what the one before does and more.

Element-wise operations and norms; masks as bits, and products with them; softmax from its scores; products whose result
is wider than what it is made from, so that a byte of it costs little; all matrix products and convolutions.
"""
ELEMENTWISE, MASKS, ATTENTION, EXPANSIONS, PRODUCTS = range(1, 6)
