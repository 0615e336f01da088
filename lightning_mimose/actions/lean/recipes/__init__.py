"""Recipes: which operation's result is rebuilt how, and from what. Importing this enters them all in the `table`.

Each module has those of one kind. To add a recipe, add a function to one of them and a row to
`tests/actions/lean/test_recipes.py`.
"""

from lightning_mimose.actions.lean.recipes import activations, arithmetic, norms, products, softmax, views

__all__ = ["activations", "arithmetic", "norms", "products", "softmax", "views"]
