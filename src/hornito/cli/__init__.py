"""The `hornito` command: main.py finds the verb, one file per verb does the work."""
