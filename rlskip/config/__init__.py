"""Structured configs, the steps grammar, validation, the legacy flag. Imports nothing heavy."""
