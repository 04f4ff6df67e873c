"""Structured configs, the steps grammar, validation, legacy flags. Imports nothing heavy."""
