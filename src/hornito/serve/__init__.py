"""`hornito serve`: one model for many clients, over OpenAI's HTTP interface."""
