"""Planted mistakes, each with the test that sees it."""
