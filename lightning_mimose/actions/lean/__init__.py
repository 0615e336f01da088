"""Lean saves: keep a recipe instead of a tensor wherever a cheap operation rebuilds it, bit for bit."""
