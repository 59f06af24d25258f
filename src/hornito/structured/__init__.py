"""Answers of a given form: JSON of a schema, a regular expression, a grammar (docs/structured.md).

`formats` says what a caller may ask for, without any dependency; `grammar` follows an answer token
by token with the package llguidance, which is loaded when a form is first asked for.
"""
