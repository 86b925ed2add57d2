"""Shared by the tests of the recipes."""

import sys

import pytest


@pytest.fixture(scope="session")
def recipe(root):
    """The module recipes/pretrain_gpt2.py."""
    sys.path.insert(0, str(root / "recipes"))
    try:
        import pretrain_gpt2
    finally:
        sys.path.pop(0)
    return pretrain_gpt2
