"""The text side: token ids, chat templates, streaming. No submodule loads tokenizers or jinja2
before it is used."""
